"""Gradient noise scale: how many tokens it takes until a gradient is as much signal as noise.

B = tr(Sigma) / |G|^2 (`noise_estimate` has the formulas). Both are estimated from the gradients of one step's
micro-batches and their mean, without a second backward pass: a hook on each parameter sees the gradient of this
micro-batch on this rank, before it is accumulated, reduced, partitioned or clipped, under DDP and every ZeRO stage.

"The gradient" is that of what is back-propagated, z-loss and router loss included (the latter weighted by target tokens
like the rest, so that a micro-batch's gradient is its tokens times a mean). Micro-batches must be independent draws:
where each rank has a domain of its own, tr(Sigma) contains the variance between domains.

How far B predicts the batch beyond which more tokens a step no longer pay is disputed: well in McCandlish et al., too
small by orders of magnitude in Merrill et al. 2025 (arXiv:2505.23971, OLMo). It is a diagnostic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.utils import logging

from hfpretrain.loss import count_targets
from hfpretrain.training.noise_estimate import HORIZON_STEPS, Estimate, NoiseAverage, estimate

logger = logging.get_logger(__name__)


class NoiseScale:
    """Hooks that measure, for any loop:

        noise = NoiseScale(model).attach()
        for each step:
            for each micro-batch:
                (token_sum_of_losses * world_size / step_tokens).backward()
                noise.end_micro_batch(target_tokens)
            noise.end_step(clip_grad_norm_(model.parameters(), 1.0))  # the norm before clipping
            print(noise.metrics())

    Attach it to the model as it trains: converted, moved, and wrapped by DDP or DeepSpeed before. On several ranks
    `end_step` is collective, and all have the same number of micro-batches; gradients are averaged over ranks, so that
    world_size cancels. Nothing is read back from the device but in `end_step` of a measured step.

    Args:
        every: measure each `every`-th step, from the first; the others pay for a flag.
        equal_weights: the loss is the mean of micro-batches' means, in place of the mean over all tokens of the step.
        horizon: measured steps that the averages look back on.

    Attributes:
        average: of all steps so far.
        last: the estimate of the last measured step, None if it had none.
        step_tokens: target tokens of the last step that had an estimate.
    """

    def __init__(
        self, model: nn.Module, *, every: int = 1, equal_weights: bool = False, horizon: int = HORIZON_STEPS
    ) -> None:
        if every < 1 or horizon < 2:
            raise ValueError(f"{every=} and {horizon=}: expected every >= 1 and horizon >= 2 (measured) steps")
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient, nothing to measure")
        self.every = every
        self.equal_weights = equal_weights
        self.average = NoiseAverage(horizon)
        self.steps = 0
        self.last: Estimate | None = None
        self.step_tokens = 0
        self._handles: list[Any] = []
        self._warned: set[str] = set()
        self._squares: list[Tensor] = []  # of each gradient of the running backward pass
        self._fires = [0] * len(self.parameters)  # gradients that each parameter got in it
        self._rows: list[Tensor] = []  # of the micro-batches that are done

    def attach(self) -> Self:
        """Put the hooks on; twice is once."""
        self.remove()
        # A function each: a hook is told the gradient only, not whose it is.
        self._handles = [p.register_hook(self._hook_of(index)) for index, p in enumerate(self.parameters)]
        return self

    def remove(self) -> None:
        """Take the hooks off; what was measured stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.discard_step()

    @property
    def measuring(self) -> bool:
        """Whether the running step is measured."""
        return bool(self._handles) and self.steps % self.every == 0

    def end_micro_batch(self, target_tokens: Tensor | int) -> None:
        """After each backward pass.

        Args:
            target_tokens: positions with a loss in this micro-batch on this rank; 0 leaves it out.
        """
        if not self.measuring:
            return
        if not self._squares:
            raise RuntimeError(
                "no gradient reached the hooks in this backward pass: attach() must come after whatever converts, "
                "moves or wraps the model, and end_micro_batch() after each backward()"
            )
        square = torch.stack(self._squares).sum(dtype=torch.float64)
        entries = (target_tokens, square, max(self._fires))
        self._rows.append(torch.stack([torch.as_tensor(e).detach().to(square) for e in entries]))
        self._squares, self._fires = [], [0] * len(self.parameters)

    def end_step(self, grad_norm: Tensor | float | None, *, keep: bool = True) -> Estimate | None:
        """After the last micro-batch, on all ranks.

        Args:
            grad_norm: norm of the gradient of the whole step over all ranks, before clipping; None drops the step.
            keep: False drops it as well, for an update that was not made.
        """
        rows, measuring = self._rows, self.measuring
        self.steps += 1
        self.discard_step()
        if not measuring:
            return None
        if not rows:
            raise RuntimeError("end_step() without end_micro_batch(): call it after each backward()")
        self.last = self._estimate(self._gathered(rows), grad_norm) if keep else None
        if self.last is not None:
            self.average.add(self.last)
        return self.last

    def discard_step(self) -> None:
        """Forget the micro-batches of a step that is not ended."""
        self._squares, self._fires, self._rows = [], [0] * len(self.parameters), []

    def metrics(self) -> dict[str, float]:
        """For a log line; what is not defined (yet) is absent. B is the noise scale, b the batch, in target tokens.

        `grad_sq` and `grad_trace` (averages), `noise_scale_tokens` and `noise_scale_stderr_tokens`, and what this batch
        costs against the least possible if B is the critical batch (McCandlish et al. 2018, section 2.3):
        `critical_batch_steps_factor`, 1 + B/b times the steps, and `critical_batch_tokens_factor`, 1 + b/B times the
        tokens.
        """
        if not self.average.measured:
            return {}
        metrics = {"grad_sq": self.average.grad_sq, "grad_trace": self.average.grad_trace}
        found = self.average.noise_scale()
        if found is not None:
            scale, error = found
            metrics |= {"noise_scale_tokens": scale, "noise_scale_stderr_tokens": error}
            metrics["critical_batch_steps_factor"] = 1 + scale / self.step_tokens
            metrics["critical_batch_tokens_factor"] = 1 + self.step_tokens / scale
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Numbers for JSON; loaded again, the next log line is what it would have been."""
        return {"steps": self.steps, "step_tokens": self.step_tokens, "average": asdict(self.average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.step_tokens = state["steps"], state["step_tokens"]
        self.average = NoiseAverage(**state["average"] | {"horizon": self.average.horizon})

    def _hook_of(self, index: int) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            if not self.measuring:
                return
            self._fires[index] += 1
            # One product, no copy of the gradient, and nobody waits for it; half precision is added up in float32.
            if grad.dtype.itemsize >= 4:
                flat = grad.reshape(-1)
                self._squares.append(torch.dot(flat, flat))
            else:
                self._squares.append(torch.linalg.vector_norm(grad, dtype=torch.float32).square())

        return hook

    def _gathered(self, rows: list[Tensor]) -> list[list[float]]:
        """[tokens, |gradient|^2, fires] of each micro-batch of every rank, in rank order."""
        mine = torch.stack(rows)
        if _world_size() == 1:
            return mine.tolist()
        ranks = [torch.empty_like(mine) for _ in range(_world_size())]
        dist.all_gather(ranks, mine)
        return torch.cat(ranks).tolist()

    def _estimate(self, rows: list[list[float]], grad_norm: Tensor | float | None) -> Estimate | None:
        tokens, squares, fires = (list(column) for column in zip(*rows, strict=True))
        if max(fires) > 1:
            self._say_dropped(
                f"a parameter got {max(fires):.0f} gradients in one backward pass, each a part of the micro-batch's "
                "(checkpointing with use_reentrant=True and shared weights, or a loss in tiles): use_reentrant=False"
            )
            return None
        if grad_norm is None or not math.isfinite(float(grad_norm)):
            self._say_dropped(f"the gradient norm of the whole step is {grad_norm}")
            return None
        used = [n > 0 for n in tokens]
        total, count = sum(tokens), sum(used)
        if not count:
            return None
        weights = [float(u) / count if self.equal_weights else n / total for n, u in zip(tokens, used, strict=True)]
        # Each rank's backward pass saw world_size * w_k * m_k, because ranks are averaged.
        scales = [(_world_size() * w) ** 2 for w in weights]
        means = [square / scale if scale else 0.0 for square, scale in zip(squares, scales, strict=True)]
        found = estimate(tokens, means, float(grad_norm) ** 2, weights=weights)
        self.step_tokens = int(total) if found is not None else self.step_tokens
        return found

    def _say_dropped(self, reason: str) -> None:
        if reason not in self._warned and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning(f"gradient noise scale: this step is left out, because {reason}")
        self._warned.add(reason)


class NoiseScaleCallback(TrainerCallback):
    """`NoiseScale` for a stock Trainer, which measures the steps that it logs.

        noise = NoiseScaleCallback(model, token_mean_loss)
        Trainer(model, args, ..., compute_loss_func=noise.loss, callbacks=[noise]).train()

    The metrics stand in `trainer.state.log_history`, beside `loss` and `grad_norm`.

    Args:
        loss: a `compute_loss_func` whose value is token sum / num_items_in_batch, such as `token_mean_loss`.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        self.noise = NoiseScale(model)
        self._loss = loss
        self._tokens: Tensor | None = None

    def loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        self._tokens = count_targets(labels)
        return self._loss(outputs, labels, num_items_in_batch)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.noise.attach()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.noise.discard_step()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        if self._tokens is None:
            raise RuntimeError("no loss was seen: give the Trainer compute_loss_func=noise.loss, too")
        self.noise.end_micro_batch(self._tokens)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.on_substep_end()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs is not None and "grad_norm" in logs:
            self.noise.end_step(logs["grad_norm"])
            state.log_history[-1].update(self.noise.metrics())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.noise.remove()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
