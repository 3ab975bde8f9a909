"""A batch that grows: which rows each step takes, and the learning rate that goes with them. Pure arithmetic.

A ramp is a list of stages, each with its first step and its rows per step. A stage begins at the first step boundary at
or after its token mark, so a step always has one batch, and the steps take the rows of the stream one after another
without a gap whatever the batch: another ramp is another cut of the same stream.

Why a batch should grow: the noise of a gradient relative to its size, and with it the batch that still pays, rises as
the loss falls (McCandlish et al. 2018, arXiv:1812.06162). A ramp that follows the measured noise scale is in
`training.adaptive_ramp`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hfpretrain.errors import Problem, refuse
from hfpretrain.training.schedule import lr_factor_at

LR_EXPONENTS = {"sqrt": 0.5, "linear": 1.0, "none": 0.0}


@dataclass(frozen=True)
class Stage:
    """Steps of one batch.

    Attributes:
        first_step: 0-based optimizer step.
        first_row: position of its first row in the stream of blocks.
        rows: rows per step, over all processes.
    """

    first_step: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class BatchRamp:
    """Stages and the length of a run. `rows_of` is what `TrainingSteps` asks; every look-up is O(log(stages)).

    Attributes:
        stages: in order; the first begins at step 0 and row 0.
        sequence_length: tokens per row.
        num_steps: optimizer steps of the run.
    """

    stages: tuple[Stage, ...]
    sequence_length: int
    num_steps: int

    def stage_of(self, step: int) -> Stage:
        """The stage of a step >= 0; steps past the end belong to the last."""
        if step < 0:
            raise ValueError(f"step is 0-based and cannot be negative; got {step}")
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1]

    def rows_of(self, step: int) -> tuple[int, int]:
        """(position of its first row, rows) of a step."""
        stage = self.stage_of(step)
        return stage.first_row + (step - stage.first_step) * stage.rows, stage.rows

    def step_of(self, row: int) -> int:
        """The step that takes the row at this position of the stream: `rows_of` backwards."""
        if row < 0:
            raise ValueError(f"rows begin at 0; got {row}")
        stage = self.stages[bisect_right(self.stages, row, key=lambda stage: stage.first_row) - 1]
        return stage.first_step + (row - stage.first_row) // stage.rows

    def batch_tokens(self, step: int) -> int:
        """Input tokens of a step, over all processes."""
        return self.stage_of(step).rows * self.sequence_length

    def rows_before(self, step: int) -> int:
        """Rows that are done when a step begins."""
        return self.rows_of(step)[0]

    @property
    def total_rows(self) -> int:
        """Rows of the whole run."""
        return self.rows_before(self.num_steps)

    @property
    def total_tokens(self) -> int:
        """Input tokens of the whole run."""
        return self.total_rows * self.sequence_length

    def first_steps(self, share: float) -> float:
        """How many steps, and what fraction of one, hold the first `share` of the run's tokens."""
        if len(self.stages) == 1:
            return share * self.num_steps
        row = share * self.total_rows
        stage = self.stages[bisect_right(self.stages, row, key=lambda stage: stage.first_row) - 1]
        return stage.first_step + (row - stage.first_row) / stage.rows

    def last_steps(self, share: float) -> float:
        """How many steps hold the last `share` of the run's tokens."""
        return share * self.num_steps if len(self.stages) == 1 else self.num_steps - self.first_steps(1.0 - share)

    def with_stage(self, first_step: int, rows: int, *, total_rows: int) -> BatchRamp:
        """The same ramp with another batch from `first_step` on, as long as `total_rows` rows allow."""
        stages = (*self.stages, Stage(first_step, self.rows_before(first_step), rows))
        return replace(self, stages=stages, num_steps=steps_within(stages, total_rows))

    def __str__(self) -> str:
        """The ramp as a value of `--batch_ramp`."""
        length = self.sequence_length
        return ",".join(f"{stage.first_row * length:_}:{stage.rows * length:_}" for stage in self.stages)


