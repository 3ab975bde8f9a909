"""`torch_varlen`: causal attention inside documents, with the kernels that torch itself ships.

A transformers attention implementation (`attn_implementation="torch_varlen"`) for packed rows. On CUDA it calls
`torch.nn.attention.varlen.varlen_attn` (FlashAttention, no flash-attn build needed); elsewhere, and for what that does
not compute (float32, dropout, softcap, sinks), it goes document by document. Either way no [T, T] mask is built and no
work is done between documents.

Where documents end comes from `cu_seq_lens_q` and `max_length_q`, which `PackedCollator("varlen")` makes for one flat
row [1, B * L] and which a model hands on to its attention layers with its other keyword arguments; without them each
row is one document. That a model does hand them on is measured by `data.isolation`, never assumed.

Shape suffixes: B rows, H query heads, K key-value heads, T positions, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

TORCH_VARLEN = "torch_varlen"
_UNSTATED: Any = object()  # a layer says nothing of a window, not even None


def register_torch_varlen() -> None:
    """Make `attn_implementation="torch_varlen"` known to transformers; nothing else changes."""
    AttentionInterface.register(TORCH_VARLEN, torch_varlen_attention)
    AttentionMaskInterface.register(TORCH_VARLEN, _no_mask)


def varlen_attentions() -> list[str]:
    """Attention for variable lengths that can run here, the fastest first: flash-attn on CUDA where it is installed."""
    flash = torch.cuda.is_available() and find_spec("flash_attn") is not None
    return ["flash_attention_2", TORCH_VARLEN] if flash else [TORCH_VARLEN]


def torch_varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = _UNSTATED,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of queries [B, H, T, D] over keys and values [B, K, T, D] -> [B, T, H, D].

    Args:
        sliding_window: positions that a token sees, itself included.
        softcap: scores s become softcap * tanh(s / softcap) (Gemma 2).
        s_aux: one score per head that takes part in the softmax and has no value: a sink (gpt-oss).
        cu_seq_lens_q: int32 [documents + 1], where documents begin in the flat row, and its end.

    Raises:
        ValueError: attention with a mask or bias, not causal, with keys of another length (a cache), or with a window
            or chunks in the config of which the layer says nothing (llama4_text, phimoe): they would be in the mask.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse(
        module,
        {
            "an attention mask": attention_mask is not None,
            "a bias of positions": position_bias is not None,
            "attention that is not causal": not causal,
            "keys of another length than queries (a cache, cross-attention)": key.shape[2] != query.shape[2],
            "a window or chunks made by a mask": sliding_window is _UNSTATED and _window_in_config(module),
        },
    )
    window = None if sliding_window is _UNSTATED else sliding_window
    if torch.is_autocast_enabled(query.device.type):  # as for sdpa; rotary embeddings leave queries in float32
        half = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(half), key.to(half), value.to(half)
    rows, _, length, _ = query.shape
    if cu_seq_lens_q is None:
        bounds = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=query.device)
    else:
        bounds = cu_seq_lens_q
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [B * T, H or K, D]
    how = _How(scaling, window, dropout if module.training else 0.0, softcap, s_aux)
    if how.fits_kernel(q, v):
        longest = length if cu_seq_lens_q is None or max_length_q is None else int(max_length_q)
        out = _kernel(q, k, v, bounds, longest, how)
    else:
        sizes = [length] * rows if cu_seq_lens_q is None else bounds.diff().tolist()
        # split, not slices: the backward of each slice would fill a whole tensor
        parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        out = torch.cat([_document(*part, how) for part in parts if len(part[0])])
    return out.unflatten(0, (rows, length)), None


@dataclass(frozen=True)
class _How:
    """What is computed beside plain causal attention."""

    scale: float | None
    window: int | None
    dropout: float
    softcap: float | None
    sinks: Tensor | None

    def fits_kernel(self, query: Tensor, value: Tensor) -> bool:
        plain = not self.dropout and self.softcap is None and self.sinks is None
        half = query.dtype in (torch.float16, torch.bfloat16)
        width = query.shape[-1]  # the kernel itself refuses other widths than these
        return plain and half and query.is_cuda and value.shape[-1] <= width <= 256 and width % 8 == 0


def _kernel(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, how: _How) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1 if how.window is None else how.window - 1, 0)  # tokens before; transformers counts the token itself
    width = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - width))  # latent attention has narrower values; zeros give zeros
    out = varlen_attn(
        query, key, value, bounds, bounds, longest, longest, scale=how.scale, window_size=window, enable_gqa=True
    )
    assert isinstance(out, Tensor)
    return out[..., :width]


def _document(query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
    """[T, H, D] of one document -> [T, H, D]; a mask only where the window is shorter than the document."""
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))  # [H or K, T, D]
    length = q.shape[1]
    if how.softcap is not None or how.sinks is not None:
        return _written_out(q, k, v, _causal_mask(length, how.window, q.device), how).transpose(0, 1)
    windowed = how.window is not None and length > how.window
    out = F.scaled_dot_product_attention(
        q[None],
        k[None],
        v[None],
        attn_mask=_causal_mask(length, how.window, q.device) if windowed else None,
        is_causal=not windowed,
        dropout_p=how.dropout,
        scale=how.scale,
        enable_gqa=len(q) != len(k),
    )
    return out[0].transpose(0, 1)


def _written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, how: _How) -> Tensor:
    """Scores, softcap, sinks and softmax one after another; float32 softmax as in transformers' eager attention."""
    groups = len(query) // len(key)
    key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
    scores = query @ key.transpose(1, 2) * (query.shape[-1] ** -0.5 if how.scale is None else how.scale)
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if how.sinks is not None:
        sinks = how.sinks.reshape(-1, 1, 1).expand(-1, scores.shape[1], 1).to(scores)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[1]]
    return F.dropout(weights, how.dropout) @ value


def _causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _window_in_config(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    limits = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return any(isinstance(limit, int) and limit > 0 for limit in limits)


def _refuse(module: nn.Module, present: dict[str, bool]) -> None:
    if named := [name for name, is_there in present.items() if is_there]:
        raise ValueError(
            f"{TORCH_VARLEN} does not compute {', '.join(named)}, which {type(module).__name__} asks for; use "
            "attn_implementation sdpa or eager"
        )


def _no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    if attention_mask is not None:
        raise ValueError(f"{TORCH_VARLEN} takes no attention_mask; documents are told apart by cu_seq_lens_q")
