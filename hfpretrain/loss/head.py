"""The loss from what goes into the head, a chunk of tokens at a time: no [tokens, vocabulary] tensor beyond one chunk.

Each chunk is multiplied with the head's weight, turned into the gradient of its scores where it lies, and multiplied
into the gradients of hidden states and weight. Backward only scales those, so nothing is computed twice.

Shape suffixes: N tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hfpretrain.loss.sums import (
    TWICE,
    LogitTransform,
    LossSums,
    add_up,
    block_rows,
    loss_sums,
    nats_,
    scores_to_gradient_,
)

# Scores of one chunk. Each chunk reads and writes the whole gradient of the head, so it must hold several hundred
# tokens to be worth it: 261 at V = 128,256 on a CPU. The figure for GPUs is a guess: none was at hand.
_CHUNK_BYTES = {"cpu": 2**27}
_CHUNK_BYTES_ELSEWHERE = 2**30
# Part of a weight that is converted to another type at a time.
_CONVERTED_BYTES = {"cpu": 2**24}
_CONVERTED_BYTES_ELSEWHERE = 2**28


def head_sums(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    z_loss_weight: float = 0.0,
    transform: LogitTransform | None = None,
    chunk_bytes: int | None = None,
) -> LossSums:
    """The sums for logits = transform(hidden @ weight.T + bias).

    Args:
        hidden_ND, weight_VD, bias_V: any floating type. Products have float32 results; exponentials, sums and the
            accumulation of gradients are float32 (float64 for a float64 weight). On CUDA the factors of a product keep
            their own type or that of autocast, elsewhere they are float32 as well.
        targets_N: the target of each position (`shift_labels`), `IGNORE_INDEX` where there is none.
        transform: what the model does to the head's scores; None: nothing.
        chunk_bytes: memory for the scores of one chunk of tokens; 128 MiB on a CPU, 1 GiB elsewhere.

    Memory beyond the arguments and their gradients: one chunk and, for a weight in half precision, its gradient in
    float32.
    """
    call = _Call.of(weight_VD, transform, z_loss_weight=z_loss_weight, chunk_bytes=chunk_bytes)
    total, sums = _HeadSums.apply(hidden_ND, weight_VD, bias_V, targets_N, call)
    return loss_sums(total, sums, targets_N)


@torch.no_grad()
def head_nats(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    transform: LogitTransform | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """-log p of each target for the logits of `head_sums`, in nats, float32 [N] (float64 for a float64 weight).

    Args: as `head_sums`; every position has a target.
    """
    call = _Call.of(weight_VD, transform, chunk_bytes=chunk_bytes)
    head = _Head(weight_VD, bias_V, call)
    chunks = call.chunks(len(targets_N), head.vocabulary)
    longest = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    buffer = hidden_ND.new_empty(longest, head.vocabulary, dtype=call.exact)
    nats = hidden_ND.new_empty(len(targets_N), dtype=call.exact)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        for chunk in chunks:
            hidden = hidden_ND[chunk].to(call.operand)
            scores = head.scores(hidden, out=buffer[: len(hidden)])
            rows = block_rows(scores.device, head.vocabulary)
            for first in range(chunk.start, chunk.stop, rows):
                block = slice(first, min(first + rows, chunk.stop))
                own = scores[block.start - chunk.start : block.stop - chunk.start]
                call.transform.apply_(own)
                nats[block] = nats_(own, targets_N[block])
    return nats


@dataclass(frozen=True)
class _Call:
    """What does not change during one call of `head_sums`. `operand` is the type of both factors of a product."""

    z_loss_weight: float
    transform: LogitTransform
    operand: torch.dtype
    chunk_bytes: int
    with_gradient: bool

    @classmethod
    def of(
        cls,
        weight_VD: Tensor,
        transform: LogitTransform | None,
        *,
        z_loss_weight: float = 0.0,
        chunk_bytes: int | None = None,
    ) -> _Call:
        device = weight_VD.device.type
        operand = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
        if device == "cuda":
            operand = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VD.dtype
        return cls(
            z_loss_weight=z_loss_weight,
            transform=transform or LogitTransform(),
            operand=operand,
            chunk_bytes=chunk_bytes or _CHUNK_BYTES.get(device, _CHUNK_BYTES_ELSEWHERE),
            with_gradient=torch.is_grad_enabled(),
        )

    @property
    def exact(self) -> torch.dtype:
        return torch.float64 if self.operand == torch.float64 else torch.float32

    def chunks(self, tokens: int, vocabulary: int) -> list[slice]:
        """Chunks of nearly the same number of tokens, as many as fit into the budget."""
        most = max(1, self.chunk_bytes // (vocabulary * self.exact.itemsize))
        rows = math.ceil(tokens / max(1, math.ceil(tokens / most)))
        return [slice(first, min(first + rows, tokens)) for first in range(0, tokens, max(rows, 1))]


class _HeadSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, call: _Call
    ) -> tuple[Tensor, Tensor]:
        wanted = [call.with_gradient and needed for needed in ctx.needs_input_grad[:3]]
        tensors = (hidden_ND, weight_VD, bias_V)
        ctx.gradients = [
            torch.zeros_like(tensor, dtype=call.exact) if tensor is not None and needed else None
            for tensor, needed in zip(tensors, wanted, strict=True)
        ]
        ctx.dtypes = [tensor.dtype if tensor is not None else None for tensor in tensors]
        grad_hidden, grad_weight, grad_bias = ctx.gradients
        head = _Head(weight_VD, bias_V, call)
        blocks = []
        chunks = call.chunks(len(targets_N), head.vocabulary)
        longest = max((chunk.stop - chunk.start for chunk in chunks), default=0)
        buffer = hidden_ND.new_empty(longest, head.vocabulary, dtype=call.exact)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for chunk in chunks:
                hidden, targets = hidden_ND[chunk].to(call.operand), targets_N[chunk]
                scores = head.scores(hidden, out=buffer[: len(hidden)])
                blocks += _in_place(scores, targets, call, with_gradient=any(wanted))
                if grad_bias is not None:
                    grad_bias[: head.vocabulary] += scores.sum(dim=0)
                gradient = scores.to(call.operand)
                if grad_hidden is not None:
                    head.gradient_of_hidden(gradient, out=grad_hidden[chunk])
                if grad_weight is not None:
                    head.add_gradient_of_weight(gradient, hidden, to=grad_weight)
        sums = add_up(blocks, like=torch.empty((), dtype=call.exact, device=hidden_ND.device))
        ctx.mark_non_differentiable(sums)
        return sums[0] + call.z_loss_weight * sums[1], sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(TWICE)
        scaled = [
            gradient.mul_(grad_total).to(dtype) if gradient is not None else None
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None)


def _in_place(scores_NV: Tensor, targets_N: Tensor, call: _Call, *, with_gradient: bool) -> list[Tensor]:
    """Scores of a chunk -> their gradient, a block that fits into the cache at a time; the sums of each block."""
    rows = block_rows(scores_NV.device, scores_NV.shape[1])
    return [
        scores_to_gradient_(
            scores_NV[first : first + rows],
            targets_N[first : first + rows],
            call.z_loss_weight,
            call.transform,
            with_gradient=with_gradient,
        )
        for first in range(0, len(targets_N), rows)
    ]


class _Head:
    """Products with the head's weight. A weight of another type is converted part by part, never as a whole."""

    def __init__(self, weight_VD: Tensor, bias_V: Tensor | None, call: _Call) -> None:
        self.vocabulary = call.transform.vocabulary or len(weight_VD)
        self.weight = weight_VD[: self.vocabulary].detach()
        self.bias = bias_V[: self.vocabulary].detach() if bias_V is not None else None
        self.call = call
        limit = _CONVERTED_BYTES.get(weight_VD.device.type, _CONVERTED_BYTES_ELSEWHERE)
        rows = max(1, limit // (call.operand.itemsize * weight_VD.shape[1]))
        self.rows = self.vocabulary if weight_VD.dtype == call.operand else rows

    def parts(self) -> Iterator[slice]:
        for first in range(0, self.vocabulary, self.rows):
            yield slice(first, min(first + self.rows, self.vocabulary))

    def scores(self, hidden_ND: Tensor, *, out: Tensor) -> Tensor:
        for part in self.parts():
            self._product(hidden_ND, self.weight[part].to(self.call.operand).T, out=out[:, part])
        return out if self.bias is None else out.add_(self.bias)

    def gradient_of_hidden(self, gradient_NV: Tensor, *, out: Tensor) -> None:
        for part in self.parts():
            self._add_product(gradient_NV[:, part], self.weight[part].to(self.call.operand), to=out)

    def add_gradient_of_weight(self, gradient_NV: Tensor, hidden_ND: Tensor, *, to: Tensor) -> None:
        for part in self.parts():
            self._add_product(gradient_NV[:, part].T, hidden_ND, to=to[part])

    def _product(self, left: Tensor, right: Tensor, *, out: Tensor) -> None:
        if self.call.operand == self.call.exact:
            torch.mm(left, right, out=out)
        else:  # half precision factors on CUDA, a float32 result
            torch.mm(left, right, out_dtype=self.call.exact, out=out)

    def _add_product(self, left: Tensor, right: Tensor, *, to: Tensor) -> None:
        if self.call.operand == self.call.exact:
            to.addmm_(left, right)
        else:
            torch.addmm(to, left, right, out_dtype=self.call.exact, out=to)
