"""Bytes of one rank: what lies in memory all the time, what a micro-batch adds, and what the update adds.

Rules are those of deepspeed 0.19.8 and torch 2.13, read in their source and compared with what is really allocated on
two ranks (tests/distributed/test_memory_ranks.py, docs/memory.md). Files named below are those of `deepspeed/runtime`.

W ranks, N values of all parameters, n_g those of optimizer group g, b bytes of a weight or gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hfpretrain.errors import Problem
from hfpretrain.planning.budget import BYTES_PER_VALUE
from hfpretrain.planning.optimizer_state import Tensor, state_bytes

_ALLREDUCE_VALUES = 500_000_000  # engine.py, buffered_allreduce_fallback


@dataclass(frozen=True)
class Placement:
    """Where a run puts weights, gradients and optimizer state.

    Attributes:
        world_size: W.
        zero_stage: DeepSpeed's; None without DeepSpeed: DDP, or one process.
        dtype: what is computed in. With DeepSpeed weights have it too; without, they are float32 under autocast.
        offload_optimizer: master weights and moments in host memory (ZeRO 1 to 3).
        offload_params: weights as well (ZeRO 3).
        gradient_dtype: DeepSpeed's data_types.grad_accum_dtype; None: `dtype`.
        reduce_bucket_values, prefetch_bucket_values, persistence_threshold_values: DeepSpeed's numbers of values.
        overlap_comm: two reduction buckets at ZeRO 1 and 2.
    """

    world_size: int
    zero_stage: int | None
    dtype: str = "bfloat16"
    offload_optimizer: bool = False
    offload_params: bool = False
    gradient_dtype: str | None = None
    reduce_bucket_values: int = 500_000_000
    prefetch_bucket_values: int = 50_000_000
    persistence_threshold_values: int = 100_000
    overlap_comm: bool = False

    @classmethod
    def from_deepspeed(
        cls, config: Mapping[str, Any] | None, *, world_size: int, dtype: str, hidden_size: int | None = None
    ) -> Placement:
        """What a DeepSpeed configuration says, None for none; "auto" as transformers fills it in from the width."""
        if config is None:
            return cls(world_size, None, dtype)
        zero = config.get("zero_optimization", {})
        width = hidden_size or 0
        filled = {  # transformers/integrations/deepspeed.py
            "reduce_bucket_size": ("reduce_bucket_values", width * width),
            "stage3_prefetch_bucket_size": ("prefetch_bucket_values", int(0.9 * width * width)),
            "stage3_param_persistence_threshold": ("persistence_threshold_values", 10 * width),
        }
        numbers = {}
        for key, (name, automatic) in filled.items():
            if key in zero:
                numbers[name] = automatic if zero[key] == "auto" else int(float(zero[key]))
        types = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
        gradient = config.get("data_types", {}).get("grad_accum_dtype")
        return cls(
            world_size,
            int(zero.get("stage", 0)),
            dtype,
            offload_optimizer=_offloads(zero.get("offload_optimizer")),
            offload_params=_offloads(zero.get("offload_param")),
            gradient_dtype=None if gradient is None else types.get(gradient, gradient),
            overlap_comm=bool(zero.get("overlap_comm", False)),
            **numbers,
        )

    @property
    def sharded(self) -> bool:
        return self.zero_stage is not None and self.zero_stage > 0

    @property
    def weight_bytes(self) -> int:
        """Of a value of a weight, b."""
        return 4 if self.zero_stage is None else BYTES_PER_VALUE[self.dtype]

    @property
    def gradient_bytes(self) -> int:
        return self.weight_bytes if self.gradient_dtype is None else BYTES_PER_VALUE[self.gradient_dtype]

    def problems(self) -> list[Problem]:
        """What cannot be."""
        found = []

        def add(what: str, given: str, remedy: str) -> None:
            found.append(Problem(what, given, "arguments", remedy))

        if self.world_size < 1:
            add("there is no rank to plan for", f"world_size={self.world_size}", "1 or more")
        if self.zero_stage not in (None, 0, 1, 2, 3):
            add("there is no such ZeRO stage", f"zero_stage={self.zero_stage}", "0 to 3, or none without DeepSpeed")
        for name in ("dtype", "gradient_dtype"):
            value = getattr(self, name)
            if value not in BYTES_PER_VALUE and not (name == "gradient_dtype" and value is None):
                add(f"unknown {name}", str(value), "one of " + ", ".join(BYTES_PER_VALUE))
        if self.offload_optimizer and self.zero_stage not in (1, 2, 3):
            given = f"offload_optimizer with zero_stage={self.zero_stage}"
            add("optimizer state can only be offloaded where ZeRO shards it", given, "zero_stage 1, 2 or 3")
        if self.offload_params and self.zero_stage != 3:
            given = f"offload_params with zero_stage={self.zero_stage}"
            add("weights can only be offloaded where ZeRO shards them", given, "zero_stage 3")
        return found


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model, tied ones once.

    Attributes:
        group: index of its optimizer group; None: not trained.
        module: name of the module that holds it; ZeRO 3 gathers a module's parameters together.
        hidden, embedding: see `optimizer_state.Tensor`.
    """

    shape: tuple[int, ...]
    group: int | None = 0
    module: str = ""
    hidden: bool = False
    embedding: bool = False

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    def as_tensor(self) -> Tensor:
        return Tensor(self.shape, self.hidden, self.embedding)


