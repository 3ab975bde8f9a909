"""A configuration of another width: everything that is a width changes together, head dimension and low ranks stay.

Nothing but its name tells a number of heads from a number of experts, so widths are known by the names of their
attributes. The result is therefore checked by what is built from it, see `hfpretrain.mup.infer`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import gcd
from typing import Any

from transformers import PreTrainedConfig

from hfpretrain.errors import ConfigError, Problem

_HIDDEN = (
    r"(hidden|embedding|word_embedding|input_embedding|output_embedding|attention_hidden)_size|d_model|n_embd|dim|"
    r"emb_dim|embedding_dim|embed_dim|word_embed_proj_dim|lru_width|mamba_d_ssm"
)
_FEED_FORWARD = (
    r"(\w+_)?(intermediate|ffn_hidden|feed_forward)_size(_mlp)?|(\w+_)?ffn_dim|dff|d_ff|dim_ff|d_inner|n_inner|"
    r"block_ff_dim"
)
_HEADS = (
    r"((encoder|decoder|num|swa_num|num_encoder|num_decoder)_)?attention_heads|n_heads?|num_heads|num_query_groups|"
    r"linear_num_(heads|key_heads|value_heads)|mamba_(n|num)_heads|n_mamba_heads"
)
_KEY_VALUE_HEADS = r"(num|n|swa_num|num_global)_(key_value|kv)_heads"  # one head for all queries stays one
_STEP_RANKS = r"time_step_rank|mamba_dt_rank"  # "auto" means ceil(width / 16); a rank of any other size stays
_WIDTHS = re.compile(rf"({_HIDDEN}|{_FEED_FORWARD}|{_HEADS}|{_KEY_VALUE_HEADS})")


_DEPTH = re.compile(r"(\w+_)?(n_layers?|layers|depths?|num_blocks)")


def hidden_size(config: PreTrainedConfig) -> int:
    """The width of the residual stream, by which a model's width is named.

    Raises:
        ConfigError: the architecture has no one width.
    """
    size = getattr(config.get_text_config(), "hidden_size", None)
    if not isinstance(size, int):
        what = f"{type(config).__name__} has no hidden_size, the one width that a model's others follow"
        raise ConfigError(
            [Problem(what, str(size), "configuration", "an architecture of one width, or train without muP")]
        )
    return size


def scale_width(config: PreTrainedConfig, ratio: Fraction | int) -> PreTrainedConfig:
    """`config` with every width multiplied by `ratio`, a new object; of a composite model, the text part's.

    Raises:
        ConfigError: a width would not be a whole number (the message says which base widths work), or the
            architecture refuses the sizes.
    """
    settings = config.to_dict()
    part = text_part(config)
    own = hidden_size(config)
    places = _places(config if part is None else getattr(config, part), settings if part is None else settings[part])
    found = [(place, name, value) for place in places for name, value in place.items() if _is_width(name, value, own)]
    widths = {name: value for _, name, value in found}
    broken = {name: value for _, name, value in found if any((v * ratio) % 1 for v in _numbers(value))}
    if broken:
        raise ConfigError([_not_whole(own, ratio, broken, widths)])
    for place, name, value in found:
        place[name] = _scaled(value, ratio)
    try:
        return type(config).from_dict(settings)
    except Exception as error:  # each architecture has its own way to say that its sizes do not fit
        what = f"{type(config).__name__} refuses to be scaled to width {own * ratio}: {error}"
        given = ", ".join(f"{name}={place[name]}" for place, name, _ in found)
        raise ConfigError([Problem(what, given, "base width", "name the base sizes yourself: base_config")]) from error


def text_part(config: PreTrainedConfig) -> str | None:
    """The attribute that holds the text configuration of a composite model; None where the model is text only.

    `get_text_config` of an encoder-decoder is a detached copy: then the configuration itself has the sizes.
    """
    text = config.get_text_config()
    return next((name for name, value in vars(config).items() if value is text and value is not config), None)


def _places(part: PreTrainedConfig, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings that hold widths of this model: its own, and those of its parts.

    A part with a depth of its own is another model beside the text's (an image encoder): its widths are its own.
    """
    places = [settings]
    for name, value in vars(part).items():
        if isinstance(value, PreTrainedConfig) and not any(_DEPTH.fullmatch(key) for key in dir(value)):
            places += _places(value, settings[name])
    return places


def _is_width(name: str, value: Any, own: int) -> bool:
    if not _numbers(value):
        return False
    if re.fullmatch(_STEP_RANKS, name):
        return bool(value == -(-own // 16))
    if re.fullmatch(_KEY_VALUE_HEADS, name) and _numbers(value) == [1]:
        return False
    return _WIDTHS.fullmatch(name) is not None


def _numbers(value: Any) -> list[int]:
    """The positive whole numbers of an attribute: one, or one per layer."""
    values = value if isinstance(value, list | tuple) else [value]
    whole = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0]
    return whole if len(whole) == len(values) else []


def _scaled(value: Any, ratio: Fraction | int) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(int(entry * ratio) for entry in value)
    return int(value * ratio)


def _not_whole(own: int, ratio: Fraction | int, broken: dict[str, Any], widths: dict[str, Any]) -> Problem:
    common = gcd(own, *(number for value in widths.values() for number in _numbers(value)))
    what = f"at width {own * ratio} these would be no whole numbers"
    given = ", ".join(f"{name}={value} * {ratio}" for name, value in broken.items())
    remedy = f"a base width that is a multiple of {own // common}; or name the base sizes: base_config"
    if common == 1:
        remedy = f"name the base sizes: base_config (its widths {widths} have no common divisor)"
    return Problem(what, given, "base width", remedy)
