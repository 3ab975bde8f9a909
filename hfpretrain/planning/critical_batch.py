"""What logged noise scales say about the batch: a law over sizes, a ramp to propose, and how a probe is judged.

A noise scale is measured along the path that a run took, at its batch and learning rate, and how far it predicts the
critical batch is disputed (McCandlish et al. 2018, arXiv:1812.06162, against Merrill et al. 2025, arXiv:2505.23971). So
all of this is a proposal; `largest_harmless` judges a measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reading:
    """One log line of a run.

    Attributes:
        tokens: input positions so far.
        loss: nats per target token, mean over the logging window.
        batch_tokens: input positions of its last step.
        noise_scale_tokens, stderr_tokens: in input positions, as a batch is counted; None where it is undefined.
    """

    tokens: int
    loss: float
    batch_tokens: int
    noise_scale_tokens: float | None
    stderr_tokens: float | None

    @property
    def least(self) -> float | None:
        """The noise scale less its standard error."""
        if self.noise_scale_tokens is None or self.stderr_tokens is None:
            return None
        return self.noise_scale_tokens - self.stderr_tokens


def readings(log_history: Sequence[Mapping[str, Any]]) -> list[Reading]:
    """The training lines of a `trainer_state.json`; noise scales are turned from target tokens into input positions."""
    found = []
    for line in log_history:
        if "loss" not in line or "batch_tokens" not in line:
            continue
        positions = line["input_tokens"] / max(line["target_tokens"], 1)
        names = ("noise_scale_tokens", "noise_scale_stderr_tokens")
        scale, error = (None if line.get(name) is None else line[name] * positions for name in names)
        found.append(Reading(line["input_tokens"], line["loss"], line["batch_tokens"], scale, error))
    return found


def settled_noise_scale(lines: Sequence[Reading]) -> tuple[float, float] | None:
    """(noise scale, its standard error), medians over the last quarter of the readings that have one; None without."""
    defined = [line for line in lines if line.least is not None]
    last = defined[len(defined) - max(len(defined) // 4, 1) :] if defined else []
    if not last:
        return None
    scales, errors = ([getattr(line, name) for line in last] for name in ("noise_scale_tokens", "stderr_tokens"))
    return statistics.median(scales), statistics.median(errors)


def proposed_ramp(
    lines: Sequence[Reading], *, sequence_length: int, smallest_rows: int = 1, hold: int = 3
) -> list[tuple[int, int]]:
    """(tokens seen, batch tokens): a batch that doubles where the noise scale, less its standard error, has passed it.

    The first batch is the largest `smallest_rows * 2^n` rows that the first `hold` readings are above; it becomes 2^m
    times as large at the first reading that, with the `hold - 1` after it, is above the larger one. It never shrinks.

    Args:
        smallest_rows: at least the number of processes.

    Returns: stages for `--batch_ramp`; empty where fewer than `hold` readings are defined.
    """
    defined = [(line.tokens, line.least) for line in lines if line.least is not None]
    batch = smallest_rows * sequence_length
    stages: list[tuple[int, int]] = []
    for index in range(len(defined) - hold + 1):
        reached = min(least for _, least in defined[index : index + hold])
        before = batch
        while 2 * batch <= reached:
            batch *= 2
        if not stages:
            stages.append((0, batch))
        elif batch > before:
            stages.append((defined[index][0], batch))
    return stages


def largest_harmless(losses: Mapping[int, float], *, tolerance_nats: float = 0.01) -> int:
    """k*: the largest factor whose loss is at most `tolerance_nats` above that of every smaller one (Merrill 2025).

    Args:
        losses: batch factor -> loss after the same number of tokens, at a learning rate scaled with the batch.
    """
    if not losses:
        raise ValueError("no loss to judge")
    return max(k for k in losses if all(losses[k] <= losses[j] + tolerance_nats for j in losses if j < k))


def loss_after(lines: Sequence[Reading], tokens: int) -> float:
    """Mean loss of what was trained on after this many tokens, lines weighted by their tokens.

    Raises:
        ValueError: no line lies after it.
    """
    ends = [0, *(line.tokens for line in lines)]
    weighted = [
        (end - start, line.loss) for start, end, line in zip(ends, ends[1:], lines, strict=False) if start >= tokens
    ]
    if not weighted:
        raise ValueError(f"no log line lies wholly after {tokens:,} tokens: log more often")
    return sum(weight * loss for weight, loss in weighted) / sum(weight for weight, _ in weighted)
