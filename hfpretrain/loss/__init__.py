"""The loss: sums over tokens, at the head or from the logits, and how it is put on a model."""

from hfpretrain.loss.fuse import FusedLoss, LossOutput, fuse_loss
from hfpretrain.loss.head import head_sums
from hfpretrain.loss.sums import IGNORE_INDEX, LossSums, count_targets, logits_sums, shift_labels, token_mean_loss

__all__ = [
    "IGNORE_INDEX",
    "FusedLoss",
    "LossOutput",
    "LossSums",
    "count_targets",
    "fuse_loss",
    "head_sums",
    "logits_sums",
    "shift_labels",
    "token_mean_loss",
]
