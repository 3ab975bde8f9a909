"""Bytes that an optimizer keeps beside the weights, from the shapes of the tensors that it is given.

Without DeepSpeed, and at ZeRO 0, an optimizer sees the parameters themselves. ZeRO 1 to 3 hand it one flat tensor per
group, this rank's partition, in which no matrix has rows or columns any more: what Adafactor factors and Muon makes
orthogonal is lost there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]

# bitsandbytes: blocks that share a float32 scale, and tensors too small to be worth it (`min_8bit_size`). Its two code
# books of 256 float32 are one per device and left out.
_BLOCK_VALUES, _SMALLEST_8BIT = 256, 4096


@dataclass(frozen=True)
class Tensor:
    """One tensor of an optimizer. `hidden`: a weight matrix of a layer, which Muon takes; `embedding`: a look-up."""

    shape: Shape
    hidden: bool = False
    embedding: bool = False

    @property
    def values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer family.

    Attributes:
        name: as in a table.
        words: any of these in the value of `--optim` means it; the first kind that fits decides.
        source: where its state is defined.
    """

    name: str
    words: tuple[str, ...]
    source: str


KINDS = (
    OptimizerKind("adam_8bit", ("8bit",), "Dettmers 2021 (2110.02861); bitsandbytes"),
    OptimizerKind("lion", ("lion",), "Chen 2023 (2302.06675)"),
    OptimizerKind("adafactor", ("adafactor",), "Shazeer 2018 (1804.04235); transformers.Adafactor"),
    OptimizerKind("muon", ("muon",), "Jordan 2024; torch.optim.Muon, AdamW for the rest"),
    OptimizerKind("sgd", ("sgd",), "no momentum, the Trainer's default"),
    OptimizerKind("adamw", ("adamw", "adam"), "Loshchilov 2019 (1711.05101); torch.optim.AdamW"),
)
# Flavours that a family's word would hide, and whose state is another.
_OTHERS = ("galore", "apollo", "lomo", "ademamix", "grokadamw", "schedule_free", "4bit", "anyprecision", "lion_8bit")


def optimizer_kind(optim: str) -> OptimizerKind | None:
    """The family of a value of `--optim`; None where its state is not known here."""
    if any(word in optim for word in _OTHERS):
        return None
    return next((kind for kind in KINDS if any(word in optim for word in kind.words)), None)


def state_bytes(kind: str, tensors: Sequence[Tensor]) -> int:
    """Bytes of the state of `tensors`, whose state is float32 unless the kind says otherwise.

    Args:
        kind: `OptimizerKind.name`.

    Per value and tensor: adamw two moments and a float32 step count a tensor; lion one momentum; adafactor a row and a
    column of second moments for two or more dimensions, else one value each, no first moment (`beta1=None`, as the
    Trainer makes it); adam_8bit two bytes and two float32 scales per 256 values, where a tensor has 4,096 or more and
    is no embedding (those stay float32, see `training.optimizer`); muon one momentum for a hidden matrix, AdamW's two
    moments for all others; sgd nothing.
    """
    return sum(_of_tensor(kind, tensor) for tensor in tensors)


def _of_tensor(kind: str, tensor: Tensor) -> int:
    n, shape = tensor.values, tensor.shape
    adamw = 8 * n + 4
    if kind == "sgd":
        return 0
    if kind == "lion":
        return 4 * n
    if kind == "adafactor":
        if len(shape) < 2:
            return 4 * n
        return 4 * (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1])
    if kind == "adam_8bit":
        if n < _SMALLEST_8BIT or tensor.embedding:
            return 8 * n
        return 2 * n + 2 * 4 * math.ceil(n / _BLOCK_VALUES)
    if kind == "muon":
        return 4 * n if tensor.hidden and len(shape) == 2 else adamw
    if kind == "adamw":
        return adamw
    raise ValueError(f"unknown optimizer kind {kind}; expected one of {', '.join(k.name for k in KINDS)}")
