"""Does a micro-batch fit, by the estimate of `hfpretrain.memory_estimate`, before anything is allocated?"""

from __future__ import annotations

import os

import psutil
from transformers import PreTrainedConfig

from hfpretrain.arguments import DataArguments, ModelArguments, PretrainArguments
from hfpretrain.errors import Problem
from hfpretrain.training.memory import Memory, estimate_of_run, placement_of
from hfpretrain.verdicts import Verdicts


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


def _gib(count: float) -> str:
    return f"{count / 2**30:,.2f}"
