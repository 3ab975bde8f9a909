"""Leave out an update whose loss or gradient norm is far outside what the last steps had.

One bad batch can throw a run back by thousands of steps: its gradient is clipped in length, but its direction goes
into Adam's moments. PaLM (arXiv:2204.02311, section 5.1) went back to a checkpoint and left such batches out by hand.
Here the batch is left out at once: neither weights nor moments see it; the step counter and the learning rate go on.

What is normal is the median of the last accepted steps; how far is far, multiples of their median absolute deviation.
A spike enters neither, so that it does not make room for the next one; and what is unusually small is no spike.

The update is stopped where it happens, in the optimizer that all wrappers end in: before its step the gradients are
taken away, and torch's optimizers pass over parameters without one; after it they are given back to whoever keeps them
(ZeRO's offload does). At that point DeepSpeed knows the norm of this very step, at every ZeRO stage.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist

WINDOW_STEPS = 128  # accepted steps that define what is normal
LEAST_STEPS = 20  # accepted steps before anything is judged
MOST_CONSECUTIVE = 10  # updates left out one after another before the run stops
_NORMAL = 1.4826  # standard deviations of a normal distribution per median absolute deviation
_LEAST_DEVIATION = 0.01  # of the median: where steps hardly differ, hardly anything would be normal


class ConsecutiveSpikesError(RuntimeError):
    """`MOST_CONSECUTIVE` updates in a row were left out: it is not the batch. Weights are those before the first."""


@dataclass(frozen=True)
class Spike:
    """Why an update was left out.

    Attributes:
        step: 0-based step, and `where` its data stands.
        loss, grad_norm: of the step; the norm is before clipping.
        exceeded: which of them is too large, "loss" or "grad_norm" (the loss, if both are).
        median, threshold: of the accepted steps before, of what was exceeded.
        consecutive: updates left out in a row, this one included.
    """

    step: int
    where: str
    loss: float
    grad_norm: float
    exceeded: str
    median: float
    threshold: float
    consecutive: int

    def __str__(self) -> str:
        return (
            f"update of step {self.step} left out: {self.exceeded} above {self.threshold:.4g} (median "
            f"{self.median:.4g}); loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}; {self.where}"
        )


@dataclass
class SpikeHistory:
    """Losses and gradient norms of the last accepted steps. No torch: the decision is a function of numbers.

    Attributes:
        skipped_updates: in the whole run.
        in_a_row: what was left out since the last accepted step, for the error.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped_updates: int = 0
    in_a_row: list[str] = field(default_factory=list)

    def judge(self, loss: float, grad_norm: float, *, deviations: float, step: int, where: str) -> Spike | None:
        """The spike that a step is, or None, and it belongs to the history from now on."""
        for name, value, before in (("loss", loss, self.losses), ("grad_norm", grad_norm, self.grad_norms)):
            if len(before) < LEAST_STEPS:
                break
            median, threshold = limit(before, deviations)
            if value > threshold:
                self.skipped_updates += 1
                row = len(self.in_a_row) + 1
                spike = Spike(step, where, loss, grad_norm, name, median, threshold, row)
                self.in_a_row.append(str(spike))
                return spike
        self.in_a_row = []
        self.losses = [*self.losses, loss][-WINDOW_STEPS:]
        self.grad_norms = [*self.grad_norms, grad_norm][-WINDOW_STEPS:]
        return None


def limit(values: list[float], deviations: float) -> tuple[float, float]:
    """(median, median + deviations * robust standard deviation) of accepted values."""
    median = statistics.median(values)
    spread = _NORMAL * statistics.median(abs(value - median) for value in values)
    return median, median + deviations * max(spread, _LEAST_DEVIATION * abs(median))