@dataclass(frozen=True)
class Model:
    """The tensors of a model: parameters in the order of its optimizer groups, and bytes of its buffers."""

    parameters: tuple[Parameter, ...]
    buffer_bytes: int = 0

    @property
    def values(self) -> int:
        return sum(p.values for p in self.parameters)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.group is not None)

    @property
    def groups(self) -> list[list[Parameter]]:
        indices = sorted({p.group for p in self.parameters if p.group is not None})
        return [[p for p in self.parameters if p.group == index] for index in indices]

    @property
    def largest(self) -> int:
        return max((p.values for p in self.parameters), default=0)


@dataclass
class Held:
    """What a placement holds of a model on one rank, in bytes.

    Attributes:
        device, host: component -> bytes that lie there between two steps.
        gathered: whole weights at once in a forward or backward pass, beyond those in `device` (ZeRO 3).
        gradients_before: of earlier micro-batches, there from the start.
        gradients_kept, communication: there as soon as the backward pass has made its first gradient: where they are
            put, and the buffers in which they are reduced.
        gradient_bytes: what each value of a gradient adds as the backward pass makes it.
        end_of_backward: beyond `device`, when gradients are reduced after the backward pass.
        update: beyond `device`, at the most in the optimizer's step.
    """

    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    gathered: int = 0
    gradients_before: int = 0
    gradients_kept: int = 0
    communication: int = 0
    gradient_bytes: int = 0
    end_of_backward: int = 0
    update: int = 0


def held(model: Model, placement: Placement, *, optimizer: str = "adamw", micro_batches: int = 2) -> Held:
    """What lies on one rank, the fullest one, that does not depend on the batch.

    Args:
        optimizer: an `optimizer_state.OptimizerKind.name`.
        micro_batches: of a step; from the second on gradients of those before are there.
    """
    stage = placement.zero_stage
    rule = _replicated if stage is None or stage == 0 else _zero3 if stage == 3 else _zero12
    found = rule(model, placement, optimizer, micro_batches)
    found.device["buffers"] = model.buffer_bytes
    return found


def _replicated(model: Model, placement: Placement, optimizer: str, micro_batches: int) -> Held:
    """DDP and ZeRO 0: everything whole on every rank.

    DDP's buckets are a second copy of all gradients (`gradient_as_bucket_view` is off in accelerate) where there are
    ranks to reduce with. ZeRO 0 flattens up to 5e8 values at a time to reduce them after the backward pass, and in half
    precision keeps float32 masters and, during the update, float32 gradients (fp16/unfused_optimizer.py).
    """
    trained = sum(p.values for p in model.trained)
    b = placement.weight_bytes
    out = Held()
    out.device["weights"] = b * model.values
    out.device["master_weights"] = 0 if b == 4 else 4 * trained
    out.device["optimizer_state"] = state_bytes(optimizer, [p.as_tensor() for p in model.trained])
    several = placement.world_size > 1
    out.device["communication"] = 4 * trained if placement.zero_stage is None and several else 0
    if micro_batches > 1:
        out.gradients_before = b * trained
    else:
        out.gradient_bytes = b
    if placement.zero_stage == 0:
        flat = b * min(trained, _ALLREDUCE_VALUES + model.largest)
        out.end_of_backward = b * trained + flat
    out.update = b * trained + (0 if b == 4 else 4 * trained)
    return out