def stages_of(marks: Sequence[tuple[int, int]], *, sequence_length: int) -> tuple[Stage, ...]:
    """(tokens seen, batch tokens) -> stages, each from the first step boundary at or after its mark on."""
    stages: list[Stage] = []
    for tokens, batch_tokens in marks:
        last = stages[-1] if stages else Stage(0, 0, 1)
        ahead = tokens - last.first_row * sequence_length
        steps = max(-(-ahead // (last.rows * sequence_length)), 0)
        first = last.first_step + steps, last.first_row + steps * last.rows
        stages.append(Stage(*first, batch_tokens // sequence_length))
    return tuple(stages)


def stages_from(steps_and_rows: Sequence[Sequence[int]]) -> tuple[Stage, ...]:
    """(first step, rows per step) of every stage, as a checkpoint keeps them -> stages."""
    stages = [Stage(0, 0, steps_and_rows[0][1])]
    for first_step, rows in steps_and_rows[1:]:
        last = stages[-1]
        stages.append(Stage(first_step, last.first_row + (first_step - last.first_step) * last.rows, rows))
    return tuple(stages)


def steps_within(stages: Sequence[Stage], total_rows: int) -> int:
    """The most steps whose rows are no more than `total_rows`, and at least 1."""
    stage = stages[bisect_right(stages, total_rows, key=lambda stage: stage.first_row) - 1]
    return max(stage.first_step + (total_rows - stage.first_row) // stage.rows, 1)


def plan_ramp(
    marks: Sequence[tuple[int, int]],
    *,
    sequence_length: int,
    world_size: int = 1,
    total_tokens: int | None = None,
    num_steps: int | None = None,
    source: str = "batch_ramp",
) -> BatchRamp:
    """The ramp of these (tokens seen, batch tokens), `num_steps` steps or whole steps of `total_tokens` long.

    A batch never shrinks and never stays the same from one stage to the next: `learning_rate` is that of the last
    batch, which is to be the largest.

    Raises:
        ConfigError: everything that is wrong with the stages.
    """
    problems = _mark_problems(marks, sequence_length=sequence_length, world_size=world_size, source=source)
    refuse(problems)
    stages = stages_of(marks, sequence_length=sequence_length)
    derived = None if total_tokens is None else steps_within(stages, total_tokens // sequence_length)
    if num_steps is not None and derived not in (None, num_steps):
        what = f"total_tokens and max_steps disagree: {total_tokens:_} tokens are {derived:_} steps of this ramp"
        problems.append(Problem(what, f"max_steps={num_steps}", source, "give one of the two"))
    length = num_steps if num_steps is not None else derived
    if length is None:
        raise ValueError("the run has no length: give total_tokens or num_steps")
    ramp = BatchRamp(stages, sequence_length, length)
    for index, (stage, (tokens, batch)) in enumerate(zip(stages, marks, strict=True)):
        last_step = stages[index + 1].first_step if index + 1 < len(stages) else length
        if stage.first_step >= min(last_step, length):
            ended = stage.first_step >= length
            why = f"the run ends after {ramp.total_tokens:_} tokens" if ended else "the next begins at the same step"
            what = f"stage {index + 1} of the ramp never has a step: {why}"
            problems.append(Problem(what, f"{tokens:_}:{batch:_}", source, "remove it, or move its mark"))
    refuse(problems)
    return ramp


def _mark_problems(
    marks: Sequence[tuple[int, int]], *, sequence_length: int, world_size: int, source: str
) -> list[Problem]:
    problems = []

    def add(what: str, tokens: int, batch: int, remedy: str) -> None:
        problems.append(Problem(what, f"{tokens:_}:{batch:_}", source, remedy))

    if marks[0][0] != 0:
        add("the first stage of the ramp does not begin at token 0", *marks[0], f"0:{marks[0][1]:_} as the first stage")
    for number, (tokens, batch) in enumerate(marks, start=1):
        before = marks[number - 2] if number > 1 else None
        if before is not None and tokens <= before[0]:
            what = f"stage {number} of the ramp does not begin after the one before it, at {before[0]:_} tokens"
            add(what, tokens, batch, "token marks that increase")
        if before is not None and batch <= before[1]:
            what = (
                f"the batch of stage {number} is no larger than the one before it, {before[1]:_}; learning_rate is "
                "that of the last batch, which must be the largest"
            )
            add(what, tokens, batch, "batches that grow from stage to stage")
        rows, rest = divmod(batch, sequence_length)
        if rest or rows < 1:
            near = " or ".join(f"{n * sequence_length:_}" for n in (rows, rows + 1) if n > 0)
            what = f"the batch of stage {number} is no whole number of rows of {sequence_length:_} tokens"
            add(what, tokens, batch, f"{near} in its place")
        elif rows < world_size:
            what = "a step has fewer rows than there are processes, so some would have nothing to do"
            given = f"{batch:_} / {sequence_length:_} = {rows} rows, {world_size} processes"
            remedy = f"a batch of at least {world_size * sequence_length:_}, or fewer processes"
            problems.append(Problem(what, given if len(marks) == 1 else f"stage {number}: {given}", source, remedy))
    return problems


def batch_lr_factor(rows: int, largest_rows: int, rule: str) -> float:
    """What a batch makes of the learning rate of the largest one: (rows / largest) ** (1/2, 1 or 0); exactly 1 for it.

    Args:
        rule: "sqrt" (Adam: Malladi et al. 2022, arXiv:2205.10287), "linear" (SGD) or "none".
    """
    return float((rows / largest_rows) ** LR_EXPONENTS[rule])


def ramp_lr_factor(
    step: int,
    *,
    ramp: BatchRamp,
    schedule: str,
    warmup_rows: int,
    decay_rows: int,
    decay_shape: str,
    min_lr_ratio: float,
    largest_rows: int,
    lr_rule: str,
) -> float:
    """Factor on `learning_rate` at a step: the schedule over tokens, times `batch_lr_factor`.

    The last step has the largest batch, so it has exactly the schedule's minimum; min_lr_ratio is a share of the peak
    at full batch. With one stage this is `lr_factor`, to the last bit.
    """
    over_tokens = lr_factor_at(
        ramp.rows_before(step + 1),
        schedule=schedule,
        first=ramp.rows_before(1),
        total=ramp.total_rows,
        warmup=warmup_rows,
        decay=decay_rows,
        decay_shape=decay_shape,
        min_lr_ratio=min_lr_ratio,
    )
    return over_tokens * batch_lr_factor(ramp.stage_of(step).rows, largest_rows, lr_rule)


def changed_past(then: Sequence[Stage], now: Sequence[Stage], *, step: int) -> str | None:
    """Why a run that made `step` steps with the stages `then` cannot go on with `now`; None if it can.

    Only what is done counts: stages that begin at `step` or later may come, go and change.
    """
    done = [[stage for stage in stages if stage.first_step < step] for stages in (then, now)]
    if done[0] == done[1]:
        return None
    starts = sorted({stage.first_step for stages in done for stage in stages})
    rows = [[[s.rows for s in stages if s.first_step <= start][-1] for start in starts] for stages in done]
    first = next(index for index, (before, after) in enumerate(zip(*rows, strict=True)) if before != after)
    return f"step {starts[first]} took {rows[0][first]} rows then and would take {rows[1][first]} now"
