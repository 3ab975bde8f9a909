"""Packing against references a person can check: slicing, and best-fit decreasing one piece at a time."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from hfpretrain.data.packing import PackedIndex, pack_best_fit, pack_concat, pack_single


def blocks_of(index: PackedIndex) -> list[list[tuple[int, int]]]:
    return [
        list(zip(*(part.tolist() for part in index.pieces(block)), strict=True)) for block in range(index.num_blocks)
    ]


def best_fit_decreasing(lengths: list[int], capacity: int) -> Counter[tuple[int, ...]]:
    """One piece at a time, as a textbook has it; among blocks with equal room the one that has had it for longest."""
    pieces = [p for n in lengths for p in [capacity] * (n // capacity) + [n % capacity] * (n % capacity > 0)]
    blocks: list[list[int]] = []
    since: list[int] = []
    for time, piece in enumerate(sorted(pieces, reverse=True)):
        room = [capacity - sum(block) for block in blocks]
        fitting = [b for b in range(len(blocks)) if room[b] >= piece]
        if fitting:
            best = min(fitting, key=lambda b: (room[b], since[b]))
            blocks[best].append(piece)
            since[best] = time
        else:
            blocks.append([piece])
            since.append(time)
    return Counter(tuple(sorted(block)) for block in blocks)


@pytest.mark.parametrize("seed", range(40))
def test_best_fit_equals_the_piece_by_piece_algorithm(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(2, 60))
    lengths = np.maximum(1, rng.lognormal(np.log(capacity / 3), 1.2, int(rng.integers(1, 300)))).astype(np.int64)
    index = pack_best_fit(lengths, capacity)
    ours = Counter(tuple(sorted(n for _, n in block)) for block in blocks_of(index))
    assert ours == best_fit_decreasing(lengths.tolist(), capacity)


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_places_every_token_once_and_cuts_only_long_documents(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, capacity = rng.integers(1, 40, 100), 16
    index = pack_best_fit(lengths, capacity)
    seen = sorted(piece for block in blocks_of(index) for piece in block)
    starts = np.cumsum(lengths) - lengths
    expected = [
        (int(start) + cut, min(capacity, int(n) - cut))
        for start, n in zip(starts, lengths, strict=True)
        for cut in range(0, int(n), capacity)
    ]
    assert seen == expected
    assert all(sum(n for _, n in block) <= capacity for block in blocks_of(index))
    assert index.dropped_tokens == 0
    assert index.utilisation == pytest.approx(lengths.sum() / (index.num_blocks * capacity))


def test_best_fit_by_hand() -> None:
    # 5 5 | 4 4 2 | 4 3 3 : the 2 goes where 2 are left, not where 3 are left.
    index = pack_best_fit(np.array([2, 5, 4, 3, 4, 5, 4, 3]), 10)
    assert sorted(sorted(n for _, n in block) for block in blocks_of(index)) == [[2, 4, 4], [3, 3, 4], [5, 5]]
    assert index.utilisation == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_concat_is_slicing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(2, 30))
    lengths = rng.integers(1, 50, int(rng.integers(1, 60)))
    owner = np.repeat(np.arange(len(lengths)), lengths)  # document of each token
    index = pack_concat(lengths, capacity)
    assert index.num_blocks == len(owner) // capacity
    assert index.dropped_tokens == len(owner) % capacity
    for block, pieces in enumerate(blocks_of(index)):
        part = owner[block * capacity : (block + 1) * capacity]
        cuts = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), capacity]
        expected = [(block * capacity + a, b - a) for a, b in pairwise(cuts)]
        assert pieces == expected
    assert index.utilisation == (1.0 if index.num_blocks else 0.0)
    assert index.target_tokens == index.num_tokens - len(index.piece_starts)


@pytest.mark.parametrize("pack", [pack_concat, pack_best_fit])
def test_no_documents_gives_no_blocks(pack: type) -> None:
    index = pack(np.zeros(0, dtype=np.int64), 8)
    assert (index.num_blocks, index.utilisation, index.dropped_tokens) == (0, 0.0, 0)
    with pytest.raises(IndexError, match="there are 0 blocks"):
        index.pieces(0)


@pytest.mark.parametrize("pack", [pack_concat, pack_best_fit])
def test_impossible_input_is_refused(pack: type) -> None:
    with pytest.raises(ValueError, match="document 1 has length 0"):
        pack(np.array([3, 0, 2]), 8)
    with pytest.raises(ValueError, match="sequence_length is 1"):
        pack(np.array([3]), 1)
    with pytest.raises(ValueError, match="1-D integer"):
        pack(np.array([3.5]), 8)


def test_best_fit_wide_blocks_and_many_documents() -> None:
    lengths = np.full(1000, 70_000)  # beyond 16 bits, where the sort key changes its type
    index = pack_best_fit(lengths, 140_000)
    assert index.num_blocks == 500
    assert index.utilisation == 1.0


def test_single_puts_each_piece_in_a_block_of_its_own() -> None:
    index = pack_single(np.array([3, 9, 4]), 4)
    assert blocks_of(index) == [[(0, 3)], [(3, 4)], [(7, 4)], [(11, 1)], [(12, 4)]]
    assert index.dropped_tokens == 0
    assert pack_single(np.array([], dtype=np.int64), 4).num_blocks == 0
