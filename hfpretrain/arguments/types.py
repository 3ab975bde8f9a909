"""What the words of a command line mean where a plain number or text is not enough."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_TOKEN_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_TOKEN_PATTERN = re.compile(r"([+-]?[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(e[+-]?[0-9]+)?\s*([a-z]{0,2})", re.IGNORECASE)


def token_count(text: str) -> int:
    """A number of tokens: 250_000, 2.5e5, 0.25M (10^6), 1B (10^9), 256Ki (2^10).

    Raises:
        ValueError: not a number, an unknown suffix, or not a whole number of tokens.
    """
    match = _TOKEN_PATTERN.fullmatch(text.strip())
    if match is None or match[3].lower() not in _TOKEN_UNITS:
        raise ValueError("expected a number of tokens such as 250_000, 2.5e5, 0.25M, 1B or 256Ki")
    # Exact: the decimal is shifted as an integer, because 0.3 * 10**9 in floating point is not whole.
    whole, _, decimals = match[1].replace("_", "").partition(".")
    exponent = int((match[2] or "e0")[1:]) - len(decimals)
    scaled = int((whole + decimals) or "0") * _TOKEN_UNITS[match[3].lower()]
    count: int
    count, rest = (scaled * 10**exponent, 0) if exponent >= 0 else divmod(scaled, 10**-exponent)
    if rest:
        raise ValueError("expected a whole number of tokens")
    return count


def key_values(text: str) -> dict[str, Any]:
    """`a=1,b=[2, 3],c=silu` or a JSON object -> mapping. Values are JSON where they parse as it, else plain text.

    Raises:
        ValueError: neither form, or a key without a value.
    """
    if text.lstrip().startswith("{"):
        return dict(json.loads(text))
    result: dict[str, Any] = {}
    for piece in re.split(r",(?=\s*[A-Za-z_][A-Za-z_0-9.]*=)", text):
        key, equals, value = piece.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError("expected key=value,key=value or a JSON object")
        try:
            result[key.strip()] = json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
        except json.JSONDecodeError:
            result[key.strip()] = value.strip()
    return result


RampMarks = tuple[tuple[int, int], ...]
_RAMP_FORMS = (
    "expected tokens seen:batch tokens,... such as 0:0.25M,200M:0.5M,1B:1M, or noise_scale:0.25M (the first batch), "
    "where factor:2 and steps:200 may follow"
)


@dataclass(frozen=True)
class NoiseScaleRamp:
    """`noise_scale:START,factor:K,steps:N`: the batch grows when the noise scale asks for it.

    Attributes:
        start_tokens: batch of the first step, in tokens.
        factor: the batch grows where the noise scale is above this many batches. 2: twice the batch is still no more
            than the noise scale.
        steps: optimizer steps for which it must have been so. 200 is where the averages of a noise scale of many
            batches come to rest.
    """

    start_tokens: int
    factor: float = 2.0
    steps: int = 200


def batch_ramp(text: str) -> RampMarks | NoiseScaleRamp:
    """`0:0.25M,200M:0.5M` -> ((tokens seen, batch tokens), ...); `noise_scale:0.25M,factor:2,steps:200` -> its rule.

    Raises:
        ValueError: neither form, or a number that cannot be; whether the stages fit together is not judged here.
    """
    pairs = [piece.split(":") for piece in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(_RAMP_FORMS)
    names = [name.strip() for name, _ in pairs]
    if names[0] != "noise_scale":
        return tuple((token_count(tokens), token_count(batch)) for tokens, batch in pairs)
    given = dict(zip(names, (value for _, value in pairs), strict=True))
    if len(given) < len(names) or not given.keys() <= {"noise_scale", "factor", "steps"}:
        raise ValueError(_RAMP_FORMS)
    rule = NoiseScaleRamp(token_count(given["noise_scale"]))
    rule = NoiseScaleRamp(
        rule.start_tokens, float(given.get("factor", rule.factor)), token_count(given.get("steps", str(rule.steps)))
    )
    if rule.start_tokens < 1 or not 0 < rule.factor < float("inf") or rule.steps < 1:
        raise ValueError("expected a first batch and steps of at least 1 and a factor above 0")
    return rule


def batch_ramp_text(text: str) -> str:
    """The text itself, once `batch_ramp` can read it: what is configured stays what was written."""
    batch_ramp(text)
    return text.strip()


def count_points(text: str) -> tuple[tuple[int, int], ...]:
    """25M:90k,100M:180k -> ((25_000_000, 90_000), ...): parameters and tokens.

    Raises:
        ValueError: another form, or a number that is not above 0.
    """
    pairs = [pair.split(":") for pair in text.split(",")]
    if any(len(pair) != 2 or min(map(token_count, pair)) < 1 for pair in pairs):
        raise ValueError("expected parameters:tokens,parameters:tokens, all above 0")
    return tuple((token_count(x), token_count(y)) for x, y in pairs)


def count_points_text(text: str) -> str:
    """The text itself, once `count_points` can read it."""
    count_points(text)
    return text.strip()


CONVERTERS: dict[str, Callable[[str], Any]] = {
    "batch_tokens": token_count,
    "total_tokens": token_count,
    "batch_ramp": batch_ramp_text,
    "params": token_count,
    "inference_tokens": token_count,
    "noise_scale_points": count_points_text,
    "config_overrides": key_values,
    "mup_base_config": key_values,
    "mup_overrides": key_values,
    "mup_depth_overrides": key_values,
}
