"""Everything about a run that can be judged before its text is read and its weights are made, in one list."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from transformers import PreTrainedConfig
from transformers.integrations.integration_utils import get_available_reporting_integrations

from hfpretrain.arguments import DataArguments, ModelArguments, Parsed, PretrainArguments, parse_leniently
from hfpretrain.arguments.rules import check_values
from hfpretrain.attention import register_torch_varlen
from hfpretrain.data.tokenizer import tokenizer_beforehand
from hfpretrain.deepspeed_checks import check_deepspeed
from hfpretrain.errors import ConfigError, Problem
from hfpretrain.launch_checks import check_launch, deepspeed_config, deepspeed_source
from hfpretrain.model import load_config, parameter_count
from hfpretrain.preflight.folders import changed_arguments, check_disk, check_weights, check_writable, other_run
from hfpretrain.preflight.machine import Device, describe_launch, speed_notes, version_notes
from hfpretrain.preflight.memory import judge_memory
from hfpretrain.preflight.model import build_on_meta, check_positions, check_vocabulary, mup_spec
from hfpretrain.preflight.text import check_eval_data, check_sources
from hfpretrain.training.checkpoints import resume_point
from hfpretrain.training.optimizer import check_mup_optimizer, check_optimizer
from hfpretrain.training.run_length import RunLength, derive, source_of
from hfpretrain.verdicts import Verdicts

T = TypeVar("T")
SCHEDULE_FIELDS = (
    *("lr_scheduler_type", "warmup_steps", "warmup_fraction", "decay_steps", "decay_fraction", "decay_shape"),
    "min_lr_ratio",
)


@dataclass(frozen=True)
class Start:
    """What a launch goes on with: the arguments, what follows from them, and the list to which later checks add.

    Attributes:
        checkpoint: the folder to continue from; None for a new run.
    """

    model_args: ModelArguments
    data_args: DataArguments
    args: PretrainArguments
    run: RunLength
    checkpoint: Path | None
    verdicts: Verdicts


def begin(argv: Sequence[str] | None = None) -> Start:
    """Read the command line and judge everything that needs neither text nor weights.

    Collective, once there is a process group: all ranks stop with the same list.

    Raises:
        ConfigError: every problem of every rank.
        SystemExit: after `--help`.
    """
    parsed = parse_leniently(argv)
    verdicts = Verdicts(sources=parsed.args.sources, doubtful=parsed.doubtful)
    if parsed.args.preflight_only and parsed.args.output_dir is not None:
        verdicts.json_path = Path(parsed.args.output_dir) / "preflight.json"
    if not verdicts.problem("arguments", parsed.problems):
        verdicts.ok("arguments", _describe_sources(parsed.args), aloud=False)
    verdicts.lenient = True
    run, checkpoint = check_start(parsed, verdicts)
    verdicts.lenient = False
    verdicts.refuse()
    assert run is not None  # else there was a problem
    return Start(parsed.model_args, parsed.data_args, parsed.args, run, checkpoint, verdicts)


def check_start(parsed: Parsed, verdicts: Verdicts) -> tuple[RunLength | None, Path | None]:
    """(length of the run, checkpoint to continue from), each None where it is none or cannot be known; never raises.

    One check after another, whatever the earlier ones found: only what hangs on a value that could not be read is left
    out, and says so.
    """
    model_args, data_args, args = parsed.model_args, parsed.data_args, parsed.args
    _launch(args, verdicts)
    run = _length(parsed, verdicts)
    with verdicts.timed("data"):
        verdicts.problem("data", check_eval_data(data_args, args))
        verdicts.problem("data", check_sources(data_args, args))
    config = _model(parsed, verdicts)
    checkpoint = _folders(parsed, verdicts)
    if config is not None:
        _sizes(config, parsed, run, checkpoint, verdicts)
    _machine(model_args, args, verdicts)
    return run, checkpoint


def check_arguments(model_args: ModelArguments, data_args: DataArguments, args: PretrainArguments) -> list[Problem]:
    """The rules that `parse` applies, for dataclasses that were built by hand."""
    values = SimpleNamespace(**{**vars(model_args), **vars(data_args), **vars(args)})
    return [problem for _, problem in check_values(values, sources=args.sources)]


def _describe_sources(args: PretrainArguments) -> str:
    counts: dict[str, int] = {}
    for source in args.sources.values():
        if source != "default":
            counts[source] = counts.get(source, 0) + 1
    return "; ".join(f"{count} from {source}" for source, count in counts.items())


def _launch(args: PretrainArguments, verdicts: Verdicts) -> None:
    with verdicts.timed("launch"):
        config = deepspeed_config(args)
        problems = check_launch(args) + check_deepspeed(config, args, source=deepspeed_source(args))
        if not verdicts.problem("launch", problems):
            verdicts.ok("launch", describe_launch(args, config))


def _length(parsed: Parsed, verdicts: Verdicts) -> RunLength | None:
    if not verdicts.needs("plan", "batch_tokens", "sequence_length", "total_tokens", "max_steps", "batch_ramp"):
        return None
    args = _without_contradictions(parsed)
    run = verdicts.attempt("plan", derive, args, parsed.data_args, world_size=args.world_size)
    if run is not None and args is parsed.args:
        verdicts.ok("plan", str(run))
    return run


def _without_contradictions(parsed: Parsed) -> PretrainArguments:
    """The arguments, but where they contradict about batch and schedule: what else would be wrong without that?

    A schedule that contradicts itself is the default one then, and a batch that is no whole number of rows the nearest
    smaller one that is.
    """
    schedule = parsed.contradicted & set(SCHEDULE_FIELDS)
    rest = parsed.args.batch_tokens % max(parsed.data_args.sequence_length, 1)
    if not schedule and not (rest and "batch_tokens" in parsed.contradicted):
        return parsed.args
    args = copy.copy(parsed.args)
    if args.batch_tokens > rest:
        args.batch_tokens -= rest
    defaults = {field.name: field.default for field in dataclasses.fields(PretrainArguments)}
    args.sources = args.sources | dict.fromkeys(schedule, "default")
    for name in schedule:
        setattr(args, name, defaults[name])
    return args


def _model(parsed: Parsed, verdicts: Verdicts) -> PreTrainedConfig | None:
    """The configuration, as far as it can be known before a tokenizer is trained."""
    model_args, data_args, args = parsed.model_args, parsed.data_args, parsed.args
    name = model_args.tokenizer_name or model_args.model_name_or_path or model_args.config_name
    sources = [model_args.model_type, model_args.config_name, model_args.model_name_or_path]
    named = ("model_type", "config_name", "model_name_or_path", "tokenizer_name", "config_overrides", "cache_dir")
    if not name or sum(map(bool, sources)) != 1 or not verdicts.needs("model", *named):
        return None  # no model or no tokenizer is named, which `arguments` says
    cache_dir = Path(data_args.cache_dir)
    load = partial(_from_hub, args, "tokenizer_name", tokenizer_beforehand)
    tokenizer = verdicts.attempt("model", load, name, cache_dir=cache_dir)
    field = "model_name_or_path" if model_args.model_name_or_path else "config_name"
    config = verdicts.attempt(
        "model",
        partial(_from_hub, args, field, load_config),
        model_type=model_args.model_type,
        config_name=model_args.config_name,
        config_overrides=model_args.config_overrides,
        model_name_or_path=model_args.model_name_or_path,
        tokenizer=tokenizer,
    )
    if config is None:
        return None
    with verdicts.timed("model"):
        if verdicts.needs("model", "sequence_length"):
            verdicts.problem("model", check_positions(config, data_args, args))
        if tokenizer is not None:
            verdicts.problem("model", check_vocabulary(config, tokenizer, args))
    mup = model_args.mup_base_width is not None or model_args.mup_base_config
    if mup and not any(name.startswith("mup_") for name in parsed.contradicted):
        refused = verdicts.problem("muP", check_mup_optimizer(args))
        if verdicts.problems and not refused:  # without problems it is made once, later
            verdicts.attempt("muP", mup_spec, config, model_args, args, tokenizer=tokenizer)
    return config


def _from_hub(args: PretrainArguments, field: str, load: Callable[..., T], *words: Any, **kwargs: Any) -> T:
    """Load a tokenizer or a configuration; what transformers raises for one that is not there becomes a problem."""
    try:
        return load(*words, **kwargs)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        given = next((str(word) for word in (*words, kwargs.get(field)) if word), field)
        remedy = "a folder that is here or a name on the hub; with HF_HUB_OFFLINE only what was downloaded before"
        raise ConfigError(
            [Problem(f"it cannot be loaded: {lines[0]}", given, source_of(args, field), remedy)]
        ) from error


def _folders(parsed: Parsed, verdicts: Verdicts) -> Path | None:
    model_args, data_args, args = parsed.model_args, parsed.data_args, parsed.args
    if args.output_dir is None or not verdicts.needs("output_dir", "output_dir", "cache_dir", "resume_from_checkpoint"):
        return None
    checkpoint = None
    if "resume_from_checkpoint" not in parsed.contradicted:
        checkpoint = verdicts.attempt("output_dir", resume_point, args.resume_from_checkpoint, str(args.output_dir))
    with verdicts.timed("output_dir"):
        changed, saved = changed_arguments(model_args, data_args, args)
        problems = check_writable(data_args, args)
        if saved and changed and checkpoint is None and not verdicts.problems_of("output_dir"):
            problems += other_run(changed, args)
        if verdicts.problem("output_dir", problems):
            return checkpoint
        found = f"{args.output_dir}: {f'goes on from {checkpoint}' if checkpoint else 'a new run'}"
        if changed and checkpoint is not None:
            verdicts.note("output_dir", f"{found}, with other arguments than there: {'; '.join(changed)}")
        else:
            verdicts.ok("output_dir", found)
    return checkpoint


def _sizes(
    config: PreTrainedConfig, parsed: Parsed, run: RunLength | None, checkpoint: Path | None, verdicts: Verdicts
) -> None:
    """What follows from the size of the model: can it be built, do the weights fit it, is there memory and disk."""
    model_args, data_args, args = parsed.model_args, parsed.data_args, parsed.args
    register_torch_varlen()
    attention = model_args.attn_implementation
    model = verdicts.attempt("model", build_on_meta, config, attn_implementation=attention)
    if model is None:
        return
    if checkpoint is not None:
        with verdicts.timed("checkpoint"):
            verdicts.problem("checkpoint", check_weights(checkpoint, model, args))
    with verdicts.timed("optimizer"):
        verdicts.problem("optimizer", check_optimizer(args))
    with verdicts.timed("memory"):
        if verdicts.needs("memory", "sequence_length", "per_device_train_batch_size"):
            judge_memory(verdicts, config, model_args, data_args, args)
    if run is None or args.output_dir is None:
        return
    with verdicts.timed("disk"):
        deepspeed = deepspeed_config(args)
        stage = None if deepspeed is None else deepspeed.get("zero_optimization", {}).get("stage", 0)
        if stage not in (None, 0, 1, 2, 3):
            return  # which `launch` says
        problems, found, tight = check_disk(args, run, parameters=parameter_count(model), zero_stage=stage)
        if not verdicts.problem("disk", problems):
            (verdicts.note if tight else verdicts.ok)("disk", found)


def _machine(model_args: ModelArguments, args: PretrainArguments, verdicts: Verdicts) -> None:
    with verdicts.timed("trackers"):
        verdicts.problem("trackers", check_trackers(args))
    with verdicts.timed("speed"):
        attention = model_args.attn_implementation
        for what, remedy in speed_notes(args, Device.of(args.device), attn_implementation=attention):
            verdicts.note("speed", what, remedy=remedy)
    with verdicts.timed("versions"):
        versions = version_notes()
        if versions:
            remedy = "pip install -c constraints.txt, or trust your own tests"
            verdicts.note("versions", f"not the tested set: {', '.join(versions)}", remedy=remedy)
        else:
            verdicts.ok("versions", "the tested set of constraints.txt", aloud=False)


def check_trackers(args: PretrainArguments) -> list[Problem]:
    """Trackers that are unknown or not installed; the Trainer would say so after the text was tokenised."""
    wanted = [name for name in args.report_to if name not in ("none", "all")]
    missing = [name for name in wanted if name not in get_available_reporting_integrations()]
    what = "this tracker is not installed, or none that transformers knows"
    remedy = "install it, or report_to: none"
    return [Problem(what, name, source_of(args, "report_to"), remedy) for name in missing]
