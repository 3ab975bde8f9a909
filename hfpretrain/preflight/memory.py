"""Does a micro-batch fit, by the estimate of `hfpretrain.memory_estimate`, before anything is allocated?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, cast

import psutil
import torch
from transformers import PreTrainedConfig, TrainingArguments

from hfpretrain.arguments import DataArguments, ModelArguments, PretrainArguments
from hfpretrain.errors import Problem
from hfpretrain.launch_checks import deepspeed_config
from hfpretrain.memory_estimate import estimate_memory
from hfpretrain.planning.memory import MemoryEstimate
from hfpretrain.planning.placement import Placement
from hfpretrain.verdicts import Verdicts


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


def judge_memory(
    verdicts: Verdicts,
    config: PreTrainedConfig,
    model_args: ModelArguments,
    data_args: DataArguments,
    args: PretrainArguments,
    *,
    memory: Memory | None = None,
) -> None:
    """More than the device has is a problem; more than is free of it now, or all but all of it, a note.

    Args:
        memory: default is that of this rank's device.
    """
    memory = memory or Memory.of(args.device)
    if placement_of(config, args).problems():
        return  # which `launch` says in its own words
    length, rows, attention = (
        data_args.sequence_length,
        args.per_device_train_batch_size,
        model_args.attn_implementation,
    )
    estimate = estimate_of_run(config, args, sequence_length=length, rows=rows, attn_implementation=attention)
    peak, found = estimate.peak_bytes, f"{_gib(estimate.peak_bytes)} GiB a rank at the peak by estimate"
    has = f"{_gib(memory.total_bytes)} GiB ({_gib(memory.free_bytes)} free)"
    if estimate.static_bytes > memory.total_bytes:
        what = f"weights and optimizer state alone are {_gib(estimate.static_bytes)} GiB a rank"
        remedy = "more ranks at ZeRO 3 (accelerate_configs/zero3.yaml), offload (ds_configs/), or a smaller model"
        stage = "no DeepSpeed" if estimate.placement.zero_stage is None else f"ZeRO {estimate.placement.zero_stage}"
        given = f"{stage}, {args.world_size} rank(s), {has}"
        verdicts.problem("memory", [Problem(what, given, "config_overrides", remedy)])
    elif peak > memory.total_bytes:
        verdicts.problem("memory", [estimate.fits(memory.total_bytes).problem("per_device_train_batch_size")])
    elif peak > memory.free_bytes:
        verdicts.note(
            "memory", f"{found} of {has}: others use the rest now", remedy="free it, or a smaller micro-batch"
        )
    elif peak > 0.9 * memory.total_bytes:
        verdicts.note("memory", f"{found} of {has}: what is not counted may not fit", remedy="a smaller micro-batch")
    else:
        verdicts.ok("memory", f"{found} of {has}: weights and optimizer state {_gib(estimate.static_bytes)}")
    host = estimate.host_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if host > psutil.virtual_memory().total:
        what = f"{_gib(host)} GiB are offloaded to the memory of this machine, which has less"
        verdicts.note("memory", what, remedy="more ranks, or no offload")


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


def _gib(count: float) -> str:
    return f"{count / 2**30:,.2f}"
