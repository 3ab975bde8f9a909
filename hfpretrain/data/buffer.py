"""The tokens of one split, read in place from the Arrow files that `tokenise.py` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa


class TokenBuffer:
    """One flat sequence of tokens over memory-mapped Arrow files, without a copy of its own.

    Rows of the files that belong to the other split are stepped over, so the buffer is a list of stretches
    ("segments") of the list columns' value buffers.

    Args:
        paths: Arrow files (stream format), in order, each with a list column "tokens" and a column "validation".
        validation: which split.
    """

    def __init__(self, paths: Sequence[Path], *, validation: bool) -> None:
        self._paths = tuple(paths)
        self._validation = validation
        self._open()

    def _open(self) -> None:
        self._values: list[np.ndarray] = []
        rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # chunk number, start in the chunk, length
        for path in self._paths:
            table = open_arrow(path)
            for tokens, flags, sizes in row_groups(table, "tokens", "validation", "text_bytes"):
                # .values ignores that a chunk may be a slice; .offsets say where in .values that slice lies.
                offsets = tokens.offsets.to_numpy().astype(np.int64)
                keep = kept_rows(flags, sizes, self._validation)
                number = np.full(int(keep.sum()), len(self._values), dtype=np.int64)
                rows.append((number, offsets[:-1][keep], np.diff(offsets)[keep]))
                self._values.append(tokens.values.to_numpy(zero_copy_only=True))
        empty = np.zeros(0, dtype=np.int64)
        chunk, begin, lengths = (
            (np.concatenate([empty, *column]) for column in zip(*rows, strict=True)) if rows else (empty,) * 3
        )
        self.lengths = lengths
        end = begin + lengths
        new = np.ones(len(chunk), dtype=bool)  # a row that does not continue the one before it begins a segment
        new[1:] = (chunk[1:] != chunk[:-1]) | (begin[1:] != end[:-1])
        flat = np.cumsum(lengths) - lengths
        self._segment_chunk, self._segment_begin = chunk[new], begin[new]
        self._segment_flat = np.append(flat[new], lengths.sum())

    def __len__(self) -> int:
        """Number of tokens."""
        return int(self._segment_flat[-1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint16 or uint32, the smaller one that holds the vocabulary."""
        return self._values[0].dtype if self._values else np.dtype(np.uint16)

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length): a read-only view where they lie together, else a copy.

        Raises:
            IndexError: the stretch leaves the buffer.
        """
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(f"tokens [{start}, {start + length}) asked for, but the buffer holds {len(self)}")
        segment = int(np.searchsorted(self._segment_flat, start, side="right")) - 1
        parts: list[np.ndarray] = []
        while length:
            left = int(self._segment_flat[segment + 1]) - start
            taken = min(left, length)
            low = int(self._segment_begin[segment]) + start - int(self._segment_flat[segment])
            parts.append(self._values[self._segment_chunk[segment]][low : low + taken])
            start, length, segment = start + taken, length - taken, segment + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Data-loader processes map the files again instead of receiving a copy."""
        return {"_paths": self._paths, "_validation": self._validation}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def open_arrow(path: Path) -> pa.Table:
    """A memory-mapped table over an Arrow stream file, as `datasets` writes them."""
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


def row_groups(table: pa.Table, *columns: str) -> Iterator[tuple[Any, ...]]:
    """The columns record batch by record batch, without a copy."""
    return zip(*(table[name].chunks for name in columns), strict=True)


def kept_rows(flags: pa.Array, text_bytes: pa.Array, validation: bool) -> np.ndarray:
    """bool per row: a document of this split, and not an empty one."""
    kept: np.ndarray = (flags.to_numpy(zero_copy_only=False) == validation) & (text_bytes.to_numpy() > 0)
    return kept
