"""Configuration: three dataclasses (`fields`), and `parse`, which fills them from YAML files and the command line."""

from hfpretrain.arguments.fields import DataArguments, ModelArguments, PretrainArguments, deepspeed_requested
from hfpretrain.arguments.parsing import Parsed, parse, parse_leniently

__all__ = [
    "DataArguments",
    "ModelArguments",
    "Parsed",
    "PretrainArguments",
    "deepspeed_requested",
    "parse",
    "parse_leniently",
]
