"""Is what runs what was asked for? The launcher, the DeepSpeed configuration, and the wrapped model.

accelerate starts one process where two were asked for, and runs DDP where DeepSpeed was asked for, without a word, when
its configuration does not suit the machine. Training would go on, only slower or with another memory plan.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hfpretrain.errors import Problem

_SETTLING_SECONDS = 0.2  # a thread needs microseconds of it; the rest is for a machine that is busy
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def check_launch(args: Any, *, env: Mapping[str, str] | None = None) -> list[Problem]:
    """How the processes were started.

    Args:
        args: the training arguments; its `n_gpu`, `bf16` and `fp16` are read.
        env: the environment; default is this process's.
    """
    env = os.environ if env is None else env
    problems = []
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in env
    mpi = any(name in env for name in _MPI_SIZES)
    if by_accelerate and "MASTER_ADDR" in env and "WORLD_SIZE" not in env and not mpi:
        # Its launcher for one process sets MASTER_ADDR only when num_processes or num_machines is above 1.
        what = "several processes were asked for, but accelerate started one (as with MULTI_CPU or NO)"
        remedy = "accelerate_configs/cpu_ddp.yaml for CPU processes, ddp.yaml for GPUs, or --num_processes 1"
        problems.append(Problem(what, "MASTER_ADDR is set, WORLD_SIZE is not", "accelerate launch", remedy))
    problems += _check_cpu_deepspeed(args, env)
    if args.n_gpu > 1:
        what = "one process sees several GPUs and would run them as nn.DataParallel, which is slow and not token-exact"
        remedy = "accelerate launch --config_file accelerate_configs/ddp.yaml (or CUDA_VISIBLE_DEVICES=0 for one GPU)"
        problems.append(Problem(what, f"{args.n_gpu} GPUs", "the machine", remedy))
    precision = env.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    asked = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    if precision not in ("no", asked):
        what = "accelerate's configuration and the arguments name different precisions"
        given = f"mixed_precision: {precision} there, {asked} here"
        problems.append(
            Problem(what, given, "accelerate launch", "leave mixed_precision out of it and set bf16 or fp16 here")
        )
    accumulation = env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1").lower()
    if accumulation not in ("1", "auto"):
        what = "accelerate's configuration sets gradient accumulation, which follows from batch_tokens here"
        remedy = "leave gradient_accumulation_steps out of it"
        problems.append(Problem(what, accumulation, "accelerate launch", remedy))
    return problems + _check_plugins(args, env)


def _check_plugins(args: Any, env: Mapping[str, str]) -> list[Problem]:
    """Ways to share a model that accelerate's configuration can turn on and that this trainer's data does not know."""
    problems = []
    for name, what in (("FSDP", "FSDP"), ("MEGATRON_LM", "Megatron-LM")):
        if env.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            what = f"accelerate's configuration asks for {what}; sharding is DeepSpeed's here"
            remedy = "accelerate_configs/zero1.yaml, zero2.yaml or zero3.yaml"
            problems.append(Problem(what, f"ACCELERATE_USE_{name}=true", "accelerate launch", remedy))
    sizes = {f"{way}_size": env.get(f"PARALLELISM_CONFIG_{way.upper()}_SIZE", "1") for way in ("tp", "cp", "sp")}
    split = ", ".join(f"{name}: {size}" for name, size in sizes.items() if size != "1")
    if split:
        what = "accelerate's configuration lets ranks share rows, but every rank is given rows of its own here"
        remedy = "leave the parallelism_config_* keys out of it; more ranks are more rows at once"
        problems.append(Problem(what, split, "accelerate launch", remedy))
    compiler = env.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler.lower() != "no" and not getattr(args, "torch_compile", False):
        what = "accelerate's configuration compiles the model, and the arguments do not say so"
        remedy = "torch_compile: true here, or no dynamo_backend there"
        problems.append(Problem(what, f"dynamo_backend: {compiler}", "accelerate launch", remedy))
    return problems


def _check_cpu_deepspeed(args: Any, env: Mapping[str, str]) -> list[Problem]:
    if getattr(args, "deepspeed_plugin", None) is None:
        return []
    if env.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes"):
        what = "with ACCELERATE_USE_CPU accelerate runs plain DDP in place of DeepSpeed, without a word"
        return [Problem(what, "ACCELERATE_USE_CPU is set", "environment", "unset it; DS_ACCELERATOR=cpu is enough")]
    if args.use_cpu and torch.accelerator.is_available() and env.get("DS_ACCELERATOR") != "cpu":
        what = "use_cpu keeps the model on the CPU while DeepSpeed works on the accelerator"
        return [Problem(what, "use_cpu: true", "arguments", "leave use_cpu out, or set DS_ACCELERATOR=cpu too")]
    return []


def deepspeed_config(args: Any) -> dict[str, Any] | None:
    """The DeepSpeed configuration that is in force, from `--deepspeed` or accelerate's; None without DeepSpeed."""
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is None:
        return None
    config: dict[str, Any] = plugin.hf_ds_config.config
    return config


def deepspeed_source(args: Any) -> str:
    """The file that the DeepSpeed configuration comes from, as far as it is known."""
    if isinstance(getattr(args, "deepspeed", None), str):
        return str(args.deepspeed)
    return os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "DeepSpeed configuration")


