"""What the arguments must satisfy by themselves: ranges, and fields that contradict one another.

Pure functions over any object that has the fields as attributes, so that they can judge a command line before a process
group or a device exists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfpretrain.arguments.types import NoiseScaleRamp, batch_ramp
from hfpretrain.errors import Problem

SCHEDULES = ("warmup_stable_decay", "cosine", "linear", "constant")

# Fields of TrainingArguments that this trainer does not follow: better refused than ignored.
NOT_FOLLOWED = {
    "num_train_epochs": "the length of a run is total_tokens or max_steps; epochs follow from it and are printed",
    "lr_scheduler_kwargs": "use warmup_*, decay_* and min_lr_ratio",
    "label_smoothing_factor": "the loss is the plain cross-entropy of the next token",
    "auto_find_batch_size": "the batch is batch_tokens; lower per_device_train_batch_size when memory runs out",
    "train_sampling_strategy": "the order of the rows comes from the seed alone",
    "dataloader_drop_last": "a step always has exactly batch_tokens",
    "average_tokens_across_devices": "the loss is always weighted by the target tokens of all devices",
    "save_only_model": "a checkpoint without its optimizer could not continue the run",
    "load_best_model_at_end": "the final model is the last one; see eval_bpb in trainer_state.json for another",
    "metric_for_best_model": "the final model is the last one; see eval_bpb in trainer_state.json for another",
    "enable_jit_checkpoint": "a SIGTERM to any rank already makes all ranks save and stop after the running step",
    "fsdp": "sharding is DeepSpeed's here: use accelerate_configs/zero1.yaml, zero2.yaml or zero3.yaml",
    "fsdp_config": "sharding is DeepSpeed's here: use accelerate_configs/zero1.yaml, zero2.yaml or zero3.yaml",
    "neftune_noise_alpha": "noise on embeddings is a fine-tuning method; remove it",
}

NamedProblem = tuple[tuple[str, ...], Problem]  # the fields it is about


@dataclass
class _Book:
    """Collects problems under the name of the field they are about."""

    values: Any
    sources: Mapping[str, str]
    found: list[NamedProblem] = field(default_factory=list)

    def given(self, name: str) -> bool:
        """Whether the user set it; without sources (dataclasses built by hand) a None or a default counts as not."""
        return self.sources.get(name, "default") != "default"

    def note(self, name: str, what: str, remedy: str, *, also: tuple[str, ...] = ()) -> None:
        fields = (name, *also)
        given = ", ".join(f"{f}={getattr(self.values, f)!r}" for f in fields)
        source = ", ".join(dict.fromkeys(self.sources.get(f, "arguments") for f in fields))
        self.found.append((fields, Problem(what, given, source, remedy)))

    def between(self, name: str, low: float, high: float, *, why: str = "") -> None:
        value = getattr(self.values, name)
        if value is not None and not low <= value <= high:
            bound = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
            self.note(name, f"{name} is out of range" + (f": {why}" if why else ""), f"choose {bound}")


def check_values(values: Any, *, sources: Mapping[str, str]) -> list[NamedProblem]:
    """Every problem that the arguments have by themselves, as (fields it is about, problem).

    Args:
        values: an object with the fields of all three dataclasses as attributes.
        sources: field -> where the value came from, for the messages; "default" means the user did not give it.
    """
    book = _Book(values, sources)
    rules: tuple[Callable[[_Book], None], ...] = (
        *(_needed, _ranges, _mup, _length, _ramp, _schedule, _trainer, _resume),
    )
    for rule in rules:
        rule(book)
    return book.found


def check_length(values: Any, *, sources: Mapping[str, str]) -> list[NamedProblem]:
    """The part of `check_values` about the length of the run and of a step."""
    book = _Book(values, sources)
    _length(book)
    return book.found


def _needed(book: _Book) -> None:
    v = book.values
    models = [name for name in ("model_type", "config_name", "model_name_or_path") if getattr(v, name)]
    if len(models) != 1:
        what = "no model is named" if not models else "the model is named more than once"
        others = tuple(models[1:])
        book.note(
            models[0] if models else "model_type",
            what,
            "give exactly one of model_type and config_name (random weights) and model_name_or_path (weights)",
            also=others,
        )
    if not v.tokenizer_name and models in ([], ["model_type"]):
        book.note(
            "tokenizer_name",
            "no tokenizer is named, and a model_type has none",
            "e.g. train:8192, bytes, or a hub name",
        )
    if not v.dataset:
        book.note("dataset", "no data is named", "e.g. dataset: stdlib, or path/to/*.jsonl")
    if not v.output_dir:
        book.note(
            "output_dir",
            "no output folder is named; a shared default would let one run continue another's checkpoints",
            "give output_dir, one folder per run",
        )


def _ranges(book: _Book) -> None:
    inf = float("inf")
    book.between("sequence_length", 2, inf, why="one token predicts the next")
    book.between("validation_fraction", 0, 0.5)
    book.between("preprocessing_num_workers", 1, inf)
    book.between("batch_tokens", 1, inf)
    book.between("total_tokens", 1, inf)
    book.between("per_device_train_batch_size", 1, inf)
    book.between("per_device_eval_batch_size", 1, inf)
    book.between("gradient_accumulation_steps", 1, inf)
    book.between("learning_rate", 0, inf)
    book.between("weight_decay", 0, inf)
    book.between("max_grad_norm", 0, inf)
    book.between("z_loss_weight", 0, inf)
    book.between("log_noise_scale", 0, inf)
    if book.values.skip_spikes != 0:
        book.between("skip_spikes", 3, inf, why="below 3 robust standard deviations steps are ordinary; 0 turns it off")
    for name in ("log_noise_scale", "skip_spikes"):
        if getattr(book.values, name) and book.values.fp16:
            what = "gradient norms contain fp16's changing loss scale, in another way at each ZeRO stage"
            book.note(name, f"{what}, so {name} would be wrong", f"bf16, or {name}: 0", also=("fp16",))
    book.between("warmup_fraction", 0, 1)
    book.between("decay_fraction", 0, 1)
    book.between("decay_steps", 0, inf)
    book.between("min_lr_ratio", 0, 1)


def _mup(book: _Book) -> None:
    v = book.values
    base = [name for name in ("mup_base_width", "mup_base_config") if getattr(v, name)]
    book.between("mup_base_width", 1, float("inf"))
    book.between("mup_base_depth", 1, float("inf"))
    if len(base) == 2:
        book.note(
            "mup_base_width", "the muP base model is given twice", "give one of the two", also=("mup_base_config",)
        )
    if base and v.model_name_or_path:
        what = "muP is a way to initialise; weights that are loaded have been initialised and trained otherwise"
        book.note(base[0], what, "fresh weights (model_type, config_name), or no muP", also=("model_name_or_path",))
    if v.mup_base_depth is not None and not base:
        what = "mup_base_depth alone names no base model: it is built, at the base width, to measure it"
        book.note(
            "mup_base_depth", what, "give mup_base_width too; the model's own hidden size if only the depth differs"
        )
    if v.mup_depth_overrides and v.mup_base_depth is None:
        what = "mup_depth_overrides is about another depth, and no base depth is given"
        book.note("mup_depth_overrides", what, "give mup_base_depth, or remove it")
    for name in ("mup_overrides", "mup_weight_decay"):
        if not base and (getattr(v, name) if name == "mup_overrides" else book.given(name)):
            book.note(name, f"{name} is about muP, and no base model is given", "give mup_base_width, or remove it")


def _length(book: _Book) -> None:
    v = book.values
    if v.max_steps == 0 or v.max_steps < -1:
        book.note("max_steps", "max_steps must be 1 or more", "a number of optimizer steps, or -1 and total_tokens")
    if v.total_tokens is None and v.max_steps == -1:
        book.note("total_tokens", "the run has no length", "give total_tokens (e.g. 1B) or max_steps")
    if v.sequence_length < 1 or v.batch_tokens < 1:
        return
    rows, rest = divmod(v.batch_tokens, v.sequence_length)
    fixed_ramp = v.batch_ramp is not None and not isinstance(batch_ramp(v.batch_ramp), NoiseScaleRamp)
    if rest and not fixed_ramp:  # a ramp's batches are judged together, in `preflight`
        near = ", ".join(f"{n * v.sequence_length:_}" for n in (rows, rows + 1) if n)
        what = "batch_tokens is not a whole number of rows of sequence_length tokens"
        book.note("batch_tokens", what, f"the nearest that fit: {near}", also=("sequence_length",))
    if v.total_tokens is not None and v.max_steps > 0 and v.batch_ramp is None:
        steps = max(v.total_tokens // v.batch_tokens, 1)
        if steps != v.max_steps:
            what = f"total_tokens and max_steps disagree: {v.total_tokens:_} / {v.batch_tokens:_} = {steps:_} steps"
            book.note("total_tokens", what, "give one of the two", also=("max_steps",))


def _ramp(book: _Book) -> None:
    """Whether a ramp's stages fit together is judged in `preflight`, where the number of processes is known."""
    v = book.values
    if v.batch_ramp is None:
        if book.given("batch_ramp_lr"):
            what = "one batch throughout has nothing for the learning rate to follow"
            book.note("batch_ramp_lr", what, "remove it, or give batch_ramp", also=("batch_ramp",))
        return
    ramp = batch_ramp(v.batch_ramp)
    if not isinstance(ramp, NoiseScaleRamp):
        if v.batch_tokens != ramp[-1][1]:
            what = f"batch_tokens is not the last batch of the ramp, {ramp[-1][1]:_}"
            book.note("batch_tokens", what, "leave batch_tokens out", also=("batch_ramp",))
        return
    if v.sequence_length >= 1 and ramp.start_tokens % v.sequence_length:
        what = "the ramp's first batch is not a whole number of rows of sequence_length tokens"
        near = max(round(ramp.start_tokens / v.sequence_length), 1) * v.sequence_length
        book.note("batch_ramp", what, f"e.g. noise_scale:{near:_}", also=("sequence_length",))
    if ramp.start_tokens >= v.batch_tokens:
        what = "the ramp's first batch leaves no room to grow"
        book.note("batch_ramp", what, "batch_tokens is the largest batch: raise it", also=("batch_tokens",))
    if not v.log_noise_scale:
        what = "the ramp follows the noise scale, which is not measured"
        book.note("log_noise_scale", what, "log_noise_scale: 1, or 10 where steps are short", also=("batch_ramp",))
    if v.max_steps > 0:
        what = "with a batch that grows by measurement the number of steps is not known, the run ends on tokens"
        book.note("max_steps", what, "give total_tokens in its place", also=("batch_ramp",))
    if v.decay_steps is not None:
        what = "with a batch that grows by measurement a number of last steps is no number of tokens"
        book.note("decay_steps", what, "give decay_fraction, a share of the tokens", also=("batch_ramp",))


