"""liger-kernel's fused linear cross-entropy (Triton) in the place of `head_sums` on CUDA, where it does what is asked.

It keeps no logits either and makes loss and gradients in fewer passes over them. What it cannot do is left to
`head_sums`: a padded vocabulary, a scale that would round half precision, weights in float64, and a trunk that is
frozen (0.8.5 then loses the head's gradient). It does not return log Z or the largest logit, so those are taken from
a sample of tokens. Checked against `head_sums` in Triton's interpreter on a CPU; on a GPU `verify` does, before use.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch
from torch import Tensor

from hfpretrain.loss.head import head_sums
from hfpretrain.loss.sums import IGNORE_INDEX, LogitTransform, LossSums

_SAMPLED_TOKENS = 256  # about 1 % more work at the head for a micro-batch of 8,192 tokens


def liger_can(device: torch.device, dtype: torch.dtype, transform: LogitTransform) -> bool:
    """Whether it is installed and does this; without looking at any value."""
    exact_scale = math.frexp(transform.scale)[0] == 0.5 or dtype == torch.float32
    return (
        device.type == "cuda"
        and find_spec("liger_kernel") is not None
        and dtype != torch.float64
        and transform.vocabulary is None
        and exact_scale
    )


def liger_sums(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    z_loss_weight: float = 0.0,
    transform: LogitTransform | None = None,
) -> LossSums:
    """The same as `head_sums`, but `log_z` and `logit_max` are those of every n-th token, 256 or a few more in all."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    transform = transform or LogitTransform()
    same = {"bias_V": bias_V, "z_loss_weight": z_loss_weight, "transform": transform}
    if not (torch.is_grad_enabled() and hidden_ND.requires_grad):
        return head_sums(hidden_ND, weight_VD, targets_N, **same)  # type: ignore[arg-type]
    with torch.no_grad():
        every = max(1, len(targets_N) // _SAMPLED_TOKENS)
        sample = head_sums(hidden_ND[::every], weight_VD, targets_N[::every], **same)  # type: ignore[arg-type]
    made = liger_fused_linear_cross_entropy(
        hidden_ND if transform.scale == 1.0 else hidden_ND * transform.scale,
        weight_VD,
        targets_N,
        bias=bias_V if bias_V is None or transform.scale == 1.0 else bias_V * transform.scale,
        ignore_index=IGNORE_INDEX,
        lse_square_scale=z_loss_weight,
        reduction="sum",
        softcap=transform.softcap,
        return_z_loss=True,
        accum_dtype=torch.float32,
    )
    z_loss = made.z_loss.detach().float()  # weighted, and part of the loss
    target_tokens = (targets_N != IGNORE_INDEX).sum()
    share = target_tokens / sample.target_tokens.clamp(min=1)
    return LossSums(
        total=made.loss,
        cross_entropy=made.loss.detach() - z_loss,
        z_square=z_loss / z_loss_weight if z_loss_weight else sample.z_square * share,
        log_z=sample.log_z * share,
        logit_max=sample.logit_max,
        target_tokens=target_tokens,
    )
