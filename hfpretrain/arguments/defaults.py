"""Defaults that follow from other fields, filled in once both files and flags are read."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from hfpretrain.arguments.types import NoiseScaleRamp, batch_ramp


def settle(values: SimpleNamespace, sources: Mapping[str, str]) -> None:
    """Fill them into `values`, the fields of all dataclasses; `sources` says which of them were given."""
    nothing_held_out = values.validation_fraction == 0 and not values.eval_data
    if nothing_held_out and sources["eval_strategy"] == "default":
        values.eval_strategy = "no"
    marks = batch_ramp(values.batch_ramp) if values.batch_ramp is not None else None
    if marks is not None and not isinstance(marks, NoiseScaleRamp) and sources["batch_tokens"] == "default":
        values.batch_tokens = marks[-1][1]
