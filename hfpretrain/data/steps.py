"""One item = one optimizer step: which rows of the stream of blocks it takes, and this rank's share of them.

The position in the data is the step number, so resuming is O(1), and the rows of a step depend on the order of blocks
alone: not on the number of ranks, not on how many rows fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from hfpretrain.data.collator import IGNORED_LABEL, Block
from hfpretrain.data.order import BlockOrder
from hfpretrain.errors import ConfigError, Problem


class Blocks(Protocol):
    """Anything whose item b is block b, `PackedBlocks` without an order for one."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Any: ...


class TrainingSteps(Dataset[list[dict[str, Any]]]):
    """Map-style Dataset: item s is the list of this rank's micro-batches of optimizer step s.

    Step s has `rows = batch_tokens / sequence_length` rows: positions [s * rows, (s + 1) * rows) of the stream of
    blocks. Rank r takes rows r * rows // W up to (r + 1) * rows // W of them, in order, cut into micro-batches of at
    most `per_device_train_batch_size` rows. All ranks get the same number of micro-batches, because ZeRO-2 and ZeRO-3
    communicate in each one: a rank with fewer rows ends with fillers of one row whose labels are all -100, so that they
    add nothing to loss or gradient. Use it in a DataLoader with `batch_size=None`, without any distributed sampler.

    Args:
        blocks: block number -> block, without an order of its own.
        order: the order of blocks over all epochs.
        batch_tokens: input tokens of one optimizer step over all ranks; a multiple of sequence_length.
        sequence_length: tokens per row.
        per_device_train_batch_size: most rows of one micro-batch.
        rank, world_size: this process and how many there are.
        collator: list of blocks -> tensors of one micro-batch, with "labels".
        num_steps: length of this Dataset, in optimizer steps.

    Raises:
        ConfigError: batch_tokens is not a positive multiple of sequence_length.
        ValueError: rank, sizes or order are impossible.
    """

    def __init__(
        self,
        blocks: Blocks,
        order: BlockOrder,
        *,
        batch_tokens: int,
        sequence_length: int,
        per_device_train_batch_size: int,
        rank: int,
        world_size: int,
        collator: Callable[[Sequence[Block]], dict[str, Any]],
        num_steps: int,
    ) -> None:
        if getattr(blocks, "order", None) is not None:
            raise ValueError(
                "blocks have an order of their own and would be shuffled twice; give PackedBlocks without order"
            )
        if order.num_blocks != len(blocks):
            raise ValueError(f"order is over {order.num_blocks} blocks but there are {len(blocks)}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of world_size {world_size}; rank must be in [0, world_size)")
        if per_device_train_batch_size < 1 or num_steps < 0:
            raise ValueError(f"{per_device_train_batch_size=} must be at least 1 and {num_steps=} at least 0")
        self.blocks = blocks
        self.order = order
        self.rows_per_step = rows_per_step(batch_tokens=batch_tokens, sequence_length=sequence_length)
        self.batch_tokens = batch_tokens
        self.per_device_rows = per_device_train_batch_size
        self.rank = rank
        self.world_size = world_size
        self.collator = collator
        self.num_steps = num_steps
        self.micro_batches = micro_batches_per_step(
            rows=self.rows_per_step, world_size=world_size, per_device_rows=per_device_train_batch_size
        )

    def __len__(self) -> int:
        """Number of optimizer steps."""
        return self.num_steps

    def __getitem__(self, step: int) -> list[dict[str, Any]]:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} asked for, but the run has {self.num_steps} steps (0 is the first)")
        start = step * self.rows_per_step
        first = start + self.rank * self.rows_per_step // self.world_size
        last = start + (self.rank + 1) * self.rows_per_step // self.world_size
        blocks = [self.blocks[int(number)] for number in self.order.blocks_at(np.arange(first, last))]
        # Rows of like length share a micro-batch, so that little padding is computed where a collator cuts it off.
        blocks.sort(key=lambda block: -int(np.sum(block["piece_lengths"])))
        batches = [
            self.collator(blocks[low : low + self.per_device_rows])
            for low in range(0, len(blocks), self.per_device_rows)
        ]
        while len(batches) < self.micro_batches:
            batches.append(self._filler(start))
        return batches

    def position(self, step: int) -> dict[str, float | int]:
        """Where a step stands in the data: {"step", "epoch" (fraction of epochs before it), "first_position"}."""
        return {"step": step, "epoch": self.epoch(step), "first_position": step * self.rows_per_step}

    def epoch(self, step: int) -> float:
        """Epochs that are done when `step` begins."""
        return step * self.rows_per_step / self.order.num_blocks

    def _filler(self, position: int) -> dict[str, Any]:
        """A real row (so that no kernel sees anything unusual) that nothing is learnt from."""
        batch = self.collator([self.blocks[self.order.block_at(position)]])
        batch["labels"] = torch.full_like(batch["labels"], IGNORED_LABEL)
        return batch


class StepSampler(Sampler[int]):
    """Steps in order, from wherever the run stands when iteration begins (a checkpoint may be loaded until then)."""

    def __init__(self, first_step: Callable[[], int], num_steps: int) -> None:
        self._first_step = first_step
        self._num_steps = num_steps

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._first_step(), self._num_steps))

    def __len__(self) -> int:
        """Steps of the whole run, done ones included: the Trainer takes this for its length."""
        return self._num_steps


def rows_per_step(*, batch_tokens: int, sequence_length: int) -> int:
    """Rows of one optimizer step over all ranks: batch_tokens / sequence_length.

    Raises:
        ConfigError: it is not a whole number of at least 1.
    """
    rows, rest = divmod(batch_tokens, sequence_length)
    if rows < 1 or rest:
        nearest = [n * sequence_length for n in (rows, rows + 1) if n]
        raise ConfigError(
            [
                Problem(
                    what=f"batch_tokens must be a whole number of rows of sequence_length = {sequence_length} tokens",
                    given=f"batch_tokens = {batch_tokens} = {batch_tokens / sequence_length:.3f} rows",
                    source="batch_tokens, sequence_length",
                    remedy=f"set batch_tokens to {' or '.join(str(n) for n in nearest)}, or change sequence_length",
                )
            ]
        )
    return rows


def micro_batches_per_step(*, rows: int, world_size: int, per_device_rows: int) -> int:
    """Forward-backward passes of every rank in one optimizer step: ceil(ceil(rows / world_size) / per_device_rows)."""
    most_rows_of_a_rank = -(-rows // world_size)
    return -(-most_rows_of_a_rank // per_device_rows)