def _schedule(book: _Book) -> None:
    v = book.values
    if v.lr_scheduler_type not in SCHEDULES:
        what = "this schedule is not one of those that end where the run ends"
        book.note("lr_scheduler_type", what, f"one of {', '.join(SCHEDULES)}")
        return
    if v.warmup_steps < 0 or (v.warmup_steps % 1 and v.warmup_steps > 1):
        book.note(
            "warmup_steps", "warmup_steps is not a number of steps", "a whole number of steps, or warmup_fraction"
        )
    elif 0 < v.warmup_steps < 1:
        what = "a warmup_steps below 1 would be a ratio to transformers, here it is steps"
        book.note("warmup_steps", what, f"write warmup_fraction: {v.warmup_steps:g}")
    elif v.warmup_fraction is not None and (v.warmup_steps or book.given("warmup_steps")):
        book.note("warmup_steps", "the warm-up is given twice", "give one of the two", also=("warmup_fraction",))
    decay = [name for name in ("decay_steps", "decay_fraction") if getattr(v, name) is not None]
    if v.lr_scheduler_type != "warmup_stable_decay":
        extra = [*decay, *(["decay_shape"] if book.given("decay_shape") else [])]
        for name in extra:
            what = f"{v.lr_scheduler_type} has no separate final decay"
            book.note(name, what, f"remove {name}, or use warmup_stable_decay", also=("lr_scheduler_type",))
    elif len(decay) == 2:
        book.note("decay_steps", "the decay is given twice", "give one of the two", also=("decay_fraction",))
    if v.lr_scheduler_type == "constant" and v.min_lr_ratio:
        what = "a constant schedule has no minimum to reach"
        book.note("min_lr_ratio", what, "remove min_lr_ratio, or choose another schedule", also=("lr_scheduler_type",))
    warmup, final = v.warmup_fraction or 0, v.decay_fraction or 0
    if warmup <= 1 and final <= 1 and warmup + final > 1:
        what = f"warm-up and decay together take {warmup + final:.3g} of the run"
        book.note("warmup_fraction", what, "shorten one of them", also=("decay_fraction",))


