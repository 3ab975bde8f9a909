"""Steps: the same rows in the same order whatever the ranks and micro-batches; every rank takes as many of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hfpretrain.data.collator import PackedCollator
from hfpretrain.data.order import BlockOrder
from hfpretrain.data.steps import StepSampler, TrainingSteps, micro_batches_per_step, rows_per_step
from hfpretrain.errors import ConfigError

LENGTH = 4


class NumberedBlocks:
    """Block b is [b, b, b, b], so that a row tells which block it is."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def __len__(self) -> int:
        return self.num_blocks

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": np.full(LENGTH, i), "piece_lengths": np.array([LENGTH])}


def steps(*, rows: int, per_device: int, rank: int = 0, world: int = 1, num_blocks: int = 11) -> TrainingSteps:
    return TrainingSteps(
        NumberedBlocks(num_blocks),
        BlockOrder(num_blocks, 5),
        batch_tokens=rows * LENGTH,
        sequence_length=LENGTH,
        per_device_train_batch_size=per_device,
        rank=rank,
        world_size=world,
        collator=PackedCollator(),
        num_steps=6,
    )


def real_rows(batches: list[dict[str, Any]]) -> list[int]:
    """Blocks of the rows that carry a loss."""
    rows = [row for batch in batches for row in zip(batch["input_ids"], batch["labels"], strict=True)]
    return [int(inputs[0]) for inputs, labels in rows if (labels != -100).any()]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("per_device", [1, 2, 3, 16])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_rows_depend_on_the_step_alone(rows: int, per_device: int, world: int) -> None:
    order = BlockOrder(11, 5)
    ranks = [steps(rows=rows, per_device=per_device, rank=rank, world=world) for rank in range(world)]
    for step in range(6):
        items = [rank[step] for rank in ranks]
        got = [block for item in items for block in real_rows(item)]
        assert got == order.blocks_at(np.arange(step * rows, (step + 1) * rows)).tolist()
        expected = micro_batches_per_step(rows=rows, world_size=world, per_device_rows=per_device)
        assert {len(item) for item in items} == {expected}
        assert all(batch["input_ids"].shape[0] <= per_device for item in items for batch in item)


def test_fillers_have_a_real_row_and_no_target() -> None:
    # 5 rows over 4 ranks, one row each: 1 1 1 2 rows, so the first three ranks get one filler.
    items = [steps(rows=5, per_device=1, rank=rank, world=4)[0] for rank in range(4)]
    assert [len(real_rows(item)) for item in items] == [1, 1, 1, 2]
    filler = items[0][1]
    assert filler["input_ids"].shape == (1, LENGTH)
    assert bool((filler["labels"] == -100).all())
    assert "position_ids" in filler


def test_works_in_a_data_loader_and_starts_anywhere() -> None:
    dataset = steps(rows=3, per_device=2)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, sampler=range(4, 6))
    assert [real_rows(item) for item in loader] == [real_rows(dataset[4]), real_rows(dataset[5])]


def test_position() -> None:
    dataset = steps(rows=3, per_device=2)
    assert dataset.position(5) == {"step": 5, "epoch": 15 / 11, "first_position": 15}
    assert dataset.epoch(0) == 0.0
    assert len(dataset) == 6
    with pytest.raises(IndexError, match="the run has 6 steps"):
        dataset[6]


def test_batch_tokens_must_be_whole_rows() -> None:
    assert rows_per_step(batch_tokens=4096, sequence_length=512) == 8
    with pytest.raises(ConfigError, match="set batch_tokens to 4096 or 4608"):
        rows_per_step(batch_tokens=4100, sequence_length=512)
    with pytest.raises(ConfigError, match="set batch_tokens to 512,"):
        rows_per_step(batch_tokens=100, sequence_length=512)


def test_impossible_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 of world_size 2"):
        steps(rows=2, per_device=1, rank=2, world=2)
    with pytest.raises(ValueError, match="order is over 4 blocks but there are 3"):
        TrainingSteps(
            NumberedBlocks(3),
            BlockOrder(4, 0),
            batch_tokens=LENGTH,
            sequence_length=LENGTH,
            per_device_train_batch_size=1,
            rank=0,
            world_size=1,
            collator=PackedCollator(),
            num_steps=1,
        )


class Growing:
    """2, 3, 4, ... rows."""

    def rows_of(self, step: int) -> tuple[int, int]:
        return step * (step + 3) // 2, step + 2


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_rows_of_steps_that_grow(world: int) -> None:
    order = BlockOrder(11, 5)
    settings = {"sequence_length": LENGTH, "per_device_train_batch_size": 2, "world_size": world, "num_steps": 7}
    ranks = [
        TrainingSteps(
            NumberedBlocks(11), order, batch_tokens=Growing(), rank=rank, collator=PackedCollator(), **settings
        )
        for rank in range(world)
    ]
    seen: list[int] = []
    for step in range(7):
        items = [rank[step] for rank in ranks]
        seen += [block for item in items for block in real_rows(item)]
        needed = micro_batches_per_step(rows=step + 2, world_size=world, per_device_rows=2)
        assert {len(item) for item in items} == {needed}
        assert ranks[0].batch_tokens(step) == (step + 2) * LENGTH
        assert ranks[0].position(step + 1) == {"step": step + 1, "epoch": len(seen) / 11, "first_position": len(seen)}
        key = Growing().rows_of(step)  # what the sampler hands to a loader's process
        assert [real_rows(batch) for batch in [ranks[0][key]]] == [real_rows(ranks[0][step])]
    assert seen == order.blocks_at(np.arange(2 + 3 + 4 + 5 + 6 + 7 + 8)).tolist()  # one after another, no gap
    assert list(StepSampler(lambda: 5, ranks[0])) == [(20, 7), (27, 8)]
