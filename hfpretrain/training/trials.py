"""Trials of a sweep: a run's own settings at another width, learning rate and seed, each in a folder of its own.

A trial is an ordinary run of `recipes/pretrain.py`: its folder holds the `trial.yaml` that it was started from, and,
once it is over, an `outcome.json`, which is written last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hfpretrain.arguments import DataArguments, ModelArguments, PretrainArguments
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.model import load_config
from hfpretrain.mup.width import hidden_size, scale_width
from hfpretrain.planning.critical_batch import loss_after, readings
from hfpretrain.run_record import plain
from hfpretrain.training.checkpoints import TRAINER_STATE
from hfpretrain.training.run_length import RunLength, source_of

SETTINGS, OUTCOME, EVALUATION = "trial.yaml", "outcome.json", "eval_results.json"
# Where a trial runs and how fast, not what it computes: may differ between the launches of a sweep.
PLACE_AND_SPEED = {
    *("output_dir", "cache_dir", "preprocessing_num_workers", "disable_tqdm", "per_device_train_batch_size"),
    *("per_device_eval_batch_size", "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory"),
}
# What the sweep decides itself. Accumulation is derived; an access token has no business in a file.
OWN = {"output_dir", "learning_rate", "seed", "eval_strategy", "gradient_accumulation_steps", "hub_token"}
MUP = {"mup_base_width", "mup_base_config", "mup_overrides", "mup_weight_decay"}


@dataclass(frozen=True)
class Trial:
    """One run of a sweep; `settings` are its fields as `trial.yaml` holds them."""

    width: int
    learning_rate: float
    seed: int
    folder: Path
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        return f"width {self.width}, learning rate {self.learning_rate:g}, seed {self.seed}"

    @property
    def done(self) -> bool:
        return (self.folder / OUTCOME).is_file()

    def write(self) -> Path:
        """Write `trial.yaml`, which a run may be started from; what an unfinished launch said of its end goes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (TRAINER_STATE, EVALUATION):
            (self.folder / name).unlink(missing_ok=True)
        path = self.folder / SETTINGS
        path.write_text(yaml.safe_dump(dict(self.settings), sort_keys=False), encoding="utf-8")
        return path


@dataclass(frozen=True)
class Outcome:
    """What a trial came to.

    Attributes:
        loss: nats per token; None where the trial diverged.
        measured: which loss that is.
        why: how it diverged; "" where it did not.
        data_fingerprint: of the training data.
        parameters: of the model.
    """

    loss: float | None
    measured: str
    why: str
    data_fingerprint: str
    parameters: int

    @property
    def nats(self) -> float:
        """The loss, infinite where the trial diverged."""
        return math.inf if self.loss is None else self.loss


def plan_trials(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: PretrainArguments,
    *,
    widths: Sequence[int],
    learning_rates: Sequence[float],
    seeds: int,
    standard: bool,
) -> list[Trial]:
    """The trials in the order in which they should run: all of a seed before the next, wide ones first.

    So a proxy that does not fit into memory fails first, and the time that is left is overestimated, not
    underestimated. Seeds are the run's own and the numbers after it.

    Args:
        model_args, data_args, args: of the run, whose output_dir is the sweep's.
        standard: without muP.

    Raises:
        ConfigError: every width that the model cannot have.
    """
    fields = {**plain(model_args), **plain(data_args), **plain(args)}
    given = {name: fields[name] for name, source in args.sources.items() if source != "default" and name not in OWN}
    # `report_to: none` has become an empty list, which a file cannot say; it is the default.
    given = {name: value for name, value in given.items() if value != [] and not (standard and name in MUP)}
    if not standard and not given.keys() & {"mup_base_width", "mup_base_config"}:
        given["mup_base_width"] = min(widths)
    if not given.keys() & {"save_steps", "save_strategy"}:
        given["save_strategy"] = "no"
    else:
        given.setdefault("save_total_limit", 1)  # only to go on from
    given["eval_strategy"] = "no"  # the end is scored all the same
    trials, problems = [], []
    for width in sorted(widths, reverse=True):
        try:
            given["config_overrides"] = overrides_at(model_args, width)
        except ConfigError as error:
            problems += error.problems
            continue
        for seed in range(args.seed, args.seed + seeds):
            for rate in sorted(learning_rates):
                folder = Path(str(args.output_dir)) / f"width-{width}" / f"lr-{rate!r}" / f"seed-{seed}"
                own = {"learning_rate": rate, "seed": seed, "output_dir": str(folder)}
                trials.append(Trial(width, rate, seed, folder, given | own))
    refuse(problems)
    return sorted(trials, key=lambda trial: (trial.seed, -trial.width, trial.learning_rate))


