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

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hfpretrain.planning.figures import positive


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


def mean_attended(sequence_length: float, *, document_tokens: float | None = None, window: int | None = None) -> float:
    """Mean attended positions in rows cut from a stream of documents of one length, each seeing only itself.

    Of a token at p of its document and r of its row, with both evenly spread, min(p, r, w) positions are before it and
    in sight. Its mean is t - t^2 / 2 (1 / m + 1 / L) + t^3 / (3 m L), t = min(w, m, L): L / 2 for one endless document
    without a window, m / 2 - m^2 / (6 L) for documents of m < L. The diagonal is not counted, as above.

    Args:
        sequence_length: L, positions of a row.
        document_tokens: m, its begin and end tokens included; None: a document fills every row. Documents that differ
            in length attend to more than this at the same mean: sum n^2 / (2 sum n) before they are cut.
        window: w, positions that a token sees; None: no limit.
    """
    positive(sequence_length=sequence_length)
    if document_tokens is not None:
        positive(document_tokens=document_tokens)
    per_document = 0.0 if document_tokens is None else 1 / document_tokens
    per_row = 1 / sequence_length
    t = min(sequence_length, *(limit for limit in (document_tokens, window) if limit is not None), math.inf)
    return t - t**2 / 2 * (per_document + per_row) + t**3 / 3 * per_document * per_row


@dataclass(frozen=True)
class TokenCost:
    """Forward FLOPs of one token, by what they are spent on. The backward pass costs twice as much.

    Attributes:
        matrices: role -> FLOPs of products with its weights, 2 for each active one.
        attention: window (None: the whole document) -> FLOPs of scores and weighted sums.
        full_attention: the same as if nothing were masked away.
        mixing: other products of activations.
    """

    matrices: Mapping[str, float]
    attention: Mapping[int | None, float]
    full_attention: float
    mixing: float = 0.0

    @property
    def weights(self) -> float:
        """2 N: N the active weights."""
        return math.fsum(self.matrices.values())

    @property
    def forward(self) -> float:
        return self.weights + math.fsum(self.attention.values()) + self.mixing

    @property
    def training(self) -> float:
        """Forward and backward: every product has two gradients, each a product of the same size."""
        return 3 * self.forward

    @property
    def training_full_attention(self) -> float:
        """By the full-attention convention."""
        return 3 * (self.weights + self.full_attention + self.mixing)

    @property
    def recomputed(self) -> float:
        """What gradient checkpointing computes a second time: the layers, not the head. 2 N of 8 N D."""
        return self.forward - self.matrices.get("head", 0.0)


def token_cost(
    active: Mapping[str, float],
    attention: Sequence[tuple[int | None, float]],
    *,
    sequence_length: int,
    document_tokens: float | None = None,
    mixing_flops: float = 0.0,
) -> TokenCost:
    """Forward FLOPs of a token of a model.

    Args:
        active: role -> weights that a token is multiplied with.
        attention: (window, query heads * (key width + value width) / 2 summed over its layers) each.
        document_tokens: as for `mean_attended`.
    """
    costs = {
        window: 4.0 * width * mean_attended(sequence_length, document_tokens=document_tokens, window=window)
        for window, width in attention
    }
    return TokenCost(
        matrices={role: 2.0 * count for role, count in active.items() if count},
        attention=costs,
        full_attention=math.fsum(4.0 * width * sequence_length for _, width in attention),
        mixing=mixing_flops,
    )


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