def check_agreement(**facts: Any) -> list[Problem]:
    """What every process must have found alike, such as the checkpoint to continue from and the data's fingerprint.

    They differ where machines do not see the same files or were started with other arguments; training would then hang
    or go on from different weights. Collective: every rank calls it with the same names.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    found: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, {name: str(value) for name, value in facts.items()})
    problems = []
    for name in facts:
        values = [rank[name] for rank in found]
        if len(set(values)) > 1:
            given = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            remedy = "start every machine with the same arguments, on a file system that all of them share"
            problems.append(Problem(f"the processes disagree about {name}", given, "launcher", remedy))
    return problems


def verify_engine(
    accelerator: Any, model_wrapped: nn.Module, args: Any, *, env: Mapping[str, str] | None = None
) -> list[Problem]:
    """Judge the wrapped model itself: its class, its ZeRO stage, the number of processes.

    Args:
        accelerator: the Trainer's `accelerator` after `prepare`.
        model_wrapped: the Trainer's `model_wrapped` after `prepare`.
    """
    env = os.environ if env is None else env
    problems = []
    expected = int(env.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != expected:
        what = "the processes did not form one group"
        given = f"{expected} started, {accelerator.num_processes} in the group"
        remedy = "use one of accelerate_configs/; on CPUs the backend is gloo"
        problems.append(Problem(what, given, "launcher", remedy))
    config = deepspeed_config(args)
    if config is not None:
        return problems + _verify_deepspeed(model_wrapped, config, args)
    if expected > 1 and not isinstance(model_wrapped, DistributedDataParallel):
        what = "several processes run, but nothing averages their gradients"
        remedy = "on CPUs set use_cpu: true; otherwise use accelerate_configs/ddp.yaml"
        problems.append(Problem(what, type(model_wrapped).__name__, "wrapped model", remedy))
    if isinstance(model_wrapped, nn.DataParallel):
        what = "the model runs as nn.DataParallel, which is slow and not token-exact"
        problems.append(Problem(what, "DataParallel", "wrapped model", "accelerate_configs/ddp.yaml"))
    return problems


def _verify_deepspeed(engine: nn.Module, config: Mapping[str, Any], args: Any) -> list[Problem]:
    from deepspeed import DeepSpeedEngine

    if not isinstance(engine, DeepSpeedEngine):
        what = "DeepSpeed was asked for, but something else wraps the model"
        remedy = "start with accelerate_configs/zero*.yaml, leave use_cpu out (in them and here)"
        return [Problem(what, type(engine).__name__, "wrapped model", remedy)]
    problems = []
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if engine.zero_optimization_stage() != stage:
        what = "the engine runs another ZeRO stage than the configuration names"
        given = f"stage {engine.zero_optimization_stage()}, configured {stage}"
        problems.append(Problem(what, given, "wrapped model", "check which DeepSpeed configuration is read"))
    if engine.gradient_accumulation_steps() != 1:
        what = "the engine accumulates by itself"
        given = str(engine.gradient_accumulation_steps())
        problems.append(Problem(what, given, "wrapped model", '"gradient_accumulation_steps": "auto"'))
    if engine.gradient_clipping() != args.max_grad_norm:
        what = "the engine clips at another norm than max_grad_norm"
        given = f"{engine.gradient_clipping()}, max_grad_norm: {args.max_grad_norm}"
        problems.append(Problem(what, given, "wrapped model", '"gradient_clipping": "auto"'))
    return problems


def describe_engine(model_wrapped: nn.Module, args: Any) -> str:
    """What wraps the model, in one line."""
    name = type(model_wrapped).__name__
    if deepspeed_config(args) is None:
        return f"{name} on {args.world_size} process(es)"
    engine: Any = model_wrapped
    return f"{name} at ZeRO {engine.zero_optimization_stage()} on {args.world_size} process(es)"


def verify_gradient_signals(accelerator: Any, args: Any) -> list[Problem]:
    """Can the noise scale and spikes be read off gradients here? Both need the norm of the gradient of a whole step,
    and every rank must have samples of its own."""
    problems = []
    config = deepspeed_config(args) or {}
    if config.get("zero_optimization", {}).get("compute_grad_norm", True) is False:
        what = "log_noise_scale and skip_spikes need the gradient norm, which this configuration does not compute"
        given = "zero_optimization.compute_grad_norm: false"
        problems.append(Problem(what, given, "DeepSpeed configuration", "remove compute_grad_norm"))
    parallel = accelerator.parallelism_config
    sizes = {name: getattr(parallel, name, 1) for name in ("tp_size", "cp_size", "sp_size")}
    sizes["tensor_parallel.autotp_size"] = config.get("tensor_parallel", {}).get("autotp_size") or 1
    sizes["sequence_parallel_size"] = config.get("sequence_parallel_size", 1)
    split = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 1}
    if split:
        what = "ranks that share one sample are no independent micro-batches, and their norms are parts of one"
        given = ", ".join(f"{name}: {size}" for name, size in split.items())
        remedy = "log_noise_scale: 0 and skip_spikes: 0, or data parallelism only"
        problems.append(Problem(what, given, "accelerate or DeepSpeed configuration", remedy))
    return problems


def close_process_group() -> None:
    """Leave torch's process group, if there is one; the last thing that a program on several ranks does.

    Gloo's threads let go of the last collective's tensors only after it is reported done, and need the interpreter's
    lock for that. One that asks for the lock while the interpreter ends aborts the process (pytorch#179291), after its
    work was done: without the wait, 1 in 20 runs of two ranks here.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(_SETTLING_SECONDS)
