"""Blocks -> tensors: inputs, labels and the boundaries between documents.

Which positions are targets: every real token except the first of its piece. A piece is a stretch of one document inside
a block, so no prediction ever crosses from one document into the next, and padding is never predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import Dataset

from hfpretrain.data.documents import Documents
from hfpretrain.data.order import BlockOrder
from hfpretrain.data.packing import PackedIndex

IGNORED_LABEL = -100  # what torch's cross-entropy and every Hugging Face loss leave out

Block = Mapping[str, Any]
"""One row: "input_ids" (integers, [L]) and "piece_lengths" (integers, sum <= L; what is left over is padding)."""


class PackedBlocks(Dataset[dict[str, np.ndarray]]):
    """The blocks of a packing as a map-style torch Dataset, read from the memory-mapped tokens when asked for.

    Item i is {"input_ids": int64 [L] (padding = the document end token), "piece_lengths": int64 [pieces]}. Works with a
    stock `Trainer` (`data_collator=PackedCollator()`, `remove_unused_columns=False`).

    Args:
        documents: tokens of the documents whose lengths were packed.
        index: the packing of `documents.lengths`.
        order: if given, item i is the block at position i of this order, for any i >= 0; without it, block i itself.

    Raises:
        ValueError: the index was made from other documents (its tokens are not those of `documents`).
    """

    def __init__(self, documents: Documents, index: PackedIndex, order: BlockOrder | None = None) -> None:
        packed = index.num_tokens + index.dropped_tokens
        if packed != len(documents.tokens):
            raise ValueError(
                f"the packing covers {packed:,} tokens but the documents have {len(documents.tokens):,}: "
                "pack documents.lengths of these very documents"
            )
        if order is not None and order.num_blocks != index.num_blocks:
            raise ValueError(f"order has {order.num_blocks} blocks per epoch but the packing has {index.num_blocks}")
        self.documents = documents
        self.index = index
        self.order = order

    def __len__(self) -> int:
        """Blocks per epoch."""
        return self.index.num_blocks

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        block = int(i) if self.order is None else self.order.block_at(int(i))
        starts, lengths = self.index.pieces(block)
        input_ids = np.full(self.index.sequence_length, self.documents.end_id, dtype=np.int64)
        filled = 0
        for start, length in _joined(starts, lengths):
            input_ids[filled : filled + length] = self.documents.tokens.read(start, length)
            filled += length
        return {"input_ids": input_ids, "piece_lengths": lengths.astype(np.int64)}


def _joined(starts: np.ndarray, lengths: np.ndarray) -> list[tuple[int, int]]:
    """Pieces that follow one another in the buffer become one read; under `pack_concat` that is one read per block."""
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1
    firsts = np.concatenate(([0], breaks))
    return list(zip(starts[firsts].tolist(), np.add.reduceat(lengths, firsts).tolist(), strict=True))


Mechanism = Literal["varlen", "position_ids", "mask", "seq_idx", "single"]
"""How a model is told where documents end; which of them a model heeds is measured by `data.isolation`."""


class PackedCollator:
    """A list of blocks -> the tensors of one micro-batch.

    Returns a dict with
        input_ids: int64 [B, L]
        labels: int64 [B, L], NOT shifted (the Hugging Face habit: the model predicts labels[t + 1] at t); -100 at the
            first token of every piece and on padding
    and, by `mechanism`,
        position_ids (all but "single" and None): int64 [B, L], from 0 in every piece and once more in the padding at
            the end of a row. Where there is no attention_mask, transformers makes a block-diagonal one of them.
        varlen: rows laid behind one another in one row [1, B * L], and cu_seq_lens_q, cu_seq_lens_k (int32
            [segments + 1]), max_length_q, max_length_k (int): for kernels of variable-length attention. With flash
            attention and B > 1, position_ids alone would silently keep nothing apart.
        mask: attention_mask, bool [B, 1, L, L], true where a token may look: itself and what is before it in its own
            document, no further back than the window if one is given. For models that make their mask without
            position_ids.
        seq_idx: int32 [B, L], number of the piece in its row: for kernels of state-space layers.
        single: the rows hold one piece each; they are cut to the longest of them, and nothing needs to be kept apart.
        None: documents see those before them in their row; the targets are the same.

    Args:
        mechanism: one of these.
        windows: of "mask" only: positions that a token sees, itself included, by kind of layer (the names of a config's
            layer_types; a dict of masks is made), or one number for all layers. None: everything before it.
        additive: of "mask" only: float32 masks, 0 where a token may look and else the lowest number. Eager attention
            adds its mask to the scores, and a boolean one would add 1 and 0.

    Raises:
        ValueError: no block; rows of different length; pieces that are empty or longer than their row; several pieces
            in a row of "single"; an unknown mechanism; windows or additive without "mask".
    """

    def __init__(
        self,
        mechanism: Mechanism | None = "position_ids",
        *,
        windows: Mapping[str, int | None] | int | None = None,
        additive: bool = False,
    ) -> None:
        if mechanism not in (*get_args(Mechanism), None):
            raise ValueError(f"mechanism is {mechanism!r}, expected one of {', '.join(get_args(Mechanism))} or None")
        if (windows is not None or additive) and mechanism != "mask":
            raise ValueError(f"windows and additive are of mechanism 'mask' only, which is {mechanism!r} here")
        self.mechanism = mechanism
        self.windows = windows
        self.additive = additive

    def __call__(self, blocks: Sequence[Block]) -> dict[str, Any]:
        rows = _rows(blocks)
        if self.mechanism == "single":
            rows = rows[:, : _longest_piece(blocks)]
        num_rows, row_length = rows.shape
        segments, is_padding = _segments(blocks, row_length)
        starts = np.cumsum(segments) - segments
        labels = rows.reshape(-1).copy()
        labels[starts] = IGNORED_LABEL
        labels[np.repeat(is_padding, segments)] = IGNORED_LABEL
        shape = (1, num_rows * row_length) if self.mechanism == "varlen" else (num_rows, row_length)
        batch: dict[str, Any] = {
            "input_ids": torch.from_numpy(np.ascontiguousarray(rows)).reshape(shape),
            "labels": torch.from_numpy(labels).reshape(shape),
        }
        if self.mechanism not in (None, "single"):
            positions = np.arange(num_rows * row_length, dtype=np.int64) - np.repeat(starts, segments)
            batch["position_ids"] = torch.from_numpy(positions).reshape(shape)
            segment = np.repeat(np.arange(len(segments)), segments).reshape(num_rows, row_length)
            batch |= self._boundaries(segment, starts, segments)
        return batch

    def _boundaries(self, segment: np.ndarray, starts: np.ndarray, segments: np.ndarray) -> dict[str, Any]:
        if self.mechanism == "varlen":
            bounds = torch.from_numpy(np.append(starts, segment.size).astype(np.int32))
            longest = int(segments.max())
            lengths = {"max_length_q": longest, "max_length_k": longest}
            return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone(), **lengths}
        if self.mechanism == "seq_idx":
            return {"seq_idx": torch.from_numpy((segment - segment[:, :1]).astype(np.int32))}
        if self.mechanism == "mask":
            own = torch.from_numpy(segment[:, :, None] == segment[:, None, :])[:, None]
            if isinstance(self.windows, Mapping):
                return {"attention_mask": {kind: self._mask(own, window) for kind, window in self.windows.items()}}
            return {"attention_mask": self._mask(own, self.windows)}
        return {}

    def _mask(self, own: torch.Tensor, window: int | None) -> torch.Tensor:
        visible = own & _causal(own, window)
        return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo().min) if self.additive else visible


def _causal(like: torch.Tensor, window: int | None) -> torch.Tensor:
    """bool [L, L], true where a query (row) may look at a key (column)."""
    positions = torch.arange(like.shape[-1])
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _longest_piece(blocks: Sequence[Block]) -> int:
    lengths = [np.asarray(block["piece_lengths"]).reshape(-1) for block in blocks]
    if any(len(pieces) != 1 for pieces in lengths):
        raise ValueError(
            f"rows of {sorted({len(pieces) for pieces in lengths})} pieces for mechanism 'single', which takes one "
            "document a row: pack with pack_single"
        )
    return max(int(pieces[0]) for pieces in lengths)


def _rows(blocks: Sequence[Block]) -> np.ndarray:
    if not blocks:
        raise ValueError("no block given; a micro-batch needs at least one row")
    rows = [np.asarray(block["input_ids"], dtype=np.int64) for block in blocks]
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1 or not lengths[0]:
        raise ValueError(f"rows of {lengths} tokens in one micro-batch; all must have the same length, at least 1")
    return np.stack(rows)


def _segments(blocks: Sequence[Block], row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths (> 0) of all segments of all rows in order, and whether each is padding; they sum to B * L."""
    segments: list[np.ndarray] = []
    padding: list[np.ndarray] = []
    for row, block in enumerate(blocks):
        pieces = np.asarray(block["piece_lengths"], dtype=np.int64).reshape(-1)
        tail = row_length - int(pieces.sum())
        if tail < 0 or (pieces.size and int(pieces.min()) < 1):
            raise ValueError(
                f"row {row} has piece_lengths {pieces.tolist()} in {row_length} tokens; "
                "every piece needs at least 1 token and together they must fit into the row"
            )
        segments.append(np.append(pieces, tail) if tail else pieces)
        padding.append(np.arange(len(segments[-1])) >= len(pieces))
    return np.concatenate(segments), np.concatenate(padding)
