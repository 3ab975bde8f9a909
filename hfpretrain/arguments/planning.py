"""What `recipes/plan.py` can be asked for: everything that `recipes/pretrain.py` takes, and what only a plan needs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hfpretrain.arguments.command_line import read_command_line
from hfpretrain.arguments.defaults import settle
from hfpretrain.arguments.fields import DataArguments, ModelArguments, PretrainArguments
from hfpretrain.arguments.rules import check_values
from hfpretrain.arguments.types import count_points
from hfpretrain.errors import Problem

# What a run must have and a plan need not: no data is read and nothing is written.
_NOT_NEEDED = {"dataset", "output_dir", "tokenizer_name"}
_MODELS = ("params", "model_type", "config_name", "model_name_or_path")


def _arg(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class PlanArguments:
    """Where a run is to be made and what is asked about it; all other flags are those of recipes/pretrain.py."""

    _argument_group_name = "plan"

    params: int | None = _arg(
        None, "Parameters of the model (7B, 160M), in place of a model: what depends on its shape is then left out."
    )
    world_size: int = _arg(
        1, "Devices, each with one process. Default 1: a launcher says it to a run, nobody to a plan."
    )
    device: str = _arg(
        "h100", "Kind of device: h200, h100, a100, ... Its dense bf16 peak and its memory count; h100 is a usual one."
    )
    device_memory_gb: float | None = _arg(
        None, "GB (1e9 bytes) of a device's memory. Default: the maker's figure, of several sizes the smallest."
    )
    mfu: float = _arg(
        0.4,
        "Share of that peak that is useful work, as pretrain.py logs it (mfu_causal; recomputation is no useful work). "
        "0.4 is usual for models of billions; measure yours.",
    )
    zero_stage: int | None = _arg(
        None, "DeepSpeed's stage, 0 to 3, with its default buckets; or --deepspeed FILE. Default: plain DDP."
    )
    offload_optimizer: bool = _arg(False, "Optimizer state in the host's memory (ZeRO 1 to 3).")
    offload_params: bool = _arg(False, "Parameters in the host's memory (ZeRO 3).")
    storage_gbps: float = _arg(
        2.0, "GB (1e9 bytes) that a checkpoint is written at a second. 2 is a usual network disk."
    )
    price_per_device_hour: float | None = _arg(None, "In any currency; prints the cost.")
    inference_tokens: int | None = _arg(
        None, "Tokens that the model will read and write in its life; prints the size that is then cheapest."
    )
    mean_document_tokens: float | None = _arg(
        None,
        "Mean length of a document with its begin and end tokens. Prints what padding would waste, and attention is "
        "counted inside documents of this length. Default: a document fills every row.",
    )
    noise_scale_points: str | None = _arg(
        None,
        "Measured parameters:tokens of small models, 25M:90k,100M:180k; the critical batch is continued with N^0.5.",
    )
    explain: bool = _arg(False, "Formula and source beside each number.")
    json: bool = _arg(False, "All figures as JSON.")


@dataclass(frozen=True)
class PlanRequest:
    """What was asked for, and everything about it that cannot be read or contradicts.

    Attributes:
        values: every field of the four dataclasses; `sources`, `accumulation_asked`, `points` (noise_scale_points as
            pairs) and `deepspeed_config` (a mapping or None). They stand in for `PretrainArguments`, which cannot be
            built for other hardware than this machine's.
        bad_fields: fields that could not be read or are out of range; they should not be judged further.
    """

    values: SimpleNamespace
    problems: list[Problem]
    bad_fields: set[str]


def read_plan(argv: Sequence[str] | None = None) -> PlanRequest:
    """`--config` files and flags, merged and judged as for a run.

    Args:
        argv: the command line without the program's name; None takes this process's.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    reading = read_command_line((PlanArguments, ModelArguments, DataArguments, PretrainArguments), argv)
    values = SimpleNamespace(**reading.values)
    settle(values, reading.sources)
    given = reading.sources["gradient_accumulation_steps"] != "default"
    values.sources = reading.sources
    values.accumulation_asked = values.gradient_accumulation_steps if given else None
    values.points = None if values.noise_scale_points is None else count_points(values.noise_scale_points)
    problems, bad = list(reading.problems), set(reading.bad_fields)
    for fields, problem in check_values(values, sources=reading.sources) + _plan_rules(values):
        if not bad.intersection(fields) and fields[0] not in _NOT_NEEDED and not set(fields) <= set(_MODELS[1:]):
            problems.append(problem)
            bad |= set(fields)
    problems += _one_model(values, bad)
    problems += _placement(values)
    return PlanRequest(values, problems, bad)


def _plan_rules(values: SimpleNamespace) -> list[tuple[tuple[str, ...], Problem]]:
    above, zero, no_limit = 1e-300, 0.0, float("inf")
    limits = {
        "params": (1, no_limit),
        "world_size": (1, no_limit),
        "device_memory_gb": (above, no_limit),
        "mfu": (above, 1),
        "zero_stage": (0, 3),
        "storage_gbps": (above, no_limit),
        "price_per_device_hour": (zero, no_limit),
        "inference_tokens": (zero, no_limit),
        "mean_document_tokens": (1, no_limit),
        "save_steps": (above, no_limit),
        "save_total_limit": (zero, no_limit),
    }
    found: list[tuple[tuple[str, ...], Problem]] = []
    for name, (low, high) in limits.items():
        value = getattr(values, name)
        if value is not None and not low <= value <= high:
            least = "above 0" if low == above else f"at least {low:g}"
            remedy = f"choose {least}" + ("" if high == no_limit else f", at most {high:g}")
            found.append(((name,), Problem(f"{name} is out of range", f"{value}", values.sources[name], remedy)))
    return found


def _one_model(values: SimpleNamespace, bad: set[str]) -> list[Problem]:
    models = [name for name in _MODELS if getattr(values, name) or name in bad]
    with_changes = models == ["params"] and bool(values.config_overrides)
    if len(models) == 1 and not with_changes:
        return []
    given = ", ".join(f"{name} ({values.sources[name]})" for name in models) + (
        f", config_overrides ({values.sources['config_overrides']})" if with_changes else ""
    )
    remedy = "params alone, or one of model_type, config_name and model_name_or_path, with config_overrides or without"
    return [Problem("it is not clear which model is planned", given or "none", "arguments", remedy)]


def _placement(values: SimpleNamespace) -> list[Problem]:
    """Reads `--deepspeed` into `values.deepspeed_config`; contradictions with the plan's own flags."""
    config, source, problems = values.deepspeed, values.sources["deepspeed"], []
    if isinstance(config, str):
        try:
            text = config if config.lstrip().startswith("{") else Path(config).read_text(encoding="utf-8")
            config = json.loads(text)
        except (OSError, ValueError) as error:
            what = f"the DeepSpeed configuration cannot be read: {' '.join(str(error).split())}"
            problems.append(Problem(what, str(values.deepspeed), source, "correct the path or the file"))
            config = None
    values.deepspeed_config = config
    for name in ("zero_stage", "offload_optimizer", "offload_params"):
        if values.deepspeed and values.sources[name] != "default":
            what = f"the DeepSpeed configuration says {name}, and so does a flag of the plan"
            given = f"{name}={getattr(values, name)}, deepspeed={values.deepspeed}"
            problems.append(Problem(what, given, values.sources[name], f"leave out --{name}, or --deepspeed"))
    return problems
