"""What a step adds up over all ranks, and what the log line makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hfpretrain.loss import LossOutput


@dataclass(frozen=True)
class StepSums:
    """Sums over target tokens, all ranks and micro-batches of one optimizer step.

    Attributes:
        cross_entropy: nats.
        router: coefficient * balancing loss of each micro-batch, weighted by its target tokens; 0 without a router.
        z_square: (log Z)^2.
        log_z: log Z.
        logit_max: largest |logit| of any target position, no sum.
        target_tokens: positions with a loss.
    """

    cross_entropy: float
    router: float
    z_square: float
    log_z: float
    logit_max: float
    target_tokens: int

    @property
    def loss(self) -> float:
        """Token-mean cross-entropy in nats; 0 for a step without targets."""
        return self.cross_entropy / max(self.target_tokens, 1)


class LocalSums:
    """The same sums of this rank, on the device, without a synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.logit_max = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, output: LossOutput) -> None:
        parts = (output.cross_entropy, output.router, output.z_square, output.log_z)
        self.sums += torch.stack([torch.as_tensor(part).detach().to(self.sums) for part in parts])
        self.logit_max = torch.maximum(self.logit_max, torch.as_tensor(output.logit_max).to(self.logit_max))

    def row(self) -> torch.Tensor:
        """Float64 [5]: what `over_ranks` takes."""
        return torch.cat([self.sums, self.logit_max[None]])

    @staticmethod
    def over_ranks(rows: Sequence[Sequence[float]], target_tokens: int) -> StepSums:
        """Add up in rank order, so that every rank finds the same bits."""
        cross_entropy, router, z_square, log_z = (sum(row[column] for row in rows) for column in range(4))
        logit_max = max(row[4] for row in rows)
        return StepSums(cross_entropy, router, z_square, log_z, logit_max, target_tokens)


@dataclass
class LogWindow:
    """Sums since the last log line. Saved with a checkpoint, so that an interrupted run logs the same numbers."""

    cross_entropy: float = 0.0
    router: float = 0.0
    z_square: float = 0.0
    log_z: float = 0.0
    logit_max: float = 0.0
    target_tokens: int = 0
    steps: int = 0
    clipped_steps: int = 0

    def add(self, sums: StepSums) -> None:
        self.cross_entropy += sums.cross_entropy
        self.router += sums.router
        self.z_square += sums.z_square
        self.log_z += sums.log_z
        self.logit_max = max(self.logit_max, sums.logit_max)
        self.target_tokens += sums.target_tokens
        self.steps += 1

    def metrics(self, z_loss_weight: float) -> dict[str, float]:
        """Token means over the window (no mean of step means), its largest |logit|, and the share of clipped steps."""
        tokens = max(self.target_tokens, 1)
        metrics = {
            "loss": self.cross_entropy / tokens,
            "log_z_mean": self.log_z / tokens,
            "logit_max": self.logit_max,
            "clip_fraction": self.clipped_steps / max(self.steps, 1),
        }
        if z_loss_weight:
            metrics["z_loss"] = z_loss_weight * self.z_square / tokens
        return metrics | ({"router_loss": self.router / tokens} if self.router else {})
