"""One case of `memory.py`: train two steps on this rank and count every byte that torch's allocator hands out.

    python benchmarks/memory_case.py OUT.json '{"model": {"model_type": "llama", ...}, "zero_stage": 2, ...}' ...

Started by `memory.py` and by the tests, alone or under torch's launcher; one JSON file per rank, one entry per case.

What is counted on a CPU: torch's profiler reports each allocation and release of the CPU allocator with its size, those
inside kernels and of C++ (DDP's buckets) too. That is what `torch.cuda.max_memory_allocated` counts on a GPU. It does
not see memory that libraries take by themselves (gloo's and oneDNN's own buffers, the interpreter). The resident set
of the process would, but it also counts imports, misses pages that are allocated and never touched (DeepSpeed's bucket
buffers), and keeps what the C library does not give back.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from hfpretrain.attention import TORCH_VARLEN, register_torch_varlen
from hfpretrain.loss import FusedLoss
from hfpretrain.loss.sums import LogitTransform
from hfpretrain.loss.verify import Verdict
from hfpretrain.model import build_model, load_config
from hfpretrain.training.optimizer import parameter_groups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STEPS = 2  # the second starts with the optimizer's state in place, as all that follow


@dataclass
class Case:
    """What is run; a subset of `recipes/pretrain.py`'s arguments."""

    model: dict[str, Any]
    rows: int = 1
    sequence_length: int = 64
    micro_batches: int = 1
    zero_stage: int | None = None
    dtype: str = "float32"
    zero: dict[str, Any] = field(default_factory=dict)  # other keys of zero_optimization
    gradient_checkpointing: bool = False
    fused_loss: bool = True
    attn_implementation: str = TORCH_VARLEN

    def deepspeed(self, world_size: int) -> dict[str, Any] | None:
        if self.zero_stage is None:
            return None
        return {
            "zero_optimization": {"stage": self.zero_stage, **self.zero},
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": 1,
            "train_batch_size": self.rows * world_size,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": self.dtype == "bfloat16"},
            "steps_per_print": 10**9,
            "zero_force_ds_cpu_optimizer": False,  # offload with torch's own AdamW, as recipes/pretrain.py has it
        }


def main() -> None:
    out, *texts = sys.argv[1:]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    cases = [Case(**json.loads(text)) for text in texts]
    if world_size > 1:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=5))
    elif any(case.zero_stage is not None for case in cases):
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if not torch.cuda.is_available():
        behave_like_nccl()
    register_torch_varlen()
    results = [measure(case, world_size) for case in cases]
    Path(f"{out}.{rank}").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


def behave_like_nccl() -> None:
    """Let gloo's collectives hold no memory of their own when they return, as NCCL's do not.

    gloo's reduce_scatter copies its input, so it is made of an all_reduce in place. And what one of gloo's threads
    releases last, the profiler takes for still allocated, as it looks at our thread only: a short wait lets them end.
    """

    def settled(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            work = collective(*args, **kwargs)
            if work is not None:
                work.wait()
            time.sleep(0.003)
            return work

        return call

    def reduce_scatter(output: torch.Tensor, input: torch.Tensor, op: Any = None, group: Any = None, **_: Any) -> None:
        dist.all_reduce(input, op=dist.ReduceOp.SUM if op is None else op, group=group)
        output.copy_(input.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)].view_as(output))

    for name in ("all_reduce", "all_gather_into_tensor", "all_gather", "broadcast", "reduce"):
        setattr(dist, name, settled(getattr(dist, name)))
    setattr(dist, "reduce_scatter_tensor", reduce_scatter)  # noqa: B010 (typed as another signature)


def measure(case: Case, world_size: int) -> dict[str, Any]:
    """Bytes on this rank: the peak of each phase of the last step, and what lies between two steps, by owner."""
    gc.collect()
    leftovers: set[int] = set()  # of earlier cases: DeepSpeed's modules refer to their engines
    _storage_bytes(_all_tensors(), leftovers)
    count = CudaCount() if torch.cuda.is_available() else AllocatorCount()
    with count, ExitStack() as stack:
        run = Run(case, world_size, stack)
        lying = {}
        for step in range(STEPS):
            last = step == STEPS - 1
            with count.phase("backward", last):
                run.micro_batches()
            if last:
                gc.collect()
                lying["before_step"] = run.owners(leftovers)
            with count.phase("step", last):
                run.step()
        gc.collect()
        lying["after_step"] = run.owners(leftovers)
        with count.phase("rest", True):
            _settle()
        parameters = run.parameters
        del run
    gc.collect()
    return {**count.peaks(), "owners": lying, "parameters": parameters}


class AllocatorCount:
    """Peaks of torch's CPU allocator between marks."""

    def __enter__(self) -> AllocatorCount:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._profile.__exit__(*details)

    @contextmanager
    def phase(self, name: str, last: bool) -> Iterator[None]:
        with record_function(f"memory:{name}") if last else nullcontext():
            _settle()
            yield

    def peaks(self) -> dict[str, int]:
        """Phase -> most bytes held at once in it."""
        kineto: Any = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        moments: list[tuple[int, int, int]] = []
        spans: dict[str, tuple[int, int]] = {}
        stack = list(kineto.experimental_event_tree())
        while stack:
            event = stack.pop()
            stack.extend(event.children)
            if event.tag == _EventType.Allocation:
                fields = event.extra_fields
                if fields.device.type == "cpu":
                    moments.append((event.start_time_ns, fields.alloc_size, fields.total_allocated))
            elif event.name.startswith("memory:"):
                spans[event.name.removeprefix("memory:")] = (event.start_time_ns, event.end_time_ns)
        moments.sort()
        peaks = dict.fromkeys(spans, 0)
        # The allocator's own total: threads of gloo release tensors where the profiler does not look.
        before_all = moments[0][2] - moments[0][1]
        peaks["all"] = 0
        for when, _, total in moments:
            held = total - before_all
            peaks["all"] = max(peaks["all"], held)
            for name, (start, end) in spans.items():
                if start <= when <= end:
                    peaks[name] = max(peaks[name], held) if peaks[name] else held
        return peaks


