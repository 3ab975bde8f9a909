"""What stands beside a checkpoint to continue exactly, and what a new launch may change about a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hfpretrain.errors import Problem, refuse
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


_WAY_OUT = "start a new run from its weights with --model_name_or_path and a new --output_dir"


def check_state(
    checkpoint: Path, *, fingerprint: Mapping[str, Any], plan: BatchRamp | AdaptiveRamp | None = None
) -> list[Problem]:
    """Why the step number of a checkpoint does not mean the same data as in this run; nothing if it does.

    Args:
        fingerprint: of this run; each setting that differs is a problem of its own.
        plan: the batches asked for now, if they are known. What the checkpoint's steps took must be the same, what
            follows may differ; an adaptive plan is judged when it goes on.
    """
    path = checkpoint / PRETRAIN_STATE
    if not path.is_file():
        what = (
            f"the checkpoint holds no {PRETRAIN_STATE}: this trainer did not save it, its place in the data is unknown"
        )
        return [Problem(what, str(checkpoint), "resume_from_checkpoint", f"another checkpoint, or {_WAY_OUT}")]
    state, problems = json.loads(path.read_text()), []
    then = state["fingerprint"]
    for key, now in fingerprint.items():
        if then.get(key) != now:
            what = (
                f"{checkpoint} belongs to a run with other data or batches or another muP: its step number would point "
                "to other rows, or its weights learn at other rates"
            )
            given, remedy = f"{key}: {then.get(key)} then, {now} now", f"go back to the former setting, or {_WAY_OUT}"
            problems.append(Problem(what, given, "resume_from_checkpoint", remedy))
    if isinstance(plan, BatchRamp):
        step = state["data_position"]["step"]
        reason = changed_past(stages_from(state["batch"]["stages"]), plan.stages, step=step)
        if reason:
            what = f"{checkpoint} was trained with other batches, so its step number would point to other rows"
            remedy = (
                f"only what comes after step {step} may change: keep batch_ramp and batch_tokens as they were up to "
                f"there, or {_WAY_OUT}"
            )
            problems.append(Problem(what, reason, "resume_from_checkpoint", remedy))
    return problems


def read_state(checkpoint: Path, *, fingerprint: Mapping[str, Any], plan: BatchRamp | AdaptiveRamp) -> PretrainState:
    """The state of a checkpoint, if its step number means the same data as in this run; see `check_state`.

    An adaptive plan goes on with the stages that the checkpoint had decided.

    Raises:
        ConfigError: the folder has no such state, another fingerprint, or a past with other batches; or an adaptive
            ramp cannot go on from its stages.
    """
    refuse(check_state(checkpoint, fingerprint=fingerprint, plan=plan))
    state = json.loads((checkpoint / PRETRAIN_STATE).read_text())
    if isinstance(plan, AdaptiveRamp):
        then, saved, step = stages_from(state["batch"]["stages"]), state["batch"], state["data_position"]["step"]
        # Of stages that were written down by hand only the past binds; those that were measured are decided.
        decided = then if saved["adaptive"] else [stage for stage in then if stage.first_step < max(step, 1)]
        refuse(plan.resume(decided, above_since=(saved["adaptive"] or {}).get("above_since")))
    return PretrainState(**{**state, "window": LogWindow(**state["window"])})


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
