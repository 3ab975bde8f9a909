"""What a DeepSpeed configuration must not decide, and what DeepSpeed would misread or pass over in silence."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from hfpretrain.errors import Problem

# DeepSpeed key -> the argument that owns the number. "auto" lets the argument through.
_OWNED_BY_ARGUMENTS = {
    "gradient_clipping": "max_grad_norm",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
}
# Keys whose absence or misspelling changes the training; DeepSpeed passes over unknown top-level keys without a word.
_DECISIVE = (
    *("gradient_clipping", "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"),
    *("zero_optimization", "optimizer", "scheduler", "communication_data_type"),
)


def check_deepspeed(
    config: Mapping[str, Any] | None, args: Any, *, source: str = "DeepSpeed configuration"
) -> list[Problem]:
    """The problems of a DeepSpeed configuration beside these arguments.

    Args:
        config: the configuration as a mapping (see `launch_checks.deepspeed_config`), None without DeepSpeed.
        args: the training arguments that own the numbers.
        source: the file that it comes from.
    """
    if config is None:
        return []
    found = [*_blocks(config), *_numbers(config, args), *_precision(config, args), *_zero(config), *_misspelt(config)]
    return [Problem(what, given, source, remedy) for what, given, remedy in found]


_Found = list[tuple[str, str, str]]  # what, given, remedy


def _blocks(config: Mapping[str, Any]) -> _Found:
    found = []
    if "optimizer" in config:
        what = "an optimizer block replaces the parameter groups: embeddings, biases and norms would be decayed too"
        remedy = "remove it; use optim, learning_rate, weight_decay, adam_*"
        found.append((what, f"optimizer: {config['optimizer']}", remedy))
    if "scheduler" in config:
        what = "a scheduler block replaces the schedule, and DeepSpeed's end at no minimum and know no WSD"
        remedy = "remove it; use lr_scheduler_type, warmup_*, decay_*"
        found.append((what, f"scheduler: {config['scheduler']}", remedy))
    if "gradient_clipping" not in config:
        what = "without gradient_clipping DeepSpeed does not clip at all, whatever max_grad_norm says"
        found.append((what, "no such key", '"gradient_clipping": "auto"'))
    return found


def _numbers(config: Mapping[str, Any], args: Any) -> _Found:
    found = []
    owned = {key: (owner, getattr(args, owner)) for key, owner in _OWNED_BY_ARGUMENTS.items()}
    micro, world = args.per_device_train_batch_size, getattr(args, "world_size", 1)
    calculated = "processes * per_device_train_batch_size"
    owned["train_batch_size"] = (calculated, world * micro)
    owned["gradient_accumulation_steps"] = ("the Trainer, which feeds whole steps", 1)
    for key, (owner, ours) in owned.items():
        value = config.get(key, "auto")
        if value == "auto":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            what = f"{key} is {type(value).__name__}, DeepSpeed needs a number"
            found.append((what, f"{key}: {value!r}, {owner}: {ours!r}", f'"{key}": "auto"'))
        elif value != ours and key == "gradient_accumulation_steps":
            what = "the Trainer feeds whole steps; DeepSpeed must not accumulate by itself"
            found.append((what, f"{key}: {value}", f'"{key}": "auto"'))
        elif value != ours:
            found.append((f"{key} contradicts {owner}", f"{key}: {value}, {owner}: {ours}", f'"{key}": "auto"'))
    return found


def _precision(config: Mapping[str, Any], args: Any) -> _Found:
    found = []
    on = []
    for key, ours in (("bf16", args.bf16), ("fp16", args.fp16)):
        section = config.get(key, {})
        enabled = section.get("enabled", "auto") if isinstance(section, Mapping) else section
        if enabled != "auto" and not isinstance(enabled, bool):
            what = f"{key}.enabled is {type(enabled).__name__}, DeepSpeed needs true or false"
            found.append((what, f"{key}.enabled: {enabled!r}", f'"{key}": {{"enabled": "auto"}}'))
        elif enabled not in ("auto", ours):
            given, remedy = f"{key}.enabled: {enabled}, {key}: {ours}", f'"{key}": {{"enabled": "auto"}}'
            found.append((f"{key} is set in two ways", given, remedy))
        if enabled is True:
            on.append(key)
    if len(on) == 2:
        what = "bf16 and fp16 are both on, and a model can have only one"
        found.append((what, "bf16.enabled: true, fp16.enabled: true", 'both "auto", and bf16 or fp16 as an argument'))
    return found


def _zero(config: Mapping[str, Any]) -> _Found:
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        return [("zero_optimization is no mapping", repr(zero), '"zero_optimization": {"stage": 2}')]
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        return [("the ZeRO stage is a number from 0 to 3", f"zero_optimization.stage: {stage!r}", '"stage": 2')]
    found = []
    for key, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = zero.get(key, {}).get("device", "none") if isinstance(zero.get(key, {}), Mapping) else zero[key]
        if device not in ("none", None) and stage < least:
            what = f"{key} needs ZeRO stage {least}; below it nothing is moved off the device"
            given = f"zero_optimization.stage: {stage}, {key}.device: {device}"
            found.append((what, given, f'"stage": {least}, or no {key}'))
    return found


def _misspelt(config: Mapping[str, Any]) -> _Found:
    found = []
    for key in config:
        near = difflib.get_close_matches(key, _DECISIVE, n=1, cutoff=0.85)
        if near and key not in _DECISIVE:
            what = "DeepSpeed knows no such key and passes over it without a word"
            found.append((what, f"{key}: {config[key]}", f"did you mean {near[0]}?"))
    return found
