"""Packing: document lengths in, a view of fixed-length blocks over the token buffer out.

Pure numpy. A packing never touches a token: it is three integer arrays that say which stretches of the flat token
buffer stand in which block. Two ways are offered:

* `pack_concat`: consecutive `sequence_length`-token blocks of the buffer, every block full; documents are cut wherever
  a block ends, and the tail of the epoch that fills no block is left out.
* `pack_best_fit`: documents stay whole where they fit into a block, blocks may end in padding, nothing is left out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class PackedIndex:
    """Which stretches of the token buffer ("pieces": parts of one document each) make up which block.

    Attributes:
        sequence_length: tokens per block.
        num_blocks: number of blocks.
        dropped_tokens: tokens of the buffer that stand in no block.
        piece_starts: int64 [num_pieces], where each piece begins in the flat buffer; pieces are sorted by block.
        piece_lengths: int32 or int64 [num_pieces], tokens of each piece, 1 .. sequence_length.
        block_offsets: int64 [num_blocks + 1], the pieces of block b are block_offsets[b] .. block_offsets[b + 1].
    """

    sequence_length: int
    num_blocks: int
    dropped_tokens: int
    piece_starts: np.ndarray = field(repr=False)
    piece_lengths: np.ndarray = field(repr=False)
    block_offsets: np.ndarray = field(repr=False)

    def pieces(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """(token_starts, token_lengths) of the pieces in one block, in the order in which they stand there.

        Raises:
            IndexError: block is not in [0, num_blocks).
        """
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} asked for, but there are {self.num_blocks} blocks (0 is the first)")
        first, last = self.block_offsets[block], self.block_offsets[block + 1]
        return self.piece_starts[first:last], self.piece_lengths[first:last]

    @property
    def num_tokens(self) -> int:
        """Real tokens (no padding) in all blocks together."""
        return int(self.piece_lengths.sum(dtype=np.int64))

    @property
    def target_tokens(self) -> int:
        """Tokens that are predicted from a token before them in their piece: all but the first of each piece."""
        return self.num_tokens - len(self.piece_lengths)

    @property
    def utilisation(self) -> float:
        """Real tokens / (num_blocks * sequence_length); 1.0 means no padding. 0.0 if there is no block."""
        return self.num_tokens / (self.num_blocks * self.sequence_length) if self.num_blocks else 0.0


def pack_concat(lengths: np.ndarray, sequence_length: int) -> PackedIndex:
    """Blocks of `sequence_length` consecutive tokens; only the tail of the epoch (< one block) is dropped.

    Args:
        lengths: integer [num_documents], tokens of each document, in the order of the token buffer, each >= 1.
        sequence_length: tokens per block.

    Raises:
        ValueError: a length below 1, or a sequence_length below 2.
    """
    lengths = _checked(lengths, sequence_length)
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    num_blocks = total // sequence_length
    kept = num_blocks * sequence_length
    block_starts = np.arange(num_blocks, dtype=np.int64) * sequence_length
    # A piece begins where a document begins or where a block begins: merge the two sorted lists, common values once.
    inner = ends[: int(np.searchsorted(ends, kept, side="left"))]  # document boundaries strictly inside the kept part
    inner = inner[inner % sequence_length != 0]
    before = np.searchsorted(inner, block_starts, side="left")  # inner boundaries that lie before each block
    piece_starts = np.insert(inner, before, block_starts)
    piece_lengths = np.diff(piece_starts, append=kept).astype(_length_dtype(sequence_length))
    offsets = np.append(before + np.arange(num_blocks), len(piece_starts)).astype(np.int64)
    return PackedIndex(sequence_length, num_blocks, total - kept, piece_starts, piece_lengths, offsets)


def pack_best_fit(lengths: np.ndarray, sequence_length: int) -> PackedIndex:
    """Best-fit decreasing: whole documents where they fit, nothing dropped, few padding tokens.

    Documents longer than a block are first cut into `sequence_length`-token pieces and a rest. Then pieces are taken
    from the longest to the shortest, each put into the block with the least room that still holds it (among equals: the
    one that has had that room for longest); if none holds it, a new block is opened. At most 11/9 of the fewest
    possible blocks plus 4 (D. S. Johnson, "Near-optimal bin packing algorithms", 1973); on text far closer.

    The result is exactly that of the algorithm run piece by piece, but it is computed for all pieces of one length and
    all blocks with one capacity at a time, so its cost hardly depends on the number of documents.

    Args:
        lengths: integer [num_documents], tokens of each document, in the order of the token buffer, each >= 1.
        sequence_length: tokens per block.

    Raises:
        ValueError: a length below 1, or a sequence_length below 2.
    """
    lengths = _checked(lengths, sequence_length)
    starts, pieces = _cut_long(lengths, sequence_length)
    by_length = np.argsort(pieces.astype(_sort_dtype(sequence_length)), kind="stable")  # 16-bit keys: a radix sort
    counts = np.bincount(pieces, minlength=sequence_length + 1)
    placements, num_blocks = _place(counts, sequence_length)
    piece_of_slot, block_offsets = _expand(placements, num_blocks, len(pieces))
    order = by_length[piece_of_slot]
    return PackedIndex(
        sequence_length=sequence_length,
        num_blocks=num_blocks,
        dropped_tokens=0,
        piece_starts=starts[order],
        piece_lengths=pieces[order].astype(_length_dtype(sequence_length)),
        block_offsets=block_offsets,
    )


def pack_single(lengths: np.ndarray, sequence_length: int) -> PackedIndex:
    """One piece per block, for models on which documents of one row cannot be kept apart.

    Documents longer than a block are cut into `sequence_length`-token pieces and a rest; nothing is dropped, and all
    that a piece does not fill is padding (`PackedCollator("single")` computes little of it where rows of like length
    meet in a micro-batch).

    Args and raises: as `pack_best_fit`.
    """
    starts, pieces = _cut_long(_checked(lengths, sequence_length), sequence_length)
    return PackedIndex(
        sequence_length=sequence_length,
        num_blocks=len(pieces),
        dropped_tokens=0,
        piece_starts=starts,
        piece_lengths=pieces.astype(_length_dtype(sequence_length)),
        block_offsets=np.arange(len(pieces) + 1, dtype=np.int64),
    )


def _checked(lengths: np.ndarray, sequence_length: int) -> np.ndarray:
    lengths = np.asarray(lengths)
    if sequence_length < 2:
        raise ValueError(f"sequence_length is {sequence_length}; at least 2 is needed for one prediction per block")
    if lengths.size == 0:
        lengths = lengths.astype(np.int64)  # numpy makes an empty list float64
    if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"lengths must be a 1-D integer array, got {lengths.dtype} of shape {lengths.shape}")
    if lengths.size and int(lengths.min()) < 1:
        row = int(lengths.argmin())
        raise ValueError(f"document {row} has length {lengths[row]}; drop empty documents before packing")
    return lengths


def _length_dtype(sequence_length: int) -> type[np.signedinteger]:
    return np.int32 if sequence_length < 2**31 else np.int64


def _sort_dtype(sequence_length: int) -> type[np.unsignedinteger]:
    return np.uint16 if sequence_length < 2**16 else np.uint64


def _cut_long(lengths: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of every piece, documents longer than a block cut from their beginning; in buffer order."""
    document_starts = np.cumsum(lengths, dtype=np.int64) - lengths
    if not len(lengths) or int(lengths.max()) <= sequence_length:
        return document_starts, lengths
    per_document = -(-lengths // sequence_length)
    document = np.repeat(np.arange(len(lengths)), per_document)
    first_piece = np.cumsum(per_document) - per_document
    skipped = (np.arange(len(document)) - first_piece[document]) * sequence_length  # tokens of earlier pieces
    return document_starts[document] + skipped, np.minimum(lengths[document] - skipped, sequence_length)


def _place(counts: np.ndarray, sequence_length: int) -> tuple[np.ndarray, int]:
    """Best-fit decreasing over counts: `counts[n]` pieces of n tokens each.

    Why whole groups can be moved at once: when pieces of n tokens are placed and the fullest block that still holds one
    has room r, then after taking one it has room r - n < r and is, if that is still >= n, again the fullest that holds
    one. So a block takes r // n pieces in a row and leaves the race with room r % n < n. All blocks with room r do the
    same one after another, and blocks that share their history so far stay a consecutive range of block numbers.

    Returns:
        placements: int64 [num_placements, 5], columns (first block, number of blocks, pieces per block, pieces of this
            kind already in each of these blocks, rank of the first piece when all pieces are sorted by length,
            ascending); and the number of blocks.
    """
    first_rank = np.cumsum(counts) - counts
    ranges: list[deque[tuple[int, int, int]]] = [deque() for _ in range(sequence_length + 1)]  # by room, oldest first
    occupied = 0  # bit r set: ranges[r] is not empty. One integer makes "smallest room >= n" one machine-code scan
    num_blocks = 0
    placements: list[tuple[int, int, int, int, int]] = []
    for n in np.flatnonzero(counts)[::-1].tolist():
        left, rank = int(counts[n]), int(first_rank[n])
        while left:
            fitting = occupied >> n
            if fitting:
                room = n + (fitting & -fitting).bit_length() - 1
                block, size, slot = ranges[room].popleft()
            else:
                room, block, slot = sequence_length, num_blocks, 0
                size = -(-left // (room // n))
                num_blocks += size
            each = room // n
            full = min(size, left // each)  # blocks that take `each` pieces
            partial = left - full * each if full < size else 0  # pieces that go into one more block
            if full:
                placements.append((block, full, each, slot, rank))
                ranges[room - each * n].append((block, full, slot + each))
                occupied |= 1 << (room - each * n)
            if partial:
                placements.append((block + full, 1, partial, slot, rank + full * each))
                ranges[room - partial * n].append((block + full, 1, slot + partial))
                occupied |= 1 << (room - partial * n)
            used = full + (partial > 0)
            if used < size:
                ranges[room].appendleft((block + used, size - used, slot))
            if not ranges[room]:
                occupied &= ~(1 << room)
            left -= full * each + partial
            rank += full * each + partial
    return np.array(placements, dtype=np.int64).reshape(-1, 5), num_blocks


def _expand(placements: np.ndarray, num_blocks: int, num_pieces: int) -> tuple[np.ndarray, np.ndarray]:
    """Placements -> for each place in the blocks, the rank of the piece there; and where each block begins."""
    block, size, each, slot, rank = placements.T
    pieces = size * each
    row = np.repeat(np.arange(len(placements)), pieces)
    nth = np.arange(num_pieces) - (np.cumsum(pieces) - pieces)[row]  # number of this piece within its placement
    nth_block, nth_slot = np.divmod(nth, each[row])
    block_of_piece = block[row] + nth_block
    per_block = np.bincount(block_of_piece, minlength=num_blocks)
    block_offsets = np.zeros(num_blocks + 1, dtype=np.int64)
    np.cumsum(per_block, out=block_offsets[1:])
    piece_of_slot = np.empty(num_pieces, dtype=np.int64)
    piece_of_slot[block_offsets[block_of_piece] + slot[row] + nth_slot] = rank[row] + nth
    return piece_of_slot, block_offsets
