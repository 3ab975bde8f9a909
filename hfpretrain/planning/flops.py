"""What a token costs in floating-point operations, and what a device can do at most: the two halves of an MFU.

Published MFUs differ by up to ten points through conventions alone, so each has a name here. Per trained token
(forward and backward; a multiply-add counts as 2):

- parameters: 6 N, where N counts the weights that are multiplied with every token: no input embedding (a look-up), the
  output head yes, tied or not, and of a mixture of experts the active ones only;
- attention: 12 * layers * width * attended, for the scores and the weighted sum, where `attended` is the mean number of
  positions a token looks at, and the convention is what one takes for it:
  "full" L, as if nothing were masked (Chowdhery et al. 2022, PaLM, appendix B);
  "causal" L / 2, the half that a causal mask leaves (FlashAttention, Megatron-LM's newer formula);
  "packed" the same half, inside each document only.

No operations for norms, softmax, rotary embeddings, the optimizer or recomputation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np


def flops_per_token(*, matmul_parameters: int, num_layers: int, attention_width: int, mean_attended: float) -> float:
    """FLOPs of training on one token.

    Args:
        matmul_parameters: N above.
        num_layers: layers with attention.
        attention_width: query heads times head dimension (not the key-value heads: every query head scores).
        mean_attended: positions a token attends to, on average: `sequence_length` ("full"), half of it ("causal"), or
            `mean_attended_packed(...)`. With a sliding window no more than the window.
    """
    if min(matmul_parameters, num_layers, attention_width, mean_attended) < 0:
        raise ValueError(
            f"counts cannot be negative; got {matmul_parameters=}, {num_layers=}, {attention_width=}, {mean_attended=}"
        )
    return 6.0 * matmul_parameters + 12.0 * num_layers * attention_width * mean_attended


def mean_attended_packed(piece_lengths: Sequence[int] | np.ndarray[Any, Any]) -> float:
    """Mean attended positions under a causal mask inside each piece: sum n^2 / 2 over sum n.

    In the habit of the causal convention, the diagonal is not counted: exactly it is n (n + 1) / 2 per piece, half a
    position more. One piece of L tokens gives L / 2.
    """
    lengths = np.asarray(piece_lengths, dtype=np.float64)
    if lengths.size == 0 or lengths.min() < 0 or lengths.sum() == 0:
        raise ValueError(f"expected lengths of pieces with at least one token in all; got {piece_lengths}")
    return float((lengths**2).sum() / (2.0 * lengths.sum()))


# Dense bf16 (fp32 accumulation) peak in FLOP/s by a whole word of the device's name. Data sheets of the makers; where a
# sheet only states the figure with 2:4 sparsity, half of it.
PEAK_FLOPS: dict[str, float] = {
    "V100": 125e12,  # fp16: it has no bf16
    "A100": 312e12,
    "A800": 312e12,  # an A100 with slower links
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "A10G": 70e12,
    "H100": 989.5e12,  # SXM, which calls itself "H100 80GB HBM3"
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H800": 989.5e12,
    "H200": 989.5e12,
    "H200 NVL": 835.5e12,
    "GH200": 989.5e12,
    "H20": 148e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "RTX 6000 Ada": 364e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165.2e12,
    "RTX 4090 D": 147e12,  # scaled by its number of cores, not from a sheet
    "MI250X": 191.5e12,  # per die: each is a device of its own
    "MI300X": 1307.4e12,
    "MI325X": 1307.4e12,
}
# A laptop part bears its desktop sibling's name, and a MIG slice that of the whole GPU.
_NOT_THE_WHOLE = ("laptop", "max-q", "mobile", "mig")


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of a device by the name its driver reports; None where unknown, never a guess.

    The longest entry of `PEAK_FLOPS` that stands in the name as whole words decides, so that an H200 is not a GH200 and
    an L40S not an L4.
    """
    if any(_contains(device_name, word) for word in _NOT_THE_WHOLE):
        return None
    matches = [fragment for fragment in PEAK_FLOPS if _contains(device_name, fragment)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


def _contains(device_name: str, words: str) -> bool:
    return re.search(rf"(?<![a-z0-9]){re.escape(words)}(?![a-z0-9])", device_name, flags=re.IGNORECASE) is not None
