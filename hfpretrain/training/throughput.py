"""Tokens per second, step time and MFU of the training steps alone: evaluation and saving are not counted.

MFU is published under two conventions that differ by up to ten points, so both are logged by name:
`mfu_full` counts attention over the whole row (PaLM, arXiv:2204.02311, appendix B: 6N + 12 * layers * width * L),
`mfu_causal` counts the attention that is really needed (a token sees only earlier tokens of its own document).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


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
        if torch.cuda.is_available():
            metrics["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        self._seconds, self._steps, self._input_tokens, self._target_tokens = 0.0, 0, 0, 0
        self._flops_full, self._flops_causal = 0.0, 0.0
        return metrics
