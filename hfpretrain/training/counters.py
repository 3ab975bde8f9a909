"""What a step adds up over all ranks, and what the log line makes of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepSums:
    """Sums over all ranks and micro-batches of one optimizer step.

    Attributes:
        cross_entropy: nats.
        router: coefficient * balancing loss of each micro-batch, weighted by its target tokens; 0 without a router.
        target_tokens: positions with a loss.
    """

    cross_entropy: float
    router: float
    target_tokens: int

    @property
    def loss(self) -> float:
        """Token-mean cross-entropy in nats; 0 for a step without targets."""
        return self.cross_entropy / max(self.target_tokens, 1)


@dataclass
class LogWindow:
    """Sums since the last log line. Saved with a checkpoint, so that an interrupted run logs the same numbers."""

    cross_entropy: float = 0.0
    router: float = 0.0
    target_tokens: int = 0
    steps: int = 0
    clipped_steps: int = 0

    def add(self, sums: StepSums) -> None:
        self.cross_entropy += sums.cross_entropy
        self.router += sums.router
        self.target_tokens += sums.target_tokens
        self.steps += 1

    def metrics(self) -> dict[str, float]:
        """`loss` weighted by tokens over the window (not a mean of step means), and the share of clipped steps."""
        tokens = max(self.target_tokens, 1)
        metrics = {"loss": self.cross_entropy / tokens, "clip_fraction": self.clipped_steps / max(self.steps, 1)}
        return metrics | ({"router_loss": self.router / tokens} if self.router else {})
