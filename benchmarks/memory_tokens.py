"""Tokens in memory with the interface of `hfpretrain.data.buffer.TokenBuffer`."""

from __future__ import annotations

import numpy as np


class MemoryTokens:
    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, length: int) -> np.ndarray:
        return self.tokens[start : start + length]
