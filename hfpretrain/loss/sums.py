"""Cross-entropy and z-loss as *sums* over target tokens, so that the caller alone decides what they are divided by.

    L = sum_t CE_t + w * (log Z_t)^2,   Z_t = sum_v exp(logit_tv)
    dL / dlogit_tv = (1 + 2 w log Z_t) softmax_tv - [v is the target of t]

Both terms run over the same tokens. w = 1e-4 keeps log Z near 0, so that logits do not drift to where half precision
rounds them coarsely (PaLM, arXiv 2204.02311, section 5).

Loss and gradient are made in one pass, a few rows at a time: no [tokens, vocabulary] tensor is kept, from the logits
(`logits_sums`: but for their gradient) or from what goes into the head (`head.head_sums`: none at all).

Shape suffixes: B rows, T positions of a row, N = B * T, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100  # Hugging Face's label for "no loss here"
# float32 scores that are looked at together: 8 MB stay near a CPU's cache; a GPU wants long kernels (a guess).
_BLOCK_BYTES = {"cpu": 2**23}
_BLOCK_BYTES_ELSEWHERE = 2**27
TWICE = "this loss was back-propagated twice; its gradient is made with the loss and handed out only once"


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to the head's scores x before they are logits: softcap * tanh(scale * x / softcap).

    Attributes:
        scale: factor on the scores (Cohere's logit_scale, 1 / Granite's logits_scaling, ...).
        softcap: bound on |logit| (Gemma 2's final_logit_softcapping); None: scale * x.
        vocabulary: number of leading scores that become logits; the rest of a padded head is cut off. None: all.
    """

    scale: float = 1.0
    softcap: float | None = None
    vocabulary: int | None = None

    def __str__(self) -> str:
        parts = [f"scaled by {self.scale:.6g}"] if self.scale != 1.0 else []
        parts += [f"capped at {self.softcap:.6g}"] if self.softcap is not None else []
        parts += [f"the first {self.vocabulary:,} kept"] if self.vocabulary is not None else []
        return ", ".join(parts) or "as they are"

    def apply_(self, scores_NV: Tensor) -> Tensor | None:
        """Scores -> logits in place; returns tanh's derivative at each (None without softcap)."""
        if self.scale != 1.0:
            scores_NV.mul_(self.scale)
        if self.softcap is None:
            return None
        scores_NV.div_(self.softcap).tanh_()
        slope = 1.0 - scores_NV.square()
        scores_NV.mul_(self.softcap)
        return slope


@dataclass(frozen=True)
class LossSums:
    """Sums over the target tokens of one micro-batch, 0-d tensors in nats. Only `total` carries a gradient.

    Attributes:
        total: cross_entropy + z_loss_weight * z_square, what is back-propagated (once: its gradient is not kept).
        cross_entropy: sum of -log p(target).
        z_square: sum of (log Z)^2.
        log_z: sum of log Z.
        logit_max: largest |logit| at a position with a target, no sum; 0 where there is no target.
        target_tokens: number of positions with a target, int64.
    """

    total: Tensor
    cross_entropy: Tensor
    z_square: Tensor
    log_z: Tensor
    logit_max: Tensor
    target_tokens: Tensor


def shift_labels(labels_BT: Tensor, positions: int | None = None) -> Tensor:
    """Labels in Hugging Face's habit (label t = token t) -> the target of each position (token t + 1).

    The last position has no target, unless labels hold one column more than there are `positions`: the token that
    follows the row. Shifting the labels rather than slicing the logits spares a copy of the largest tensor of the step.
    """
    if positions is not None and labels_BT.shape[1] == positions + 1:
        return labels_BT[:, 1:]
    return F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE_INDEX)


def count_targets(labels_BT: Tensor) -> Tensor:
    """Number of positions that carry a loss, a 0-d int64 tensor. The first column is no target of anything."""
    return (labels_BT[:, 1:] != IGNORE_INDEX).sum()


def logits_sums(logits_BTV: Tensor, labels_BT: Tensor, *, z_loss_weight: float = 0.0) -> LossSums:
    """The sums from a model's final logits, for any model that returns them.

    Args:
        logits_BTV: what the model returned for `input_ids`, any floating type; exponentials and sums are float32
            (float64 for float64 logits).
        labels_BT: unshifted labels, `IGNORE_INDEX` where nothing is to be learnt; one more column than logits where
            the last position is to be scored too. No target at all gives 0 with a zero gradient, never NaN.

    Besides the logits, the only [tokens, V] tensor is their gradient, in their own type.
    """
    targets_N = shift_labels(labels_BT, logits_BTV.shape[1]).to(logits_BTV.device).flatten()
    total, sums = _LogitsSums.apply(logits_BTV.flatten(0, 1), targets_N, z_loss_weight)
    return loss_sums(total, sums, targets_N)


