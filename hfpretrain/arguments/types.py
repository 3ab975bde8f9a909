"""What the words of a command line mean where a plain number or text is not enough."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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


CONVERTERS: dict[str, Callable[[str], Any]] = {
    "batch_tokens": token_count,
    "total_tokens": token_count,
    "config_overrides": key_values,
    "mup_base_config": key_values,
    "mup_overrides": key_values,
}
