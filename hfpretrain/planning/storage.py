"""Bytes: training state that does not depend on the batch, and checkpoints on disk.

A GB is 1e9 bytes and a TB 1e12, as on a storage bill.
"""

from __future__ import annotations

from dataclasses import dataclass

from hfpretrain.planning.figures import Figure, positive

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class StaticMemory:
    """Bytes of mixed-precision AdamW that do not depend on the batch: 2 + 2 + 4 + 4 + 4 = 16 a parameter, all devices.

    Activations, logits, buffers and what ZeRO gathers for a moment come on top.
    """

    weights: float
    gradients: float
    master_weights: float
    first_moment: float
    second_moment: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master_weights + self.moments

    @property
    def moments(self) -> float:
        return self.first_moment + self.second_moment


def static_memory_bytes(parameters: float, *, float32_gradients: bool = False) -> StaticMemory:
    """16 bytes a parameter in bf16 with an fp32 master copy; 18 where gradients are summed in fp32."""
    p = parameters
    return StaticMemory(
        weights=2 * p,
        gradients=(4 if float32_gradients else 2) * p,
        master_weights=4 * p,
        first_moment=4 * p,
        second_moment=4 * p,
    )


def weight_bytes(parameters: float, dtype: str = "bfloat16") -> float:
    """A checkpoint of the weights alone; dtype is one of `BYTES_PER_VALUE`."""
    return parameters * BYTES_PER_VALUE[dtype]


def full_checkpoint_bytes(parameters: float, *, compute_copy: bool = False) -> float:
    """fp32 master weights and Adam's two moments, 12 bytes a parameter; 14 with a bf16 copy for computing."""
    return parameters * (14 if compute_copy else 12)


def zero_checkpoint_bytes(parameters: float, *, zero_stage: int) -> float:
    """What a bf16 run of `recipes/pretrain.py` writes: 16 bytes a parameter at stages 0 to 2, 14 at stage 3.

    12 are those of `full_checkpoint_bytes`; 2 are model.safetensors; below stage 3 DeepSpeed's own model states
    hold the bf16 weights once more. Measured on the files of a 2.8M-parameter Llama with one rank at each
    stage (deepspeed 0.19.8). Without DeepSpeed: fp32 weights and moments, `full_checkpoint_bytes`, measured too.

    Raises:
        ValueError: another stage.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO stage 0 to 3; got {zero_stage}")
    return parameters * (14 if zero_stage == 3 else 16)


def save_seconds(checkpoint_bytes: float, *, storage_gbps: float, writers: int = 1) -> float:
    """Seconds that a synchronous save stops the run; storage_gbps is GB (1e9 bytes) a second and writer.

    `writers` are ranks that each write their shard, as far as the storage takes them all at that rate.
    """
    positive(storage_gbps=storage_gbps, writers=writers)
    return checkpoint_bytes / (storage_gbps * 1e9) / writers


def checkpoint_count(num_steps: int, save_steps: int, *, last_step: bool = False) -> int:
    """floor(steps / save_steps); with `last_step` the final one too, which the Trainer always saves."""
    positive(save_steps=save_steps)
    count, rest = divmod(num_steps, save_steps)
    return count + (1 if last_step and rest else 0)


def kept_checkpoints(count: int, save_total_limit: int | None) -> int:
    """Checkpoints on disk at most: all without a limit; with one, one more than it, as the new one is whole before an
    old one goes (`hfpretrain.training.checkpoints`)."""
    return count if not save_total_limit else min(count, save_total_limit + 1)


def storage_figures(
    *,
    parameters: int,
    num_steps: int,
    save_steps: int,
    save_total_limit: int | None,
    storage_gbps: float,
    zero_stage: int | None = None,
) -> list[Figure]:
    """Memory that does not depend on the batch, and checkpoints: `full` ones unless a ZeRO stage is given."""
    memory, full = static_memory_bytes(parameters).total, full_checkpoint_bytes(parameters)
    formula = "N (2 + 2 bf16 weights, gradients; 4 fp32 weights; 4 + 4 Adam); all devices, no activations"
    figures = [
        Figure("static_memory_bytes", memory, "bytes", formula),
        Figure("weights_checkpoint_bytes", weight_bytes(parameters), "bytes", "2 N, bf16"),
        Figure("full_checkpoint_bytes", full, "bytes", "12 N: fp32 weights and two moments; DDP writes this"),
    ]
    if zero_stage is not None:
        full = zero_checkpoint_bytes(parameters, zero_stage=zero_stage)
        formula = f"{full / parameters:g} N at stage {zero_stage}; the figures below are of this"
        figures.append(Figure("zero_checkpoint_bytes", full, "bytes", formula, "measured, bf16"))
    seconds = save_seconds(full, storage_gbps=storage_gbps)
    count = checkpoint_count(num_steps, save_steps)
    kept = kept_checkpoints(checkpoint_count(num_steps, save_steps, last_step=True), save_total_limit)
    rotation = f"{kept} * bytes" + (": save_total_limit, and the one being written" if save_total_limit else "")
    return [
        *figures,
        Figure("save_seconds", seconds, "seconds", f"bytes / {storage_gbps:g} GB/s through one writer"),
        Figure("checkpoints", count, "checkpoints", "floor(steps / save_steps); the last step adds one"),
        Figure("disk_without_rotation_bytes", count * full, "bytes", "checkpoints * bytes"),
        Figure("disk_with_rotation_bytes", kept * full, "bytes", rotation),
    ]