def loss_sums(total: Tensor, sums: Tensor, targets_N: Tensor) -> LossSums:
    cross_entropy, z_square, log_z, logit_max = sums.unbind()
    return LossSums(total, cross_entropy, z_square, log_z, logit_max, (targets_N != IGNORE_INDEX).sum())


def scores_to_gradient_(
    scores_NV: Tensor, targets_N: Tensor, z_loss_weight: float, transform: LogitTransform, *, with_gradient: bool
) -> Tensor:
    """Overwrite float scores with dL/dscores; return [cross_entropy, z_square, log_z, logit_max] of these rows."""
    slope = transform.apply_(scores_NV)
    is_target = (targets_N != IGNORE_INDEX)[:, None]
    index = targets_N.clamp(min=0)[:, None]
    top = scores_NV.amax(dim=1, keepdim=True)
    largest = torch.maximum(top, -scores_NV.amin(dim=1, keepdim=True))
    of_target = scores_NV.gather(1, index) - top
    normaliser = scores_NV.sub_(top).exp_().sum(dim=1, keepdim=True)
    log_z = normaliser.log() + top
    nats = normaliser.log() - of_target
    per_row = torch.cat([nats, log_z.square(), log_z, largest], dim=1)
    per_row = torch.where(is_target, per_row, torch.zeros_like(per_row))
    if with_gradient:
        weight = is_target.to(scores_NV.dtype)
        scores_NV.mul_(weight * (1.0 + 2.0 * z_loss_weight * log_z) / normaliser).scatter_add_(1, index, -weight)
        if slope is not None:
            scores_NV.mul_(slope)
        if transform.scale != 1.0:
            scores_NV.mul_(transform.scale)
    return torch.cat([per_row[:, :3].sum(dim=0), per_row[:, 3:].amax(dim=0)])


def nats_(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """-log p of each row's target, [N]; overwrites the logits."""
    top = logits_NV.amax(dim=1, keepdim=True)
    of_target = logits_NV.gather(1, targets_N[:, None]) - top
    return (logits_NV.sub_(top).exp_().sum(dim=1, keepdim=True).log() - of_target)[:, 0]


def logits_nats(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """-log p of every target that is not `IGNORE_INDEX`, row by row, from final logits: float32 (float64 for float64).

    Args:
        targets_BT: what each position is to predict (not shifted).
    """
    exact = torch.float64 if logits_BTV.dtype == torch.float64 else torch.float32
    logits_NV, targets_N = logits_BTV.flatten(0, 1), targets_BT.flatten()
    where = (targets_N != IGNORE_INDEX).nonzero()[:, 0].split(block_rows(logits_NV.device, logits_NV.shape[1]))
    return torch.cat([nats_(logits_NV[block].to(exact), targets_N[block]) for block in where])


def add_up(blocks: list[Tensor], like: Tensor) -> Tensor:
    """Sums of blocks of rows -> sums of all: three are added, the last is a maximum."""
    if not blocks:
        return like.new_zeros(4)
    stacked = torch.stack(blocks)
    return torch.cat([stacked[:, :3].sum(dim=0), stacked[:, 3:].amax(dim=0)])


def block_rows(device: torch.device, vocabulary: int) -> int:
    """Rows of scores that are looked at together."""
    return max(1, _BLOCK_BYTES.get(device.type, _BLOCK_BYTES_ELSEWHERE) // (4 * vocabulary))


class _LogitsSums(torch.autograd.Function):
    """`F.cross_entropy` keeps a float32 copy of the log-probabilities for its backward; this keeps the gradient."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, z_loss_weight: float) -> tuple[Tensor, Tensor]:
        exact = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
        gradient = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        rows = block_rows(logits_NV.device, logits_NV.shape[1])
        blocks = []
        for first in range(0, len(targets_N), rows):
            chosen = slice(first, first + rows)
            scores = logits_NV[chosen].to(exact, copy=True)
            blocks.append(
                scores_to_gradient_(
                    scores, targets_N[chosen], z_loss_weight, LogitTransform(), with_gradient=gradient is not None
                )
            )
            if gradient is not None:
                gradient[chosen] = scores
        ctx.gradient = gradient
        sums = add_up(blocks, logits_NV.new_zeros((), dtype=exact))
        ctx.mark_non_differentiable(sums)
        return sums[0] + z_loss_weight * sums[1], sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError(TWICE)
        return gradient.mul_(grad_total), None, None


def token_mean_loss(
    outputs: Any,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    *,
    z_loss_weight: float = 0.0,
) -> Tensor:
    """Token-exact `compute_loss_func` for a stock `transformers.Trainer`, from the logits of any architecture.

    The Trainer's count is exact if the first label of each row is `IGNORE_INDEX`, which `PackedCollator` guarantees.
    """
    sums = logits_sums(outputs["logits"], labels, z_loss_weight=z_loss_weight)
    denominator = sums.target_tokens if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
    return sums.total / denominator.to(sums.total.device).clamp(min=1)
