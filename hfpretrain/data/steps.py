"""One item = one optimizer step: which rows of the stream of blocks it takes, and this rank's share of them.

The position in the data is the step number, so resuming is O(1), and the rows of a step depend on the order of blocks
alone: not on the number of ranks, not on how many rows fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


class StepRows(Protocol):
    """Which rows of the stream of blocks an optimizer step takes; `training.batch_ramp` has one whose batch grows."""

    def rows_of(self, step: int) -> tuple[int, int]:
        """(position of its first row, rows) of a step >= 0, over all ranks; steps follow each other without a gap."""
        ...


@dataclass(frozen=True)
class EqualSteps:
    """The same number of rows in every step."""

    rows: int

    def rows_of(self, step: int) -> tuple[int, int]:
        return step * self.rows, self.rows


class TrainingSteps(Dataset[list[dict[str, Any]]]):
    """Map-style Dataset: item s is the list of this rank's micro-batches of optimizer step s.

    Step s has `rows = batch_tokens / sequence_length` rows: positions [s * rows, (s + 1) * rows) of the stream of
    blocks, or those that `batch_tokens.rows_of(s)` names where the batch changes; item (first, rows) is a step of any
    rows. Rank r takes rows r * rows // W up to (r + 1) * rows // W of them, in order, cut into micro-batches of at
    most `per_device_train_batch_size` rows. All ranks get the same number of micro-batches, because ZeRO-2 and ZeRO-3
    communicate in each one: a rank with fewer rows ends with fillers of one row whose labels are all -100, so that they
    add nothing to loss or gradient. Use it in a DataLoader with `batch_size=None`, without any distributed sampler.

    Args:
        blocks: block number -> block, without an order of its own.
        order: the order of blocks over all epochs.
        batch_tokens: input tokens of one optimizer step over all ranks, a multiple of sequence_length; or what says
            which rows a step takes.
        sequence_length: tokens per row.
        per_device_train_batch_size: most rows of one micro-batch.
        rank, world_size: this process and how many there are.
        collator: list of blocks -> tensors of one micro-batch, with "labels".
        num_steps: length of this Dataset, in optimizer steps; may be set anew where a batch that grows shortens it.

    Raises:
        ConfigError: batch_tokens is not a positive multiple of sequence_length.
        ValueError: rank, sizes or order are impossible.
    """

    def __init__(
        self,
        blocks: Blocks,
        order: BlockOrder,
        *,
        batch_tokens: int | StepRows,
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
        if isinstance(batch_tokens, int):
            batch_tokens = EqualSteps(rows_per_step(batch_tokens=batch_tokens, sequence_length=sequence_length))
        self.plan = batch_tokens
        self.sequence_length = sequence_length
        self.per_device_rows = per_device_train_batch_size
        self.rank = rank
        self.world_size = world_size
        self.collator = collator
        self.num_steps = num_steps

    def __len__(self) -> int:
        """Number of optimizer steps."""
        return self.num_steps

    def __getitem__(self, item: int | tuple[int, int]) -> list[dict[str, Any]]:
        """This rank's micro-batches of a step, or of `rows` rows from position `first` on, given (first, rows)."""
        if isinstance(item, int) and not 0 <= item < self.num_steps:
            raise IndexError(f"step {item} asked for, but the run has {self.num_steps} steps (0 is the first)")
        start, rows = self.plan.rows_of(item) if isinstance(item, int) else item
        first = start + self.rank * rows // self.world_size
        last = start + (self.rank + 1) * rows // self.world_size
        blocks = [self.blocks[int(number)] for number in self.order.blocks_at(np.arange(first, last))]
        # Rows of like length share a micro-batch, so that little padding is computed where a collator cuts it off.
        blocks.sort(key=lambda block: -int(np.sum(block["piece_lengths"])))
        batches = [
            self.collator(blocks[low : low + self.per_device_rows])
            for low in range(0, len(blocks), self.per_device_rows)
        ]
        needed = micro_batches_per_step(rows=rows, world_size=self.world_size, per_device_rows=self.per_device_rows)
        while len(batches) < needed:
            batches.append(self._filler(start))
        return batches

    def batch_tokens(self, step: int) -> int:
        """Input tokens of an optimizer step over all ranks."""
        return self.plan.rows_of(step)[1] * self.sequence_length

    def position(self, step: int) -> dict[str, float | int]:
        """Where a step stands in the data: {"step", "epoch" (fraction of epochs before it), "first_position"}."""
        return {"step": step, "epoch": self.epoch(step), "first_position": self.plan.rows_of(step)[0]}

    def epoch(self, step: int) -> float:
        """Epochs that are done when `step` begins."""
        return self.plan.rows_of(step)[0] / self.order.num_blocks

    def _filler(self, position: int) -> dict[str, Any]:
        """A real row (so that no kernel sees anything unusual) that nothing is learnt from."""
        batch = self.collator([self.blocks[self.order.block_at(position)]])
        batch["labels"] = torch.full_like(batch["labels"], IGNORED_LABEL)
        return batch


class StepSampler(Sampler[tuple[int, int]]):
    """Steps in order, from wherever the run stands when iteration begins (a checkpoint may be loaded until then).

    A step is handed out as (first position, rows), decided here: a loader's processes hold a copy of the data set, and
    would not learn of a batch that has grown since.
    """

    def __init__(self, first_step: Callable[[], int], steps: TrainingSteps) -> None:
        self._first_step = first_step
        self._steps = steps

    def __iter__(self) -> Iterator[tuple[int, int]]:
        step = self._first_step()
        while step < len(self._steps):
            yield self._steps.plan.rows_of(step)
            step += 1

    def __len__(self) -> int:
        """Steps of the whole run, done ones included: the Trainer takes this for its length."""
        return len(self._steps)


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
