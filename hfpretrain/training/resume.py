"""What stands beside a checkpoint to continue exactly, and what a new launch may change about a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hfpretrain.errors import refuse
from hfpretrain.training.adaptive_ramp import AdaptiveRamp
from hfpretrain.training.batch_ramp import BatchRamp, changed_past, stages_from
from hfpretrain.training.counters import LogWindow

PRETRAIN_STATE = "pretrain_state.json"


@dataclass(frozen=True)
class PretrainState:
    """`pretrain_state.json` in a checkpoint.

    Attributes:
        num_steps: planned length of the run, in optimizer steps.
        target_tokens_seen: over all ranks since step 0.
        data_position: where the next step stands in the data, for people; the step number alone decides.
        fingerprint: settings that fix which data a step number means.
        world_size: ranks that saved it.
        batch: rows per step so far and as planned, see `adaptive_ramp.saved_batch`.
        window: sums since the last log line.
        noise_scale, spikes: averages and history, None where they are off.
    """

    num_steps: int
    target_tokens_seen: int
    data_position: dict[str, Any]
    fingerprint: dict[str, Any]
    world_size: int
    batch: dict[str, Any]
    window: LogWindow = field(default_factory=LogWindow)
    noise_scale: dict[str, Any] | None = None
    spikes: dict[str, Any] | None = None

    def write(self, folder: Path) -> None:
        (folder / PRETRAIN_STATE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_state(checkpoint: Path, *, fingerprint: Mapping[str, Any], plan: BatchRamp | AdaptiveRamp) -> PretrainState:
    """The state of a checkpoint, if its step number means the same data as in this run.

    Args:
        plan: the batches asked for now. What the checkpoint's steps took must be the same, what follows may differ; an
            adaptive one goes on with the stages that it had decided.

    Raises:
        ValueError: the folder has no such state, another fingerprint (each setting that differs is named), or a past
            with other batches.
        ConfigError: an adaptive ramp cannot go on from its stages.
    """
    path = checkpoint / PRETRAIN_STATE
    way_out = "start a new run from its weights with --model_name_or_path and a new --output_dir"
    if not path.is_file():
        raise ValueError(
            f"{checkpoint} holds no {PRETRAIN_STATE}: it was not saved by this trainer, so its place in the data is "
            f"unknown. To use it, {way_out}."
        )
    state = json.loads(path.read_text())
    then = state["fingerprint"]
    differing = [f"{key}: {then.get(key)} then, {now} now" for key, now in fingerprint.items() if then.get(key) != now]
    if differing:
        raise ValueError(
            f"{checkpoint} belongs to a run with other data or batches or another muP ({'; '.join(differing)}): its "
            "step number would point to other rows, or its weights learn at other rates. Go back to the former "
            f"settings, or {way_out}."
        )
    _follow_batch(checkpoint, plan, state["batch"], step=state["data_position"]["step"], way_out=way_out)
    return PretrainState(**{**state, "window": LogWindow(**state["window"])})


def _follow_batch(
    checkpoint: Path, plan: BatchRamp | AdaptiveRamp, saved: Mapping[str, Any], *, step: int, way_out: str
) -> None:
    then = stages_from(saved["stages"])
    if isinstance(plan, AdaptiveRamp):
        # Of stages that were written down by hand only the past binds; those that were measured are decided.
        decided = then if saved["adaptive"] else [stage for stage in then if stage.first_step < max(step, 1)]
        refuse(plan.resume(decided, above_since=(saved["adaptive"] or {}).get("above_since")))
        return
    reason = changed_past(then, plan.stages, step=step)
    if reason:
        raise ValueError(
            f"{checkpoint} was trained with other batches: {reason}, so its step number would point to other rows. "
            f"Only what comes after step {step} may change: keep batch_ramp and batch_tokens as they were up to there, "
            f"or {way_out}."
        )


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Everything in the groups of a freshly built optimizer but their parameters: learning rate, decay, betas, ..."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def apply_asked(
    optimizer: Optimizer,
    scheduler: LambdaLR,
    *,
    asked: Sequence[Mapping[str, Any]],
    lr_factor: Callable[[int], float],
    step: int,
    say: Callable[[str], None],
) -> None:
    """Make what is asked on this launch hold over what the checkpoint's optimizer brought back, saying each change.

    A loaded optimizer carries its old learning rate, weight decay, betas and eps in its groups, and the scheduler its
    old base rates; without this, changing a flag between two launches would do nothing, in silence.

    Args:
        asked: `hyperparameters` of the optimizer as it was built, before it was loaded.
        step: optimizer steps done.
    """
    for group, wanted in zip(optimizer.param_groups, asked, strict=True):
        for key, value in {**wanted, "initial_lr": wanted["lr"]}.items():
            before = group.get(key)
            before = tuple(before) if isinstance(before, list) else before
            if key != "lr" and before != value:
                say(f"resume: {key} of group {wanted.get('name', '?')} changes from {before} to {value}, as asked")
                group[key] = value
        group["lr"] = group["initial_lr"] * lr_factor(step)
    scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
