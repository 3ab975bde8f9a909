"""One forward and backward pass of full rows before the first step: does a micro-batch fit in memory, and run at all?

It goes through what the steps go through (wrapper, loss, the way that keeps documents apart), in training mode, and
leaves nothing behind: its loss is multiplied by zero, so that every gradient it adds to a buffer of DDP or ZeRO is
zero; no reduction at an accumulation boundary and no update is made; random states and buffers are put back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hfpretrain.data.collator import PackedCollator
from hfpretrain.errors import Problem

_SEED = 20260101  # the same tokens on every rank; any number would do
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


@dataclass(frozen=True)
class Probe:
    """What a pass showed.

    Attributes:
        rows, sequence_length: its size, a whole micro-batch.
        seconds: it took; the first pass is slower than the steps that follow.
        peak_bytes: most memory of the GPU held so far, the optimizer's states included; None on a CPU.
    """

    rows: int
    sequence_length: int
    seconds: float
    peak_bytes: int | None

    def __str__(self) -> str:
        peak = "" if self.peak_bytes is None else f", {self.peak_bytes / 1e9:.2f} GB of the GPU at most"
        return f"{self.rows} full row(s) of {self.sequence_length:,} forward and backward{peak}; {self.seconds:.2f} s"


class ProbeError(RuntimeError):
    """The pass failed with `error`; `out_of_memory` where that is what it says."""

    def __init__(self, error: Exception, rows: int, sequence_length: int) -> None:
        lines = str(error).strip().splitlines() or [""]
        self.rows, self.given = rows, f"{rows} row(s) of {sequence_length:,}: {type(error).__name__}: {lines[0]}"
        short = isinstance(error, torch.OutOfMemoryError | MemoryError)
        self.out_of_memory = short or any(word in str(error).lower() for word in _OUT_OF_MEMORY)
        super().__init__(self.given)

    def problem(self, largest: int | None = None) -> Problem:
        """What to say; `largest` is the number of rows that is predicted to fit, if there is a prediction."""
        if not self.out_of_memory:
            what = "a forward and backward pass of full rows fails"
            return Problem(what, self.given, "model arguments", "what the error says; it would be the first step's")
        what = "a micro-batch of full rows does not fit in the memory of the device"
        half = (
            f"per_device_train_batch_size of {max(self.rows // 2, 1)}" if self.rows > 1 else "a shorter sequence_length"
        )
        fewer = f"per_device_train_batch_size of {largest}, which is predicted to fit" if largest else half
        remedy = f"{fewer}; or gradient_checkpointing: true, or a higher ZeRO stage: the training stays the same"
        return Problem(what, self.given, "per_device_train_batch_size", remedy)


def probe_step(
    model: nn.Module,
    backward: Callable[[dict[str, Any], Tensor], None],
    *,
    rows: int,
    sequence_length: int,
    vocab_size: int,
    collator: Callable[[Any], dict[str, Any]] | None,
    device: torch.device,
    state_bytes: int = 0,
) -> Probe:
    """Make the pass. Collective under ZeRO: every rank calls it.

    Args:
        model: what is called in a step, wrapper and all; its mode, buffers and gradients are as before afterwards.
        backward: (micro-batch, number of targets) -> back-propagates its loss times zero, without an update.
        collator: blocks -> micro-batch, that of the run.
        state_bytes: of optimizer states that the first update will allocate: held meanwhile on a GPU, because the
            second step has them too.

    Raises:
        ProbeError: out of memory, or whatever else the pass raises.
    """
    generator = np.random.default_rng(_SEED)
    block = {
        "input_ids": generator.integers(0, vocab_size, sequence_length),
        "piece_lengths": np.array([sequence_length]),
    }
    micro = (collator or PackedCollator(None))([block] * rows)
    targets = (micro["labels"] != -100).sum().to(device)
    start = time.perf_counter()
    ballast = None
    try:
        with _left_as_it_was(model, device):
            if device.type == "cuda":
                ballast = torch.empty(state_bytes, dtype=torch.uint8, device=device)
            backward(micro, targets)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except Exception as error:  # whatever a model's forward or backward raises
        raise ProbeError(error, rows, sequence_length) from error
    finally:
        del ballast
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Probe(rows, sequence_length, time.perf_counter() - start, peak)


def lazy_state_bytes(optimizer: Any, model: nn.Module) -> int:
    """Bytes of two moments for every trainable parameter, as long as a torch optimizer has no state yet; 0 under ZeRO.

    What Adam makes in its first step; other optimizers make less, so that this errs on the safe side.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if getattr(inner, "state", None) or not isinstance(inner, torch.optim.Optimizer):
        return 0
    return sum(2 * p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


@contextmanager
def _left_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Training mode meanwhile; then each module's own mode, all buffers and the random states again."""
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    devices = [device] if device.type == "cuda" else []
    model.train()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        for module, mode in modes.items():
            module.training = mode
