"""Configuration: three dataclasses (`fields`), and `parse`, which fills them from YAML files and the command line."""

from hfpretrain.arguments.fields import DataArguments, ModelArguments, PretrainArguments, deepspeed_requested, parse

__all__ = ["DataArguments", "ModelArguments", "PretrainArguments", "deepspeed_requested", "parse"]
