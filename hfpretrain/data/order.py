"""The order of blocks over all epochs: a seeded permutation that is computed, not stored.

Pure numpy. Position i of the stream of blocks belongs to epoch i // num_blocks, and each epoch has its own permutation,
so the data position of a run is one integer, resuming is O(1), and nothing depends on the number of processes.
"""

from __future__ import annotations

import numpy as np

# Four Feistel rounds are enough for a pseudo-random permutation (Luby & Rackoff 1988) if the round function is one;
# ours is a cheap integer hash, so a few more are spent. The number was chosen, not tuned.
ROUNDS = 8


class BlockOrder:
    """A stream of block numbers, every block once per epoch, O(1) memory.

    A balanced Feistel network is a bijection on [0, 4^k), the smallest such range that holds `num_blocks`; values
    outside [0, num_blocks) are sent through it again until they fall inside ("cycle walking", Black & Rogaway 2002),
    which keeps it a bijection on [0, num_blocks). The range is at most four times too large, so at most four passes are
    expected.

    Args:
        num_blocks: blocks per epoch, at least 1.
        seed: any integer; together with the epoch number it decides the permutation.

    Raises:
        ValueError: there is no block to order.
    """

    def __init__(self, num_blocks: int, seed: int) -> None:
        if num_blocks < 1:
            raise ValueError(
                f"num_blocks is {num_blocks}, so there is nothing to order: the training text is shorter than one "
                "block. Give more text or a smaller sequence_length."
            )
        self.num_blocks = int(num_blocks)
        self.seed = int(seed)
        self._half_bits = max(1, -(-(self.num_blocks - 1).bit_length() // 2))

    def __repr__(self) -> str:
        return f"BlockOrder(num_blocks={self.num_blocks}, seed={self.seed})"

    def block_at(self, i: int) -> int:
        """The block at position i >= 0 of the endless stream."""
        return int(self.blocks_at(np.array([i], dtype=np.int64))[0])

    def blocks_at(self, indices: np.ndarray) -> np.ndarray:
        """Vectorised `block_at`: int64 positions (any shape) -> int64 blocks (same shape).

        Raises:
            ValueError: a negative position.
        """
        positions = np.asarray(indices, dtype=np.int64)
        if positions.size and int(positions.min()) < 0:
            raise ValueError(f"position {positions.min()} is negative; the stream of blocks begins at 0")
        epochs, within = np.divmod(positions.ravel(), self.num_blocks)
        keys = [_mix(epochs.astype(np.uint64) ^ _mix(np.uint64(k), self.seed), self.seed) for k in range(ROUNDS)]
        values = within.astype(np.uint64)
        outside = np.arange(len(values))
        while len(outside):
            values[outside] = self._permute(values[outside], [key[outside] for key in keys])
            outside = outside[values[outside] >= self.num_blocks]
        return values.astype(np.int64).reshape(positions.shape)

    def _permute(self, values: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        bits, mask = np.uint64(self._half_bits), np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key, 0) & mask)
        return (left << bits) | right


def _mix(values: np.ndarray | np.uint64, seed: int) -> np.ndarray:
    """A 64-bit hash with good avalanche: the finaliser of SplitMix64 (Steele, Lea & Flood 2014), seed added first."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is what is wanted
        z = np.asarray(values, dtype=np.uint64) + np.uint64((seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)))
