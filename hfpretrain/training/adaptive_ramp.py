"""A batch that grows where the measured noise scale says so: a diagnostic made into a rule, so it has to be asked for.

McCandlish et al. 2018 (arXiv:1812.06162) take the noise scale for the critical batch; Merrill et al. 2025
(arXiv:2505.23971) find it orders of magnitude too low on OLMo. `recipes/critical_batch.py --probe` measures instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hfpretrain.errors import Problem
from hfpretrain.training.batch_ramp import BatchRamp, Stage, steps_within


@dataclass
class AdaptiveRamp:
    """The stages decided so far, and what decides the next one.

    The decision is a pure function of the numbers that the run logs (`observe`). It takes effect `lead_steps` steps
    after the one that is next, because that one's learning rate is set already and a loader's processes have taken
    the rows of some more.

    Attributes:
        ramp: the stages decided so far; its num_steps is what the tokens allow if no more come.
        largest_rows: rows of the largest batch allowed.
        total_rows: rows of the whole run, the last step's rest included.
        factor, steps: the batch grows when the noise scale, less its standard error, has stayed above factor * batch
            for this many steps.
        lead_steps: at least 1.
        above_since: optimizer steps made when it was first seen above, without a break since; None: it is not.
    """

    ramp: BatchRamp
    largest_rows: int
    total_rows: int
    factor: float
    steps: int
    lead_steps: int = 1
    above_since: int | None = field(default=None, init=False)

    def rows_of(self, step: int) -> tuple[int, int]:
        """(position of its first row, rows) of a step, as far as it is decided."""
        return self.ramp.rows_of(step)

    def observe(self, steps_done: int, noise_scale_tokens: float | None, stderr_tokens: float | None) -> str | None:
        """Take one log line into account; if the batch grows, return the reason.

        The batch doubles, or becomes the largest if that is less. It does not grow where fewer tokens than one such
        step would be left.

        Args:
            steps_done: optimizer steps made when the line is written.
            noise_scale_tokens, stderr_tokens: the averaged noise scale and its standard error, in tokens. None or
                NaN: it is undefined there, which ends a stay above the threshold.
        """
        stage = self.ramp.stages[-1]
        if noise_scale_tokens is None or stderr_tokens is None or steps_done <= stage.first_step:
            self.above_since = None
            return None
        least, threshold = noise_scale_tokens - stderr_tokens, self.factor * stage.rows * self.ramp.sequence_length
        if not least > threshold:
            self.above_since = None
            return None
        self.above_since = steps_done if self.above_since is None else self.above_since
        rows, first_step = min(2 * stage.rows, self.largest_rows), steps_done + self.lead_steps
        if steps_done - self.above_since < self.steps or rows <= stage.rows:
            return None
        grown = self.ramp.with_stage(first_step, rows, total_rows=self.total_rows)
        if grown.num_steps <= first_step:
            return None
        since, self.above_since, self.ramp = self.above_since, None, grown
        length = self.ramp.sequence_length
        return (
            f"the batch grows from {stage.rows * length:,} to {rows * length:,} tokens at step {first_step}: the noise "
            f"scale less its standard error, {least:,.0f} tokens now, has been above {self.factor:g} batches "
            f"({threshold:,.0f} tokens) since step {since}; {grown.num_steps:,} steps in all"
        )

    def resume(self, saved: Sequence[Stage], *, above_since: int | None) -> list[Problem]:
        """Go on with the stages of a checkpoint; the problems where what is asked for now forbids it."""
        problems = []
        length, now = self.ramp.sequence_length, self.ramp.stages[0].rows
        if saved[0].rows != now:
            what = f"the run began with a batch of {saved[0].rows * length:_} tokens"
            remedy = f"noise_scale:{saved[0].rows * length:_}, or another output_dir"
            problems.append(Problem(what, f"noise_scale:{now * length:_}", "batch_ramp", remedy))
        if saved[-1].rows > self.largest_rows:
            what = f"the batch has already grown to {saved[-1].rows * length:_} tokens"
            problems.append(Problem(what, f"{self.largest_rows * length:_}", "batch_tokens", "at least that"))
        stages = tuple(saved)
        self.ramp = replace(self.ramp, stages=stages, num_steps=steps_within(stages, self.total_rows))
        self.above_since = above_since
        return problems


def saved_batch(plan: BatchRamp | AdaptiveRamp) -> dict[str, Any]:
    """What a checkpoint keeps of the batch: its stages, and what an adaptive ramp has seen."""
    ramp = plan.ramp if isinstance(plan, AdaptiveRamp) else plan
    return {
        "stages": [[stage.first_step, stage.rows] for stage in ramp.stages],
        "adaptive": {"above_since": plan.above_since} if isinstance(plan, AdaptiveRamp) else None,
    }
