"""Tokens per second, step time and MFU of the training steps alone: evaluation and saving are not counted.

MFU is published under two conventions that differ by up to ten points, so both are logged by name:
`mfu_full` counts attention over the whole row (PaLM, arXiv:2204.02311, appendix B: 6N + 12 * layers * width * L),
`mfu_causal` counts the attention that is really needed (a token sees only earlier tokens of its own document).
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from hfpretrain.data.packing import PackedIndex
from hfpretrain.model import parameter_count, true_shape
from hfpretrain.planning.flops import flops_per_token, mean_attended_packed, peak_flops


@dataclass(frozen=True)
class TokenFlops:
    """Training FLOPs of one input token under both conventions.

    Attributes:
        full, causal: 6N and the attention term of that convention.
        matmul_parameters: the N of 6N: weights that a token is multiplied with.
        parameters: all of them, tied ones once.
    """

    full: float = 0.0
    causal: float = 0.0
    matmul_parameters: int = 0
    parameters: int = 0

    def __str__(self) -> str:
        return (
            f"{self.parameters:,} parameters, {self.matmul_parameters:,} of them multiplied with each token (N of 6N); "
            f"{self.causal / 1e6:,.1f} MFLOPs a trained token with causal attention, {self.full / 1e6:,.1f} with full"
        )


def token_flops(model: nn.Module, index: PackedIndex, *, isolate_documents: bool) -> TokenFlops:
    """FLOPs of one token of this model on this packing.

    N: all weights of two or more dimensions but input embeddings (a tied one is the output head, counted once), of a
    stack of experts the share that a token is sent to. Attention: layers that a config marks as linear, convolutional
    or recurrent are left out; sliding windows are not (so both figures are upper bounds there).
    """
    config: Any = model.config
    config = config.get_text_config()
    parameters = matmul_parameters(model)
    kinds = getattr(config, "layer_types", None) or ["attention"] * getattr(config, "num_hidden_layers", 0)
    layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    heads = getattr(config, "num_attention_heads", 0) or 0
    head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    attended = mean_attended_packed(index.piece_lengths) if isolate_documents else index.sequence_length / 2
    full, causal = (
        flops_per_token(
            matmul_parameters=parameters, num_layers=layers, attention_width=heads * head_dim, mean_attended=positions
        )
        for positions in (float(index.sequence_length), attended)
    )
    return TokenFlops(full, causal, parameters, parameter_count(model))


def matmul_parameters(model: nn.Module) -> int:
    """Weights that a token is multiplied with: the N of 6N (see `token_flops`)."""
    config: Any = model.config
    config = config.get_text_config()
    find_head: Any = getattr(model, "get_output_embeddings", None)
    head = find_head() if find_head is not None else None
    head_id = id(head.weight) if head is not None else None
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - {head_id}
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    chosen = getattr(config, "num_experts_per_tok", None) or experts
    total = 0
    for parameter in model.parameters():
        shape = true_shape(parameter)
        if len(shape) < 2 or id(parameter) in looked_up:
            continue
        size = int(np.prod(shape, dtype=np.int64))
        total += size * chosen // experts if experts and len(shape) == 3 and shape[0] == experts else size
    return total


def peak_memory_bytes() -> int:
    """Most memory held at once so far: of this process's GPU, or of the process itself on a machine without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_peak_flops() -> float | None:
    """Dense bf16 peak of this process's device in FLOP/s, None for a CPU or an unknown device."""
    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


@dataclass
class Throughput:
    """A stop-watch over the steps of a logging window. All counts are over all ranks.

    Attributes:
        peak_flops: dense peak of one device in FLOP/s; None where unknown, then no MFU is given.
        world_size: devices that share the work.
    """

    world_size: int = 1
    peak_flops: float | None = None
    _running_since: float | None = field(default=None, init=False)
    _seconds: float = field(default=0.0, init=False)
    _steps: int = field(default=0, init=False)
    _input_tokens: int = field(default=0, init=False)
    _target_tokens: int = field(default=0, init=False)
    _flops_full: float = field(default=0.0, init=False)
    _flops_causal: float = field(default=0.0, init=False)

    def start_step(self) -> None:
        """Start the clock, before the step's data is asked for; a clock that runs already goes on."""
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def end_step(
        self, *, input_tokens: int, target_tokens: int, flops_full: float = 0.0, flops_causal: float = 0.0
    ) -> None:
        """Stop the clock and add the step's global counts."""
        if self._running_since is None:
            raise RuntimeError("end_step() without start_step()")
        self._seconds += time.perf_counter() - self._running_since
        self._running_since = None
        self._steps += 1
        self._input_tokens += input_tokens
        self._target_tokens += target_tokens
        self._flops_full += flops_full
        self._flops_causal += flops_causal

    def drain(self) -> dict[str, float]:
        """Metrics of the window since the last call, empty if it had no step; starts a new window."""
        if not self._steps:
            return {}
        seconds = max(self._seconds, 1e-9)
        metrics = {
            "input_tokens_per_second": round(self._input_tokens / seconds, 1),
            "target_tokens_per_second": round(self._target_tokens / seconds, 1),
            "step_seconds": round(seconds / self._steps, 4),
        }
        if self.peak_flops and self._flops_full:
            available = self.peak_flops * self.world_size * seconds
            metrics["mfu_full"] = round(self._flops_full / available, 4)
            metrics["mfu_causal"] = round(self._flops_causal / available, 4)
        metrics["peak_memory_gib"] = round(peak_memory_bytes() / 2**30, 2)
        self._seconds, self._steps, self._input_tokens, self._target_tokens = 0.0, 0, 0, 0
        self._flops_full, self._flops_causal = 0.0, 0.0
        return metrics
