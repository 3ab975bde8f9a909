"""From what the user named to a model: configuration first, then weights."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.initialisation import initialise


def load_config(
    *,
    model_type: str | None = None,
    config_name: str | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    model_name_or_path: str | None = None,
    vocab_size: int | None = None,
    tokenizer: Any | None = None,
) -> PreTrainedConfig:
    """The architecture of the run, from exactly one of three sources.

    Args:
        model_type: an architecture transformers knows (`llama`, `gpt2`, ...), with its default sizes. Its vocabulary is
            `vocab_size`, else the size of the tokenizer.
        config_name: a configuration by hub name, folder or .json file; its vocabulary is kept.
        model_name_or_path: a model whose weights are continued; its configuration is read.
        config_overrides: values that replace the configuration's; sizes derived from them follow. They win over
            everything, the vocabulary included.
        tokenizer: if given, its BOS and EOS ids are put into the configuration. Its PAD id is, only where it is a token
            of its own: an embedding at `padding_idx` is zero and never trained, which must not happen to EOS.

    Raises ConfigError: none or several sources; an unknown model type; an override the configuration does not have.
    """
    overrides = dict(config_overrides or {})
    sources = {"model_type": model_type, "config_name": config_name, "model_name_or_path": model_name_or_path}
    given = {name: value for name, value in sources.items() if value}
    if len(given) != 1:
        what = "exactly one of model_type, config_name and model_name_or_path says what is trained"
        raise ConfigError([Problem(what, str(given or "none"), "model arguments", "give one of the three")])
    base: dict[str, Any] = {}
    if model_type:
        config_class = _config_class(model_type)
        size = vocab_size if vocab_size is not None else (len(tokenizer) if tokenizer is not None else None)
        if size is not None:
            overrides.setdefault("vocab_size", size)
    else:
        loaded = AutoConfig.from_pretrained(config_name or model_name_or_path or "")
        config_class, base = type(loaded), loaded.to_dict()
        if config_name:
            base.pop("mup", None)  # what was done to other weights
    known = config_class()
    refuse(_unknown_overrides(overrides, known))
    tokens = _special_tokens(tokenizer, known) if tokenizer is not None else {}
    try:
        config = config_class(**_merged(base, tokens | overrides, known))
    except (ValueError, TypeError, StrictDataclassError) as error:
        what = f"{config_class.__name__} refuses these values: {error.__cause__ or error}"
        remedy = "change the override, or override the value it contradicts as well"
        raise ConfigError([Problem(what, str(overrides), "config_overrides", remedy)]) from error
    config.use_cache = False  # with a cache transformers keeps no documents apart, and training has no use for one
    return config


def build_model(
    config: PreTrainedConfig, *, seed: int, dtype: torch.dtype | None = None, attn_implementation: str | None = None
) -> PreTrainedModel:
    """A model with fresh weights that depend on (seed, module name) only: see `hfpretrain.initialisation`.

    Under ZeRO-3 (a live `HfDeepSpeedConfig` with stage 3, which TrainingArguments with `deepspeed` sets up) the
    parameters are partitioned as they are made; every rank must call this. `dtype` is that of the stored weights,
    float32 unless given: mixed precision keeps its master weights in float32, whatever dtype the configuration names.
    """
    kwargs: dict[str, Any] = {"dtype": dtype or torch.float32}
    if attn_implementation is not None:
        kwargs["attn_implementation"] = attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # for constructors that draw outside of _init_weights
        with ExitStack() as stack:
            stack.enter_context(no_init_weights())
            _enter_zero3(stack)
            model = AutoModelForCausalLM.from_config(config, **kwargs)
        initialise(model, seed=seed)
    model.tie_weights()
    model.config.use_cache = False
    return model


def load_model(
    model_name_or_path: str | Path,
    *,
    config: PreTrainedConfig,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """A model with stored weights, to train on. Weights that the checkpoint lacks are an error, not drawn at random."""
    kwargs: dict[str, Any] = {"config": config, "dtype": dtype or torch.float32}
    if attn_implementation is not None:
        kwargs["attn_implementation"] = attn_implementation
    loaded: Any = AutoModelForCausalLM.from_pretrained(model_name_or_path, output_loading_info=True, **kwargs)
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    if missing := sorted(info["missing_keys"]):
        what = f"the checkpoint lacks {len(missing)} weights of {type(model).__name__}"
        remedy = "a checkpoint of this architecture, or config_name to start from fresh weights"
        raise ConfigError([Problem(what, ", ".join(missing[:5]), str(model_name_or_path), remedy)])
    model.config.use_cache = False
    return model


def true_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of the whole parameter; ZeRO-3 leaves (0,) in `shape` and the truth in `ds_shape`."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def name_template(name: str) -> str:
    """A parameter's or module's name with its layer numbers starred out."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def parameter_count(model: nn.Module) -> int:
    """Parameters of the whole model: full sizes under ZeRO-3, tied ones counted once."""
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in model.parameters())


def _enter_zero3(stack: ExitStack) -> None:
    """Partition parameters as they are created, if ZeRO-3 is on (left to from_config, they would be drawn twice)."""
    from transformers.integrations.deepspeed import (
        deepspeed_config,
        is_deepspeed_zero3_enabled,
        prevent_arange_dtype_change,
    )

    if not is_deepspeed_zero3_enabled():
        return
    import deepspeed
    from transformers.modeling_utils import set_zero3_state

    stack.enter_context(prevent_arange_dtype_change())  # before zero.Init: rotary tables stay in fp32
    stack.enter_context(deepspeed.zero.Init(config_dict_or_path=deepspeed_config()))
    stack.enter_context(set_zero3_state())


def _config_class(model_type: str) -> type[PreTrainedConfig]:
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=3)
    remedy = f"did you mean {' or '.join(near)}?" if near else "a model type of the installed transformers"
    raise ConfigError([Problem("unknown model type", model_type, "model_type", remedy)])


def _unknown_overrides(overrides: Mapping[str, Any], config: PreTrainedConfig) -> list[Problem]:
    known = {key for key in config.to_dict() if not key.startswith("_")} | set(config.attribute_map)
    problems = []
    for key, value in overrides.items():
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.5)
            remedy = f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(sorted(known))}"
            what = f"{type(config).__name__} has no `{key}`"
            problems.append(Problem(what, f"{key}={value}", "config_overrides", remedy))
    return problems


def _special_tokens(tokenizer: Any, config: PreTrainedConfig) -> dict[str, int | None]:
    start, end, padding = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    ids = {
        "bos_token_id": start if start is not None else end,
        "eos_token_id": end,
        "pad_token_id": padding if padding not in (start, end) else None,
    }
    return {key: value for key, value in ids.items() if hasattr(config, key)}


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """`changes` over `base`, a name and its alias (`n_embd`, `hidden_size`) treated as one."""
    own_name = dict(config.attribute_map)
    merged = {own_name.get(key, key): value for key, value in base.items()}
    merged.update({own_name.get(key, key): value for key, value in changes.items()})
    return merged