class SpikeGuard:
    """Stops outlying updates of one optimizer, wrapped by accelerate or DeepSpeed or not:

        guard = SpikeGuard(8.0).attach(optimizer)
        for each step:
            guard.begin(step, loss, clip_grad_norm_(model.parameters(), 1.0))  # the norm before clipping
            optimizer.step()
            spike = guard.end()  # None: the update was made

    On several ranks the largest loss and norm of all decides, so that they agree; `begin` takes its numbers from each.

    Args:
        deviations: robust standard deviations above the median that are too many.
        device: where collectives are done: the GPU with NCCL.
    """

    def __init__(self, deviations: float, *, device: torch.device | str = "cpu") -> None:
        if not deviations > 0:
            raise ValueError(f"deviations is {deviations}, expected a number above 0, such as 8")
        self.deviations = deviations
        self.device = torch.device(device)
        self.history = SpikeHistory()
        self._handles: list[Any] = []
        self._hidden: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []
        self._numbers: tuple[int, float, float | Callable[[], float], str] | None = None
        self._decided = False
        self._spike: Spike | None = None
        self._not_finite = ""

    def attach(self, optimizer: Any) -> Self:
        """Put the hooks on the optimizer inside all wrappers, and on the one that ZeRO-Offload keeps beside it."""
        self.remove()
        for inner in _innermost(optimizer):
            self._handles.append(inner.register_step_pre_hook(self._before))
            self._handles.append(inner.register_step_post_hook(self._after))
        return self

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin(
        self, step: int, loss: float, grad_norm: float | torch.Tensor | Callable[[], float], *, where: str = ""
    ) -> None:
        """Before the optimizer's step.

        Args:
            grad_norm: before clipping; or where to get it during the step, if only the engine makes it there.
            where: place of the step's data, for messages.
        """
        self._numbers = (step, float(loss), grad_norm if callable(grad_norm) else float(grad_norm), where)
        self._decided, self._spike, self._not_finite = False, None, ""

    def end(self) -> Spike | None:
        """After the optimizer's step: the spike, if the update was left out.

        Raises:
            ConsecutiveSpikesError: too many in a row.
            FloatingPointError: loss or norm is not finite; no update is made then.
            RuntimeError: the optimizer made a step without asking.
        """
        if self._numbers is not None and not self._decided:
            raise RuntimeError(
                "the update was made (or left out) without passing the hooks: attach() must come after whatever wraps "
                "the optimizer, and begin() before each of its steps"
            )
        self._numbers = None
        if self._not_finite:
            raise FloatingPointError(self._not_finite)
        if len(self.history.in_a_row) >= MOST_CONSECUTIVE:
            listed = "\n  ".join(self.history.in_a_row)
            raise ConsecutiveSpikesError(
                f"{MOST_CONSECUTIVE} updates in a row were left out, so it is not a bad batch:\n  {listed}\nWeights "
                "are those before the first of them. Resume from the last checkpoint with a lower learning rate, or "
                "more robust standard deviations, or look at these rows."
            )
        return self._spike

    def state_dict(self) -> dict[str, Any]:
        """Numbers for JSON."""
        return asdict(self.history)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = SpikeHistory(**state)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Decide at the first of the calls that make one step (ZeRO makes one per group), then act at each."""
        if self._numbers is None:
            return
        if not self._decided:
            self._spike, self._decided = self._decide(*self._numbers), True
        if self._spike is not None or self._not_finite:
            self._hidden = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
            for parameter, _grad in self._hidden:
                parameter.grad = None

    def _after(self, *_: Any) -> None:
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden = []

    def _decide(self, step: int, loss: float, grad_norm: float | Callable[[], float], where: str) -> Spike | None:
        norm = float(grad_norm()) if callable(grad_norm) else grad_norm
        # A maximum may lose a NaN.
        numbers = torch.tensor([loss, norm], dtype=torch.float64, device=self.device).nan_to_num(nan=math.inf)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        loss, norm = numbers.tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._not_finite = f"loss {loss} and gradient norm {norm} at step {step}; the update was not made; {where}"
            return None
        return self.history.judge(loss, norm, deviations=self.deviations, step=step, where=where)


def _innermost(optimizer: Any) -> list[torch.optim.Optimizer]:
    found, backups = optimizer, []
    while True:
        backups += [b for b in (getattr(found, "backup_optimizer", None),) if b is not None]
        if isinstance(found, torch.optim.Optimizer) and not hasattr(found, "optimizer"):
            return [found, *(b for b in backups if b is not found)]
        if not hasattr(found, "optimizer"):
            raise TypeError(f"{type(optimizer).__name__} holds no torch optimizer whose steps could be left out")
        found = found.optimizer