def _zero12(model: Model, placement: Placement, optimizer: str, micro_batches: int) -> Held:
    """ZeRO 1 and 2 (zero/stage_1_and_2.py): weights whole, a float32 master and its state of 1/W, also in float32.

    Each group is flattened and padded to a multiple of 2 W values. A rank keeps the gradients of all parameters that
    its partition touches, whole ones, once more where micro-batches are summed. Reduction buckets are allocated for
    `reduce_bucket_size` values, however small the model, in each backward pass, two with overlap_comm.
    """
    b, w = placement.weight_bytes, placement.world_size
    padded = [_padded(sum(p.values for p in group), 2 * w) for group in model.groups]
    partitions = [size // w for size in padded]
    touched = max((_touched(model, w, rank) for rank in range(min(w, 64))), default=0)
    state = state_bytes(optimizer, [Tensor((size,)) for size in partitions])
    trained = sum(p.values for p in model.trained)
    out = Held()
    out.device["weights"] = b * (sum(padded) + model.values - trained)
    on = out.host if placement.offload_optimizer else out.device
    on["master_weights"] = 4 * sum(partitions)
    on["optimizer_state"] = state
    bucket = b * placement.reduce_bucket_values * (2 if placement.overlap_comm else 1)
    in_flight = _in_flight(model, placement)
    if placement.offload_optimizer:
        out.host["gradients"] = 4 * sum(partitions) + (b * touched if micro_batches > 1 else 0)
        out.host["communication"] = b * sum(partitions) + b * model.largest
        out.device["communication"] = b * model.largest
        touched = 0
    else:
        flat = max(partitions, default=0)
        out.update = b * touched + (4 * flat if b == 4 else max((4 + b) * flat, 4 * model.largest))
    if placement.zero_stage == 2:
        out.gradients_before = b * touched if micro_batches > 1 else 0
        out.gradients_kept = b * touched
        out.communication = bucket + in_flight
    else:  # all gradients are made first, then moved into the bucket one after another
        if micro_batches > 1:
            out.gradients_before = b * trained
        else:
            out.gradient_bytes = b
        out.communication = bucket
        out.end_of_backward = b * (trained + touched) + bucket + in_flight
    return out


def _in_flight(model: Model, placement: Placement) -> int:
    """Gradients on their way: a full bucket is copied flat; one that exceeds the bucket waits outside of it."""
    trained = sum(p.values for p in model.trained)
    large = model.largest if model.largest > placement.reduce_bucket_values else 0
    return placement.weight_bytes * (max(min(placement.reduce_bucket_values, trained), large) + large)


def _zero3(model: Model, placement: Placement, optimizer: str, micro_batches: int) -> Held:
    """ZeRO 3 (zero/stage3.py, partition_parameters.py): ceil(n / W) of every parameter.

    Gradients have a flat buffer of their own all the time, and so has the reduction bucket. Parameters of up to
    `stage3_param_persistence_threshold` values stay whole. In a pass the weights of one module are whole, and those
    that are fetched ahead; what is fetched together is copied out of one flat tensor.
    """
    b, g, w = placement.weight_bytes, placement.gradient_bytes, placement.world_size
    shards = [[math.ceil(p.values / w) for p in group] for group in model.groups]
    partitions = [sum(group) for group in shards]
    own = sum(math.ceil(p.values / w) for p in model.parameters)
    persistent = [p for p in model.parameters if p.values <= placement.persistence_threshold_values]
    whole = sum(w * math.ceil(p.values / w) for p in persistent)
    modules: dict[str, int] = {}
    for p in model.parameters:
        if p.values > placement.persistence_threshold_values:
            modules[p.module] = modules.get(p.module, 0) + p.values
    fetched = max(modules.values(), default=0)
    ahead = min(placement.prefetch_bucket_values, sum(modules.values()) - fetched)
    out = Held()
    (out.host if placement.offload_params else out.device)["weights"] = b * own
    out.device["gathered"] = b * whole
    on = out.host if placement.offload_optimizer else out.device
    on["master_weights"] = 4 * sum(partitions)
    on["optimizer_state"] = state_bytes(optimizer, [Tensor((size,)) for size in partitions])
    on["gradients"] = g * sum(partitions)
    out.device["communication"] = b * placement.reduce_bucket_values
    out.gathered = b * (fetched + ahead)
    out.communication = _in_flight(model, placement)
    if placement.offload_optimizer:
        out.host["gradients"] += 4 * sum(partitions)
        out.update = b * model.largest
    else:
        largest = max(partitions, default=0)
        out.update = largest * (4 + (g if g != 4 else 0)) - b * whole
    return out


def _padded(values: int, multiple: int) -> int:
    return math.ceil(values / multiple) * multiple


def _touched(model: Model, world_size: int, rank: int) -> int:
    """Values of all parameters of which this rank's partition holds a part."""
    total = 0
    for group in model.groups:
        size = _padded(sum(p.values for p in group), 2 * world_size) // world_size
        first, start = rank * size, 0
        for p in group:
            if start < first + size and start + p.values > first:
                total += p.values
            start += p.values
    return total


def _offloads(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("device", "none") not in (None, "none")
