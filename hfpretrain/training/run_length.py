"""How long a run is, in steps and tokens, which rows each step takes, and the learning rate that goes with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from hfpretrain.arguments import DataArguments, PretrainArguments
from hfpretrain.arguments.rules import check_length
from hfpretrain.arguments.types import NoiseScaleRamp, batch_ramp
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.training.adaptive_ramp import AdaptiveRamp
from hfpretrain.training.batch_ramp import BatchRamp, Stage, batch_lr_factor, plan_ramp, ramp_lr_factor
from hfpretrain.training.schedule import check_schedule, resolve_steps

DEFAULT_WARMUP_FRACTION = 0.02
DEFAULT_DECAY_FRACTION = 0.2


@dataclass(frozen=True)
class RunLength:
    """The numbers that follow from the arguments and the number of processes.

    Attributes:
        num_steps: optimizer steps of the whole run.
        batch_tokens: input positions per optimizer step, over all processes; of a ramp, those of its largest batch.
        sequence_length: input positions per row.
        rows_per_step: rows per optimizer step, over all processes; of the largest batch.
        world_size: processes.
        micro_batches_per_step: forward passes of each process per optimizer step; of the largest batch.
        warmup_steps: optimizer steps until the peak learning rate.
        decay_steps: optimizer steps of the final decay; 0 unless the schedule is warmup_stable_decay.
        total_tokens: input positions of the whole run.
        unused_tokens: what total_tokens asked for beyond whole steps; negative when one step is already more.
        ramp: which rows each step takes; one stage where the batch stays.
        growth: the rule by which that batch grows, so that num_steps is the most there can be; None: it is known.
        lr_rule: how the learning rate follows the batch: sqrt, linear or none.
    """

    num_steps: int
    batch_tokens: int
    sequence_length: int
    rows_per_step: int
    world_size: int
    micro_batches_per_step: int
    warmup_steps: int
    decay_steps: int
    total_tokens: int
    unused_tokens: int
    ramp: BatchRamp
    growth: NoiseScaleRamp | None = None
    lr_rule: str = "sqrt"

    def __str__(self) -> str:
        rest = f" ({self.unused_tokens:,} tokens of the request are no whole step)" if self.unused_tokens > 0 else ""
        ends = f"; warm-up {self.warmup_steps:,} steps, final decay {self.decay_steps:,}"
        rows = (
            f"{self.rows_per_step:,} rows of {self.sequence_length:,} a step over {self.world_size} process(es) in "
            f"{self.micro_batches_per_step} micro-batch(es) each"
        )
        if self.growth is not None:
            return (
                f"at most {self.num_steps:,} steps, {self.total_tokens:,} tokens: {self.growth.start_tokens:,} a step, "
                f"and up to {self.batch_tokens:,} where the noise scale stays above {self.growth.factor:g} batches for "
                f"{self.growth.steps:,} steps; then {rows}{ends}, in tokens"
            )
        if len(self.ramp.stages) > 1:
            return f"{self.num_steps:,} steps, {self.total_tokens:,} tokens{rest}{ends}, in tokens:{self._stages()}"
        steps = f"{self.num_steps:,} steps of {self.batch_tokens:,} tokens = {self.total_tokens:,} tokens{rest}"
        return f"{steps}; {rows}{ends}"

    def _stages(self) -> str:
        lines = [f"{'from token':>18} {'batch tokens':>15} {'rows':>8} {'steps':>10} {'learning rate':>14}"]
        ends = [stage.first_step for stage in self.ramp.stages[1:]] + [self.num_steps]
        for stage, end in zip(self.ramp.stages, ends, strict=True):
            factor = batch_lr_factor(stage.rows, self.rows_per_step, self.lr_rule)
            start, batch = stage.first_row * self.sequence_length, stage.rows * self.sequence_length
            lines.append(f"{start:18,} {batch:15,} {stage.rows:8,} {end - stage.first_step:10,} {factor:12.4f} x")
        return "".join("\n" + line for line in lines)

    def as_dict(self) -> dict[str, Any]:
        """For run.json."""
        return asdict(self)


def derive(args: PretrainArguments, data_args: DataArguments, *, world_size: int) -> RunLength:
    """Steps, rows and micro-batches of a run on `world_size` processes.

    num_steps is max_steps, or floor(total_tokens / batch_tokens) and at least 1: never more tokens than asked for,
    except where one step is already more; of a ramp, as many whole steps as the tokens allow. A warm-up that was not
    asked for gives way to a decay that leaves it no room.

    Raises:
        ConfigError: lengths that do not fit together, each with its numbers.
    """
    problems: list[Problem] = []
    growth, ramp = _ramp(args, data_args, world_size=world_size)
    rows = ramp.stages[-1].rows if growth is None else args.batch_tokens // data_args.sequence_length
    for stage in ramp.stages if growth is None else (*ramp.stages, replace(ramp.stages[0], rows=rows)):
        micro_batches = math.ceil(math.ceil(stage.rows / world_size) / args.per_device_train_batch_size)
        problems += _accumulation(args, micro_batches, rows=stage.rows, world_size=world_size)
    problems += _noise_scale(args, ramp.stages[0] if growth else ramp.stages[-1], world_size=world_size)
    warmup_steps, decay_steps = _schedule_lengths(args, ramp, problems)
    refuse(problems)
    return RunLength(
        num_steps=ramp.num_steps,
        batch_tokens=rows * data_args.sequence_length,
        sequence_length=data_args.sequence_length,
        rows_per_step=rows,
        world_size=world_size,
        micro_batches_per_step=micro_batches,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        total_tokens=ramp.total_tokens,
        unused_tokens=0 if args.total_tokens is None else args.total_tokens - ramp.total_tokens,
        ramp=ramp,
        growth=growth,
        lr_rule=_lr_rule(args),
    )


def _ramp(
    args: PretrainArguments, data_args: DataArguments, *, world_size: int
) -> tuple[NoiseScaleRamp | None, BatchRamp]:
    """(the rule of a batch that grows by measurement, the stages that are known); one stage where the batch stays."""
    length, asked = data_args.sequence_length, None if args.batch_ramp is None else batch_ramp(args.batch_ramp)
    values = SimpleNamespace(**{**vars(data_args), **vars(args)})
    refuse([problem for _, problem in check_length(values, sources=args.sources)])
    growth = asked if isinstance(asked, NoiseScaleRamp) else None
    marks = asked if isinstance(asked, tuple) else ((0, args.batch_tokens if growth is None else growth.start_tokens),)
    ramp = plan_ramp(
        marks,
        sequence_length=length,
        world_size=world_size,
        total_tokens=args.total_tokens,
        num_steps=args.max_steps if args.max_steps > 0 else None,
        source=source_of(args, "batch_tokens" if asked is None else "batch_ramp"),
    )
    return growth, ramp


def batch_plan(args: PretrainArguments, run: RunLength) -> BatchRamp | AdaptiveRamp:
    """What says which rows a step takes, for `TrainingSteps` and `schedule`."""
    if run.growth is None:
        return run.ramp
    assert args.total_tokens is not None  # a rule: such a run ends on tokens
    # torch's loaders take `prefetch_factor` steps ahead for each process, 2 unless told otherwise.
    ahead = args.dataloader_num_workers * (args.dataloader_prefetch_factor or 2)
    return AdaptiveRamp(
        run.ramp,
        largest_rows=run.rows_per_step,
        total_rows=args.total_tokens // run.sequence_length,
        factor=run.growth.factor,
        steps=run.growth.steps,
        lead_steps=1 + ahead,
    )


def schedule(
    args: PretrainArguments, run: RunLength, plan: BatchRamp | AdaptiveRamp | None = None
) -> Callable[[int], float]:
    """0-based optimizer step -> multiple of the peak learning rate, see `training.batch_ramp.ramp_lr_factor`.

    Args:
        plan: that of `batch_plan`, where it may grow: the schedule follows it. Warm-up and decay keep the tokens that
            they have in `run`.
    """
    plan, known = plan or run.ramp, run.ramp
    factor = partial(
        ramp_lr_factor,
        schedule=str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        warmup_rows=known.rows_before(run.warmup_steps),
        decay_rows=known.total_rows - known.rows_before(run.num_steps - run.decay_steps),
        decay_shape=args.decay_shape,
        min_lr_ratio=args.min_lr_ratio,
        largest_rows=run.rows_per_step,
        lr_rule=run.lr_rule,
    )
    return lambda step: factor(step, ramp=plan.ramp if isinstance(plan, AdaptiveRamp) else plan)


def _lr_rule(args: PretrainArguments) -> str:
    if args.batch_ramp_lr != "auto":
        return args.batch_ramp_lr
    return "linear" if str(getattr(args.optim, "value", args.optim)) == "sgd" else "sqrt"


def _accumulation(args: PretrainArguments, micro_batches: int, *, rows: int, world_size: int) -> list[Problem]:
    asked = args.accumulation_asked
    if asked is None or asked == micro_batches:
        return []
    what = (
        f"gradient_accumulation_steps disagrees with the batch: ceil(ceil({rows} rows / {world_size} processes) / "
        f"{args.per_device_train_batch_size}) = {micro_batches}"
    )
    remedy = "leave it out; batch_tokens and per_device_train_batch_size decide it"
    return [Problem(what, str(asked), source_of(args, "gradient_accumulation_steps"), remedy)]


def _noise_scale(args: PretrainArguments, stage: Stage, *, world_size: int) -> list[Problem]:
    """It must be defined in some stage of a given ramp, and in the first of one that follows it."""
    if not args.log_noise_scale or world_size > 1 or stage.rows > args.per_device_train_batch_size:
        return []
    what = "the noise scale compares micro-batches of one step, and a step is one micro-batch here"
    remedy = f"per_device_train_batch_size of at most {max(stage.rows // 2, 1)}"
    remedy = remedy if stage.rows > 1 else "batch_tokens of at least two rows"
    given = f"{stage.rows} row(s) at once, 1 process, log_noise_scale: {args.log_noise_scale}"
    return [Problem(what, given, source_of(args, "log_noise_scale"), remedy)]


def _schedule_lengths(args: PretrainArguments, ramp: BatchRamp, problems: list[Problem]) -> tuple[int, int]:
    """(warmup_steps, decay_steps) with the defaults filled in; adds what does not fit to `problems`."""
    num_steps = ramp.num_steps
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    in_steps = args.warmup_steps > 0 or source_of(args, "warmup_steps") not in ("default", "arguments")
    asked = in_steps or args.warmup_fraction is not None
    decays = schedule == "warmup_stable_decay"
    default_decay = decays and args.decay_steps is None and args.decay_fraction is None
    warmup_fraction = args.warmup_fraction if asked else DEFAULT_WARMUP_FRACTION
    decay_fraction = DEFAULT_DECAY_FRACTION if default_decay else args.decay_fraction
    try:
        warmup_steps, decay_steps = resolve_steps(
            num_steps=num_steps,
            warmup_steps=int(args.warmup_steps) if in_steps else None,
            warmup_fraction=warmup_fraction,
            decay_steps=args.decay_steps,
            decay_fraction=decay_fraction,
            first_steps=ramp.first_steps,
            last_steps=ramp.last_steps,
        )
    except ConfigError as error:
        problems += error.problems
        return 0, 0
    if not asked and decays:
        warmup_steps = max(min(warmup_steps, num_steps - decay_steps), 0)
    problems += check_schedule(
        schedule=schedule,
        num_steps=num_steps,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        decay_shape=args.decay_shape,
        min_lr_ratio=args.min_lr_ratio,
    )
    return warmup_steps, decay_steps


def source_of(args: PretrainArguments, name: str) -> str:
    """Where a field's value came from, for messages."""
    return args.sources.get(name, "arguments")
