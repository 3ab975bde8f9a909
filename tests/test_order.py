"""The computed order: a permutation in every epoch, another one for every epoch and seed, and fair."""

from __future__ import annotations

import numpy as np
import pytest

from hfpretrain.data.order import BlockOrder

PINNED: list[int] = [9, 0, 5, 2, 7, 6, 4, 1, 3, 8, 4, 9, 1, 2, 8, 7, 5, 6, 3, 0]


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1000, 4097])
@pytest.mark.parametrize("seed", [0, 1, -5, 2**70])
def test_every_epoch_is_a_permutation(num_blocks: int, seed: int) -> None:
    order = BlockOrder(num_blocks, seed)
    for epoch in range(3):
        blocks = order.blocks_at(np.arange(epoch * num_blocks, (epoch + 1) * num_blocks))
        assert sorted(blocks.tolist()) == list(range(num_blocks))


def test_scalar_and_vector_agree_and_shape_is_kept() -> None:
    order = BlockOrder(1000, 7)
    positions = np.array([[0, 999, 1000], [5, 123_456, 999_999_999]])
    blocks = order.blocks_at(positions)
    assert blocks.shape == positions.shape
    assert [[order.block_at(int(i)) for i in row] for row in positions] == blocks.tolist()
    assert order.blocks_at(np.zeros(0, dtype=np.int64)).shape == (0,)


def test_epochs_and_seeds_differ() -> None:
    n = 1000
    first, second = (BlockOrder(n, 0).blocks_at(np.arange(e * n, (e + 1) * n)) for e in (0, 1))
    other = BlockOrder(n, 1).blocks_at(np.arange(n))
    # Two independent random permutations agree in 1 place on average (Poisson); 10 has probability 1e-7.
    for a, b in ((first, second), (first, other), (first, np.arange(n))):
        assert int((a == b).sum()) < 10


def test_order_is_fair() -> None:
    """Over many epochs each block comes first equally often, and neighbours in the data do not stay neighbours."""
    n, epochs = 10, 5000
    order = BlockOrder(n, 3)
    blocks = order.blocks_at(np.arange(n * epochs).reshape(epochs, n))
    for position in range(n):
        counts = np.bincount(blocks[:, position], minlength=n)
        chi_squared = float(((counts - epochs / n) ** 2 / (epochs / n)).sum())
        assert chi_squared < 33.7  # 9 degrees of freedom, p = 1e-4
    steps = np.diff(BlockOrder(10_000, 3).blocks_at(np.arange(10_000)))
    assert int((steps == 1).sum()) < 10  # 1 expected


def test_order_is_pinned() -> None:
    """A change of this order would silently change what every resumed run sees next."""
    order = BlockOrder(10, 0)
    assert order.blocks_at(np.arange(20)).tolist() == PINNED


def test_impossible_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to order"):
        BlockOrder(0, 0)
    with pytest.raises(ValueError, match="negative"):
        BlockOrder(5, 0).block_at(-1)


def test_huge_epochs_need_no_memory() -> None:
    order = BlockOrder(10**12, 0)
    blocks = order.blocks_at(np.arange(1000))
    assert len(set(blocks.tolist())) == 1000
    assert blocks.min() >= 0
    assert blocks.max() < 10**12
