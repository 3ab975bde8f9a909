"""Cross-entropy as a token *sum*, so that the caller alone decides what it is divided by.

Shape suffixes: B rows, T positions of a row, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100  # Hugging Face's label for "no loss here"


def shift_labels(labels_BT: torch.Tensor) -> torch.Tensor:
    """Labels in Hugging Face's habit (label t = token t) -> the target of each position (token t + 1).

    The last position has no target. Shifting the labels rather than slicing the logits spares a copy of the
    largest tensor of the step.
    """
    return F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE_INDEX)


def count_targets(labels_BT: torch.Tensor) -> torch.Tensor:
    """Number of positions that carry a loss, a 0-d int64 tensor. The first column is no target of anything."""
    return (labels_BT[:, 1:] != IGNORE_INDEX).sum()


def cross_entropy_sum(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Sum over all targets of -log p(target), in nats, as a 0-d float32 tensor (float64 for float64 logits).

    Args:
        logits_BTV: what the model returned for `input_ids`, any floating type; exponentials and sums are float32.
        labels_BT: unshifted labels, `IGNORE_INDEX` where nothing is to be learnt.

    No target at all gives 0 with a zero gradient, never NaN. Backward runs once: the gradient is handed out, not kept.
    Source: seed document, section 2.3.3 (`reduction="sum"`, then divide by the tokens of the whole step).
    """
    targets = shift_labels(labels_BT).to(logits_BTV.device).flatten()
    logits = logits_BTV.flatten(0, 1)
    total: torch.Tensor = _CrossEntropySum.apply(logits, targets)
    return total


class _CrossEntropySum(torch.autograd.Function):
    """Loss and gradient in one pass over the logits, a few rows at a time.

    `F.cross_entropy` keeps a float32 copy of the log-probabilities for its backward; here the only [tokens, V] tensor
    besides the logits is their gradient, in their own type: two thirds of its time (`benchmarks/cross_entropy.py`).
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        exact = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
        gradient = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        # 8 MB of float32 stay near a CPU's cache; a GPU wants long kernels instead (not measured on one).
        rows = max(1, (2**21 if logits_NV.device.type == "cpu" else 2**25) // logits_NV.shape[1])
        sums = []
        for first in range(0, len(targets_N), rows):
            target = targets_N[first : first + rows]
            is_target = target != IGNORE_INDEX
            index = target.clamp(min=0)[:, None]
            scores = logits_NV[first : first + rows].to(exact)
            shifted = scores - scores.amax(dim=1, keepdim=True)
            of_target = shifted.gather(1, index)
            shifted.exp_()
            normaliser = shifted.sum(dim=1, keepdim=True)
            nats = (normaliser.log() - of_target)[:, 0]
            sums.append(torch.where(is_target, nats, torch.zeros_like(nats)).sum())
            if gradient is not None:  # softmax - onehot, 0 where there is no target
                weight = is_target[:, None].to(exact)
                shifted.mul_(weight / normaliser).scatter_add_(1, index, -weight)
                gradient[first : first + rows] = shifted
        ctx.gradient = gradient
        return torch.stack(sums).sum() if sums else logits_NV.new_zeros((), dtype=exact)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("the cross-entropy sum was back-propagated twice; its gradient is handed out only once")
        return gradient.mul_(grad_total), None


def token_mean_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Token-exact `compute_loss_func` for a stock `transformers.Trainer`.

    Right for every architecture that returns logits, also for those whose own loss ignores `num_items_in_batch`.
    The Trainer's count is exact if the first label of each row is `IGNORE_INDEX`, which `PackedCollator` guarantees.
    """
    denominator = count_targets(labels) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
    return cross_entropy_sum(outputs["logits"], labels) / denominator.to(labels.device).clamp(min=1)
