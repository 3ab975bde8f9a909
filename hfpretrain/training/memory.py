"""What one rank of a launch may use of its device, and what it is estimated to take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, cast

import psutil
import torch
from transformers import PreTrainedConfig, TrainingArguments

from hfpretrain.launch_checks import deepspeed_config
from hfpretrain.memory_estimate import estimate_memory
from hfpretrain.planning.memory import MemoryEstimate
from hfpretrain.planning.placement import Placement


@dataclass(frozen=True)
class Memory:
    """What one rank may use.

    Attributes:
        kind: cuda or cpu.
        total_bytes: of its GPU, or its share of the machine's memory.
        free_bytes: of that, what nobody uses now.
    """

    kind: str
    total_bytes: int
    free_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> Memory:
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            return cls("cuda", total, free + torch.cuda.memory_reserved(device))
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        memory = psutil.virtual_memory()
        return cls("cpu", memory.total // ranks, memory.available // ranks)


def placement_of(config: PreTrainedConfig, args: TrainingArguments) -> Placement:
    """Where this launch puts weights, gradients and optimizer state."""
    deepspeed, text = deepspeed_config(args), cast(Any, config.get_text_config())
    width = getattr(text, "hidden_size", None)
    dtype = _dtype(args, deepspeed)
    return Placement.from_deepspeed(deepspeed, world_size=args.world_size, dtype=dtype, hidden_size=width)


def estimate_of_run(
    config: PreTrainedConfig,
    args: TrainingArguments,
    *,
    sequence_length: int,
    rows: int,
    attn_implementation: str | None,
) -> MemoryEstimate:
    """What one rank of this launch takes."""
    return estimate_memory(
        config,
        placement=placement_of(config, args),
        sequence_length=sequence_length,
        rows=rows,
        optimizer=str(getattr(args.optim, "value", args.optim)),
        gradient_checkpointing=bool(args.gradient_checkpointing),
        attn_implementation=attn_implementation,
        device="cuda" if args.device.type == "cuda" else "cpu",
    )


def _dtype(args: TrainingArguments, deepspeed: Any) -> str:
    config = deepspeed or {}
    for flag, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        if getattr(args, flag) or config.get(flag, {}).get("enabled") is True:
            return name
    return "float32"
