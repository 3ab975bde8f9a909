"""Learning-rate schedules as plain functions of the step: no state, so nothing can go stale in a checkpoint.

Steps are 0-based optimizer steps of a run of `num_steps`. All schedules share two rules that a table of numbers shows
at once: the first step already learns (warm-up is (step + 1) / warmup_steps, never 0), and the last step,
`num_steps - 1`, has exactly the minimum (except `constant`, which has none).

Where the batch grows, the same curves are drawn over tokens (`lr_factor_at`); with one batch throughout both are equal
to the last bit, because the quotients are of whole numbers and n r / (m r) is rounded as n / m is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hfpretrain.errors import Problem, refuse

SCHEDULES = ("warmup_stable_decay", "cosine", "linear", "constant")
DECAY_SHAPES = ("1-sqrt", "linear", "cosine")


def lr_factor(
    step: int,
    *,
    schedule: str,
    num_steps: int,
    warmup_steps: int,
    decay_steps: int = 0,
    decay_shape: str = "1-sqrt",
    min_lr_ratio: float = 0.0,
) -> float:
    """Factor in [0, 1] on the peak learning rate at a 0-based `step`.

    Warm-up, all schedules: (step + 1) / warmup_steps, so 1 is reached at step warmup_steps - 1. Then

    - `warmup_stable_decay` (WSD; Hu et al. 2024, arXiv:2404.06395): 1 until the last `decay_steps` steps, then down by
      `decay_shape`; "1-sqrt" is Hägele et al. 2024, arXiv:2405.18392.
    - `cosine` (Loshchilov & Hutter 2017, without restarts) and `linear`: from the peak straight down to the minimum.
    - `constant`: 1 to the end.

    Steps at or past `num_steps` keep the last step's value. Raises `ConfigError` naming all lengths if they do not fit.
    """
    refuse(
        check_schedule(
            schedule=schedule,
            num_steps=num_steps,
            warmup_steps=warmup_steps,
            decay_steps=decay_steps,
            decay_shape=decay_shape,
            min_lr_ratio=min_lr_ratio,
        )
    )
    if step < 0:
        raise ValueError(f"step is 0-based and cannot be negative; got {step}")
    return lr_factor_at(
        step + 1,
        schedule=schedule,
        first=1,
        total=num_steps,
        warmup=warmup_steps,
        decay=decay_steps,
        decay_shape=decay_shape,
        min_lr_ratio=min_lr_ratio,
    )


def lr_factor_at(
    done: int,
    *,
    schedule: str,
    first: int,
    total: int,
    warmup: int,
    decay: int = 0,
    decay_shape: str = "1-sqrt",
    min_lr_ratio: float = 0.0,
) -> float:
    """The same curves over any count that grows with every step, such as tokens; all counts in one unit.

    Args:
        done: the count at the end of the step that is asked about, above 0.
        first: the count at the end of the first step, where a curve without warm-up begins.
        total: at the end of the last step.
        warmup, decay: lengths of the two parts. Whether they fit is `check_schedule`'s matter.
    """
    done = min(done, total)
    if done <= warmup:
        return done / warmup
    if schedule == "constant":
        return 1.0
    if schedule == "warmup_stable_decay":
        peak, shape = total - decay, decay_shape  # the end of the last step at the full rate
    else:
        peak, shape = max(warmup, first), schedule
    if done <= peak:
        return 1.0
    if done == total:
        return min_lr_ratio  # exactly, not up to the rounding of cos(pi)
    return min_lr_ratio + (1.0 - min_lr_ratio) * _remaining((done - peak) / (total - peak), shape)


def resolve_steps(
    *,
    num_steps: int,
    warmup_steps: int | None = None,
    warmup_fraction: float | None = None,
    decay_steps: int | None = None,
    decay_fraction: float | None = None,
    first_steps: Callable[[float], float] | None = None,
    last_steps: Callable[[float], float] | None = None,
) -> tuple[int, int]:
    """(warmup_steps, decay_steps) from lengths in steps or as fractions of the run; neither given means 0.

    A fraction is rounded to the nearest step (halves up) and is at least one step if above 0.

    Args:
        first_steps, last_steps: how many steps hold the first or last share of the run, as a fraction of steps;
            None: share * num_steps, which is right where all steps have the same batch.

    Raises:
        ConfigError: both forms of one length are given, or a value is out of range.
    """
    problems: list[Problem] = []
    warmup = _resolve("warmup", warmup_steps, warmup_fraction, first_steps, num_steps=num_steps, problems=problems)
    decay = _resolve("decay", decay_steps, decay_fraction, last_steps, num_steps=num_steps, problems=problems)
    refuse(problems)
    return warmup, decay


def check_schedule(
    *,
    schedule: str,
    num_steps: int,
    warmup_steps: int,
    decay_steps: int = 0,
    decay_shape: str = "1-sqrt",
    min_lr_ratio: float = 0.0,
) -> list[Problem]:
    """Everything that is wrong with a schedule, empty if it can be run. Same arguments as `lr_factor`."""
    lengths = f"num_steps={num_steps}, warmup_steps={warmup_steps}, decay_steps={decay_steps}"
    problems = []

    def add(what: str, given: str, remedy: str) -> None:
        problems.append(Problem(what=what, given=given, source="schedule", remedy=remedy))

    if schedule not in SCHEDULES:
        add("unknown learning-rate schedule", schedule, f"one of {', '.join(SCHEDULES)}")
        return problems
    if decay_shape not in DECAY_SHAPES:
        add("unknown shape of the decay", decay_shape, f"one of {', '.join(DECAY_SHAPES)}")
    if not 0.0 <= min_lr_ratio <= 1.0:
        add("min_lr_ratio is a fraction of the peak learning rate", str(min_lr_ratio), "a number from 0 to 1")
    if num_steps < 1 or warmup_steps < 0 or decay_steps < 0:
        add("a length is not possible", lengths, "num_steps >= 1, the others >= 0")
    elif schedule == "warmup_stable_decay":
        if decay_steps < 1:
            add("warmup_stable_decay has no decay", lengths, "decay_steps >= 1, or the schedule `constant`")
        elif warmup_steps + decay_steps > num_steps:
            add("warm-up and decay overlap", lengths, f"warmup_steps + decay_steps <= {num_steps}")
    elif decay_steps:
        add(f"`{schedule}` takes no decay length", lengths, "leave it out, or use warmup_stable_decay")
    elif schedule == "constant" and warmup_steps > num_steps:
        add("the warm-up is longer than the run", lengths, f"warmup_steps <= {num_steps}")
    elif schedule != "constant" and max(warmup_steps, 1) >= num_steps:
        remedy = f"warmup_steps < {num_steps}" if num_steps > 1 else "at least 2 steps, or the schedule `constant`"
        add(f"no step is left for the {schedule} decay after the peak", lengths, remedy)
    return problems


def _remaining(progress: float, shape: str) -> float:
    """1 at progress 0, 0 at progress 1."""
    if shape == "linear":
        return 1.0 - progress
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - math.sqrt(progress)


def _resolve(
    name: str,
    steps: int | None,
    fraction: float | None,
    steps_of: Callable[[float], float] | None,
    *,
    num_steps: int,
    problems: list[Problem],
) -> int:
    if steps is not None and fraction is not None:
        given = f"{name}_steps={steps}, {name}_fraction={fraction}"
        problems.append(Problem(f"{name} is given twice", given, "schedule", "give steps or a fraction, not both"))
    elif steps is not None:
        if steps >= 0:
            return steps
        problems.append(Problem(f"{name}_steps is negative", str(steps), "schedule", "0 or more"))
    elif fraction is not None:
        if 0.0 <= fraction <= 1.0:
            share_steps = fraction * num_steps if steps_of is None else steps_of(fraction)
            return max(math.floor(share_steps + 0.5), 1) if fraction > 0 else 0
        remedy = f"a number from 0 to 1 (of {num_steps} steps)"
        problems.append(Problem(f"{name}_fraction is a share of the run", str(fraction), "schedule", remedy))
    return 0
