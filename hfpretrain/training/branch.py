"""A run that goes on from another's checkpoint at a multiple of its batch, in a folder of its own.

It needs no mode of its own: a ramp whose past is the parent's and whose last stage begins at the checkpoint, resumed
from there. Optimizer state, rows and counters go on; only the batch and the learning rate are others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hfpretrain.errors import Problem, refuse
from hfpretrain.training.batch_ramp import BatchRamp, batch_lr_factor, stages_from
from hfpretrain.training.checkpoints import TRAINER_STATE, latest_checkpoint
from hfpretrain.training.resume import PRETRAIN_STATE

# What a branch decides itself, or has no use for.
OWN = {
    *("output_dir", "resume_from_checkpoint", "preflight_only", "batch_tokens", "batch_ramp", "total_tokens"),
    *("max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "warmup_fraction", "decay_steps"),
    *("decay_fraction", "decay_shape", "min_lr_ratio", "save_steps", "save_strategy", "save_total_limit"),
    *("gradient_accumulation_steps", "log_noise_scale", "hub_token", "push_to_hub"),
}


@dataclass(frozen=True)
class BranchPoint:
    """Where a run stood when it saved a checkpoint.

    Attributes:
        checkpoint: its folder.
        arguments: what the run was given, by field name; defaults are not in it.
        ramp: the batches it took up to here.
        learning_rate: of the step that would have come next.
        lr_rule: how the learning rate follows a batch: sqrt, linear or none.
        world_size: processes that trained it.
    """

    checkpoint: Path
    arguments: Mapping[str, Any]
    ramp: BatchRamp
    learning_rate: float
    lr_rule: str
    world_size: int

    @property
    def tokens(self) -> int:
        """Input positions seen."""
        return self.ramp.total_tokens

    @property
    def batch_tokens(self) -> int:
        """Input positions of the last step."""
        return self.ramp.batch_tokens(self.ramp.num_steps - 1)

    def at_batch(self, factor: int) -> float:
        """The learning rate that goes with `factor` times the batch."""
        return self.learning_rate * batch_lr_factor(factor, 1, self.lr_rule)

    def branch(self, factor: int, *, tokens: int, output_dir: Path) -> dict[str, Any]:
        """Arguments of a run of `tokens` more tokens at `factor` times the batch, at a constant learning rate."""
        batch, steps = factor * self.batch_tokens, tokens // (factor * self.batch_tokens)
        stages = str(self.ramp) if factor == 1 else f"{self.ramp},{self.tokens:_}:{batch:_}"
        latest = latest_checkpoint(output_dir)
        given = {name: value for name, value in self.arguments.items() if name not in OWN}
        return given | {
            "output_dir": str(output_dir),
            "resume_from_checkpoint": str(latest or self.checkpoint),
            "batch_ramp": stages,
            "total_tokens": self.tokens + tokens,
            "learning_rate": self.at_batch(factor),
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "save_steps": max(steps // 2, 1),
            "save_total_limit": 1,
        }


def branch_point(checkpoint: Path, *, factors: list[int], tokens: int) -> BranchPoint:
    """Read a checkpoint of `recipes/pretrain.py` and the `run.json` beside it.

    Raises:
        ConfigError: it is none, or these factors cannot be compared after these tokens.
    """
    needed = [checkpoint / TRAINER_STATE, checkpoint / PRETRAIN_STATE, checkpoint / "scheduler.pt"]
    needed.append(checkpoint.parent / "run.json")
    missing = [path for path in needed if not path.is_file()]
    what = "this is no checkpoint of recipes/pretrain.py with its run.json beside it"
    remedy = "RUN_FOLDER/checkpoint-N of a finished or running run"
    refuse([Problem(what, f"{path} is missing", "probe", remedy) for path in missing])
    record = json.loads((checkpoint.parent / "run.json").read_text())
    state = json.loads((checkpoint / PRETRAIN_STATE).read_text())
    scheduler = torch.load(checkpoint / "scheduler.pt", weights_only=True)
    step, length = state["data_position"]["step"], state["fingerprint"]["sequence_length"]
    done = tuple(stage for stage in stages_from(state["batch"]["stages"]) if stage.first_step < step)
    values = {name: value for group in record["arguments"].values() for name, value in group.items()}
    point = BranchPoint(
        checkpoint,
        {name: values[name] for name in record["sources"]},
        BatchRamp(done, length, step),
        float(scheduler["_last_lr"][0]),
        record["plan"]["lr_rule"],
        state["world_size"],
    )
    refuse(_problems(point, factors=factors, tokens=tokens))
    return point


def _problems(point: BranchPoint, *, factors: list[int], tokens: int) -> list[Problem]:
    problems = []
    if not point.learning_rate > 0:
        what = "the learning rate has come down to 0 there, so no batch would learn anything"
        problems.append(Problem(what, str(point.checkpoint), "probe", "a checkpoint from before the final decay"))
    if not factors or min(factors) < 1 or len(set(factors)) < len(factors):
        what = "batch factors are whole numbers of at least 1, each once"
        problems.append(Problem(what, str(factors), "probe_factors", "e.g. 1 2 4"))
        return problems
    for factor in factors:
        batch = factor * point.batch_tokens
        if tokens < batch or tokens % batch:
            what = f"losses are compared after the same tokens, and {tokens:_} are no whole steps of {batch:_}"
            near = max(round(tokens / batch), 1) * batch
            problems.append(Problem(what, f"factor {factor}", "probe_tokens", f"e.g. {near:_}"))
    return problems