def _trainer(book: _Book) -> None:
    v = book.values
    for name, remedy in NOT_FOLLOWED.items():
        if book.given(name):
            book.note(name, f"{name} is not followed by this trainer", remedy)
    if v.remove_unused_columns:
        what = "an item of the data loader is a whole step, there are no columns to remove"
        book.note("remove_unused_columns", what, "leave it false")
    if not v.ignore_data_skip:
        book.note("ignore_data_skip", "the data already start at the step that a resumed run is at", "leave it true")
    evaluates = str(getattr(v.eval_strategy, "value", v.eval_strategy)) != "no"
    if v.validation_fraction == 0 and not v.eval_data and evaluates:
        what = "evaluation is asked for, but no document is held out"
        remedy = "set validation_fraction or eval_data, or eval_strategy: no"
        book.note("eval_strategy", what, remedy, also=("validation_fraction",))
    by_launcher = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if by_launcher and v.deepspeed:
        # Seen here, before TrainingArguments is built: building it deletes the launcher's variable.
        what = "DeepSpeed is configured by accelerate's configuration and by --deepspeed; only the latter would count"
        book.note("deepspeed", what, "leave one of them out")


def _resume(book: _Book) -> None:
    asked = book.values.resume_from_checkpoint
    if asked in ("auto", "false"):
        return
    if str(asked).lower() in ("true", "none", ""):
        book.note(
            "resume_from_checkpoint", "resume_from_checkpoint is auto, false or a folder", "auto resumes where it can"
        )
    elif not Path(asked).expanduser().is_dir():
        book.note("resume_from_checkpoint", "this checkpoint folder does not exist", "correct the path, or use auto")