class CudaCount:
    """The same on a GPU, from torch's own statistics. Not run yet: no GPU was at hand."""

    def __enter__(self) -> CudaCount:
        self._peaks: dict[str, int] = {}
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    @contextmanager
    def phase(self, name: str, last: bool) -> Iterator[None]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        if last:
            self._peaks[name] = torch.cuda.max_memory_allocated()

    def peaks(self) -> dict[str, int]:
        return self._peaks


class Run:
    """Model, optimizer and engine of a case, and the steps of `hfpretrain.training.step`."""

    def __init__(self, case: Case, world_size: int, stack: ExitStack) -> None:
        self.case = case
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        deepspeed_config = case.deepspeed(world_size)
        if deepspeed_config is not None:
            import deepspeed
            from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

            deepspeed.init_distributed("nccl" if self.device.type == "cuda" else "gloo", verbose=False)
            self._alive = HfDeepSpeedConfig(deepspeed_config)  # transformers keeps a weak reference
            stack.callback(unset_hf_deepspeed_config)
        config = load_config(**case.model)
        model = build_model(config, seed=1, attn_implementation=case.attn_implementation)
        model.train()
        if case.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.parameters = sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters())
        fused = FusedLoss(model, z_loss_weight=1e-4)
        nn.Module.to(model, self.device)
        optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-4, fused=True)
        self.model, self.optimizer = model, optimizer
        self.wrapped: Any = model
        self.engine: Any = None
        if deepspeed_config is not None:
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=deepspeed_config
            )
            self.wrapped = self.engine
            stack.callback(self.engine.destroy)
        elif world_size > 1:
            self.wrapped = nn.parallel.DistributedDataParallel(model, init_sync=False)  # built from one seed
        if case.fused_loss:
            fused.verify(self.wrapped, device=self.device)
        else:
            fused.verdict = Verdict("logits", "asked for", transform=LogitTransform())
        self.path = fused.verdict.path  # type: ignore[union-attr]
        shape = (case.rows, case.sequence_length)
        tokens = torch.randint(0, config.get_text_config().vocab_size, shape, device=self.device)
        self.batch = {"input_ids": tokens, "labels": tokens.clone()}

    def micro_batches(self) -> None:
        case = self.case
        cast = self.engine is None and case.dtype != "float32"
        for index in range(case.micro_batches):
            last = index == case.micro_batches - 1
            skip = self.engine is None and isinstance(self.wrapped, nn.parallel.DistributedDataParallel) and not last
            with self.wrapped.no_sync() if skip else nullcontext():
                with torch.autocast(self.device.type, DTYPES[case.dtype]) if cast else nullcontext():
                    loss = self.wrapped(**self.batch).loss
                if self.engine is None:
                    loss.backward()
                else:
                    self.engine.set_gradient_accumulation_boundary(is_boundary=last)
                    self.engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> None:
        if self.engine is not None:
            self.engine.step()
            return
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def owners(self, leftovers: set[int]) -> dict[str, int]:
        """Bytes of the storages that lie in memory now, each counted once, for the first owner in this order."""
        inner = self.optimizer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        held = list(self.model.parameters())
        partitions = [getattr(p, "ds_tensor", None) for p in held]
        masters = [p for name in MASTERS for p in _tensors(getattr(self.optimizer, name, []))]
        buckets = [b.buffer for b in getattr(self.optimizer, "ipg_buckets", {}).values()]
        owners: list[tuple[str, Iterable[Any]]] = [
            ("weights", [*held, *partitions, *_tensors(getattr(self.optimizer, "lp_param_buffer", []))]),
            ("buffers", self.model.buffers()),
            ("master_weights", masters),
            ("optimizer_state", _tensors(dict(inner.state))),
            ("bucket", _tensors(buckets)),
            ("gradients", [p.grad for p in held] + [m.grad for m in masters]),
            ("gradients", _tensors([getattr(self.optimizer, name, []) for name in GRADIENTS])),
            ("batch", self.batch.values()),
        ]
        seen = set(leftovers)
        found: dict[str, int] = {}
        for name, tensors in owners:
            found[name] = found.get(name, 0) + _storage_bytes(tensors, seen)
        found["others"] = _storage_bytes(_all_tensors(), seen)
        return found


MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups")
GRADIENTS = ("averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer")


def _settle() -> None:
    """Threads of gloo may hold a tensor a little longer than we do, and the count is read at the next allocation."""
    time.sleep(0.2)
    torch.zeros(1)


def _all_tensors() -> list[torch.Tensor]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


def _tensors(thing: Any) -> list[torch.Tensor]:
    """All tensors in nested containers."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, Mapping):
        return [tensor for value in thing.values() for tensor in _tensors(value)]
    if isinstance(thing, list | tuple | set):
        return [tensor for value in thing for tensor in _tensors(value)]
    return []


def _storage_bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if tensor is None or tensor.device.type == "meta":
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


if __name__ == "__main__":
    main()
