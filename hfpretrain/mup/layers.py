"""A configuration of another depth: the number of layers, and with it every list that has an entry per layer.

Which lists these are cannot be known from a configuration alone; the models that are built from it are therefore
compared, see `hfpretrain.mup.depth`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from hfpretrain.errors import ConfigError, Problem
from hfpretrain.mup.rules import Place
from hfpretrain.mup.width import text_part

WIDTH_ONLY = "leave base_depth out: width only"
_OTHER_LISTS = re.compile(r"token_id|architectures|section|keys_to_ignore")
_LAYER_INDICES = re.compile(r"layer_ids$|idxs$|moe_layers$|mlp_only_layers$|layer_indices$")


def at_both_depths(
    config: PreTrainedConfig, base: PreTrainedConfig, base_depth: int | None, overrides: Mapping[str, Place] | None
) -> tuple[PreTrainedConfig, PreTrainedConfig | None]:
    """(the base width at the run's depth, and at the base depth if that is another one).

    Args:
        base: the base model's widths, at its own depth or at that of `config`.
        overrides: of places in residual branches, which need a base depth.

    Raises:
        ConfigError: a base depth below 1, or given twice; overrides without one; what `set_depth` refuses.
    """
    if base_depth is None:
        if overrides:
            what, remedy = "depth_overrides are about the base depth, and none is given", "give base_depth too"
            raise ConfigError([Problem(what, str(dict(overrides)), "muP arguments", remedy)])
        return base, None  # another depth of base_config shows in its parameters
    if base_depth < 1:
        what, remedy = "the base depth is no depth", "a whole number above 0"
        raise ConfigError([Problem(what, str(base_depth), "base_depth", remedy)])
    own, given = layer_count(config), layer_count(base)
    if given not in (own, base_depth):
        what = "the base model's depth is given twice, and the two differ"
        remedy = "the same number of layers in base_config and base_depth"
        raise ConfigError([Problem(what, f"{given} and {base_depth}", "muP arguments", remedy)])
    if base_depth == own:
        return base, None
    return (with_layers_of(base, config), base) if given == base_depth else (base, set_depth(base, base_depth))


def layer_count(config: PreTrainedConfig) -> int:
    """Layers of the (text) model, by which its depth is named.

    Raises:
        ConfigError: an encoder-decoder; a configuration that does not name it.
    """
    if config.is_encoder_decoder:
        what = "an encoder and a decoder have a residual stream each, and the rule for depth is about one"
        raise ConfigError([Problem(what, config.model_type, "base depth", WIDTH_ONLY)])
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(depth, int):
        what = f"{type(config).__name__} has no num_hidden_layers, by which a base depth could be named"
        raise ConfigError([Problem(what, f"num_hidden_layers={depth}", "base depth", WIDTH_ONLY)])
    return depth


def set_depth(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    """`config` with `depth` layers, a new object; lists with an entry per layer are cut, or repeated from the start.

    Raises:
        ConfigError: what `layer_count` refuses; the architecture refuses that depth, or makes another one of it.
    """
    own, settings = layer_count(config), config.to_dict()
    part = text_part(config)
    text = settings if part is None else settings[part]
    for name, value in text.items():
        if _LAYER_INDICES.search(name) and isinstance(value, list):
            repeated = [index + start for start in range(0, depth, own) for index in value]
            text[name] = [index for index in repeated if index < depth]
    for name in _per_layer(config, text):
        text[name] = (text[name] * -(-depth // own))[:depth]
    text |= {key: depth for key in [_depth_key(config)] if key in text}  # else it follows from such a list
    remedy = "name the base model's settings yourself: base_config with that depth"
    try:
        result = type(config).from_dict(settings)
    except Exception as error:  # each architecture has its own way to say that its sizes do not fit
        what = f"{type(config).__name__} refuses to have {depth} layers: {' '.join(str(error).split())[:200]}"
        raise ConfigError([Problem(what, f"base_depth={depth}", "base depth", remedy)]) from error
    if layer_count(result) != depth:
        what = f"{type(config).__name__} was to have {depth} layers and has {layer_count(result)}"
        raise ConfigError([Problem(what, f"base_depth={depth}", "base depth", remedy)])
    return result


def with_layers_of(base: PreTrainedConfig, config: PreTrainedConfig) -> PreTrainedConfig:
    """`base` with the number and the kinds of layers of `config`, a new object."""
    part = text_part(config)
    settings, theirs = base.to_dict(), config.to_dict()
    text, text_theirs = (settings, theirs) if part is None else (settings[part], theirs[part])
    text |= {
        name: text_theirs[name]
        for name in [_depth_key(config), *_per_layer(config, text_theirs)]
        if name in text_theirs
    }
    return type(base).from_dict(settings)


def _depth_key(config: PreTrainedConfig) -> str:
    return str(config.get_text_config().attribute_map.get("num_hidden_layers", "num_hidden_layers"))


def _per_layer(config: PreTrainedConfig, text: Mapping[str, Any]) -> list[str]:
    """Names of the lists with an entry per layer: as long as there are layers, by default as well."""
    own = layer_count(config)
    try:
        default_config = type(config.get_text_config())()
        default, default_depth = default_config.to_dict(), default_config.num_hidden_layers
    except Exception:  # some have no default that holds together
        default, default_depth = {}, None

    def fits(value: Any, depth: Any) -> bool:
        return isinstance(value, list | tuple | str) and len(value) == depth

    return [
        name
        for name, value in text.items()
        if fits(value, own)
        and not _OTHER_LISTS.search(name)
        and (not isinstance(value, str) or "pattern" in name)
        and (not default.get(name) or fits(default[name], default_depth))
    ]