def overrides_at(model_args: ModelArguments, width: int) -> dict[str, Any]:
    """`config_overrides` that give the run's model this width: all widths in proportion, head dimension and depth stay.

    Raises:
        ConfigError: the width is none of this model's, or its configuration does not follow overrides.
    """
    configuration = partial(load_config, model_type=model_args.model_type, config_name=model_args.config_name)
    own = configuration(config_overrides=model_args.config_overrides)
    scaled = scale_width(own, Fraction(width, hidden_size(own))).to_dict()
    changed = {name: value for name, value in scaled.items() if own.to_dict().get(name) != value}
    kept = {n: v for n, v in model_args.config_overrides.items() if own.attribute_map.get(n, n) not in changed}
    overrides = kept | changed
    for _ in range(2):  # some values follow from others unless they are given; muP's base keeps them, too
        rebuilt = configuration(config_overrides=overrides).to_dict()
        differing = {name: value for name, value in scaled.items() if rebuilt.get(name) != value}
        if not differing:
            return overrides
        overrides |= differing
    what = f"{type(own).__name__} at width {width} does not follow from config_overrides alone"
    given = ", ".join(f"{name}: {rebuilt.get(name)} for {value}" for name, value in differing.items())
    raise ConfigError([Problem(what, given, "widths", "save a configuration of that width and give config_name")])


def changed_settings(trials: Sequence[Trial]) -> list[Problem]:
    """Trials that were begun with other settings; nothing is overwritten."""
    by_change: dict[str, list[Trial]] = {}
    for trial in trials:
        path = trial.folder / SETTINGS
        if not path.is_file():
            continue
        then, now = yaml.safe_load(path.read_text(encoding="utf-8")), plain(trial.settings)
        names = sorted((then.keys() | now.keys()) - PLACE_AND_SPEED)
        changes = [f"{n}: {then.get(n)} then, {now.get(n)} now" for n in names if then.get(n) != now.get(n)]
        if changes:
            by_change.setdefault("; ".join(changes), []).append(trial)
    what = "trials in this folder were begun with other settings, so they could not be compared"
    remedy = "another --output_dir, or the former settings"
    return [
        Problem(f"{len(found)} {what}", change, f"{found[0].folder / SETTINGS}", remedy)
        for change, found in by_change.items()
    ]


def check_logging(data_args: DataArguments, args: PretrainArguments, run: RunLength) -> list[Problem]:
    """Without held-out text a trial's loss is that of its last tenth, which log lines must tell from the rest."""
    every = args.logging_steps if args.logging_steps >= 1 else math.ceil(args.logging_steps * run.num_steps)
    if data_args.validation_fraction or data_args.eval_data or every <= run.num_steps / 10:
        return []
    what = "nothing is held out, and no log line is about the last tenth of a trial alone"
    given = f"logging_steps={args.logging_steps:g} of {run.num_steps} steps"
    remedy = "validation_fraction above 0, or logging_steps of at most a tenth of the steps"
    return [Problem(what, given, source_of(args, "logging_steps"), remedy)]


def record_outcome(trial: Trial, *, diverged: str = "") -> Outcome | None:
    """Read what the trial's run wrote, and write its `outcome.json`; None where the run was stopped before its end.

    A loss above that of the first log line is a divergence, too: such a rate has unlearned.

    Args:
        diverged: why the run ended early, where it did.
    """
    run = json.loads((trial.folder / "run.json").read_text(encoding="utf-8"))
    about = (str(run["data_fingerprint"]), int(run["model_parameters"]))
    state = trial.folder / TRAINER_STATE
    if diverged:
        outcome = Outcome(None, "", diverged, *about)
    elif not state.is_file():
        return None
    else:
        log = json.loads(state.read_text(encoding="utf-8"))["log_history"]
        loss, measured = _final_loss(trial, log)
        first = next(line["loss"] for line in log if "loss" in line)
        why = "" if loss <= first else f"{loss:.4f} nats at the end, {first:.4f} at the start"  # NaN, too
        outcome = Outcome(None if why else loss, measured, why, *about)
    beside = trial.folder / f"{OUTCOME}.partial"
    beside.write_text(json.dumps(vars(outcome), indent=2) + "\n", encoding="utf-8")
    beside.replace(trial.folder / OUTCOME)
    return outcome


def read_outcomes(trials: Sequence[Trial]) -> list[Outcome]:
    """What `record_outcome` wrote.

    Raises:
        ConfigError: they were trained on different data.
    """
    outcomes = [Outcome(**json.loads((trial.folder / OUTCOME).read_text(encoding="utf-8"))) for trial in trials]
    by_data: dict[str, list[Trial]] = {}
    for trial, outcome in zip(trials, outcomes, strict=True):
        by_data.setdefault(outcome.data_fingerprint, []).append(trial)
    if len(by_data) > 1:
        what = "trials in this folder were trained on different data, so they cannot be compared"
        given = "; ".join(f"{len(found)} on {data}, such as {found[0].folder}" for data, found in by_data.items())
        refuse([Problem(what, given, "outcome.json of the trials", "another --output_dir for today's data")])
    return outcomes


def _final_loss(trial: Trial, log: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    scores = trial.folder / EVALUATION
    if scores.is_file():
        metrics = json.loads(scores.read_text(encoding="utf-8"))
        losses = [value for name, value in metrics.items() if name.endswith("_loss")]
        if "eval_loss" in metrics:
            return float(metrics["eval_loss"]), "held-out loss"
        return sum(losses) / len(losses), "held-out loss, mean over the sets of eval_data"
    lines = readings(log)
    return loss_after(lines, int(0.9 * lines[-1].tokens)), "training loss over the last tenth"
