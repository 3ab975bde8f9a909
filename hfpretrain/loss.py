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
        logits_BTV: what the model returned for `input_ids`, any floating type; the log-sum-exp is taken in float32.
        labels_BT: unshifted labels, `IGNORE_INDEX` where nothing is to be learnt.

    No target at all gives 0 with a zero gradient, never NaN.
    Source: seed document, section 2.3.3 (`reduction="sum"`, then divide by the tokens of the whole step).
    """
    logits = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    targets = shift_labels(labels_BT).to(logits.device)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def token_mean_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Token-exact `compute_loss_func` for a stock `transformers.Trainer`.

    Right for every architecture that returns logits, also for those whose own loss ignores `num_items_in_batch`.
    The Trainer's count is exact if the first label of each row is `IGNORE_INDEX`, which `PackedCollator` guarantees.
    """
    denominator = count_targets(labels) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
    return cross_entropy_sum(outputs["logits"], labels) / denominator.to(labels.device).clamp(min=1)
