"""What a run takes: steps, FLOPs, hours, money, memory that does not depend on the batch, and disk.

Plain arithmetic on counts. Names carry the unit; a GB is 1e9 bytes and a TB 1e12, as on a storage bill. Where a rule
has a source it is named; the rest are definitions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hfpretrain.errors import Problem

# Hoffmann et al. 2022 (arXiv:2203.15556), rounded: what "Chinchilla-optimal" stands for. Not a constant of nature: the
# three fits in `scaling_laws` give 18 to 93 between 1e21 and 6e23 FLOPs.
CHINCHILLA_TOKENS_PER_PARAMETER = 20

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}

# --- steps ---------------------------------------------------------------------------------------------------------


def rows_per_step(*, per_device_train_batch_size: int, accumulation_steps: int, world_size: int) -> int:
    """Effective batch in rows: b * K * W."""
    return per_device_train_batch_size * accumulation_steps * world_size


def tokens_per_step(
    *, per_device_train_batch_size: int, accumulation_steps: int, world_size: int, sequence_length: int
) -> int:
    """Input positions per optimizer step: b * K * W * L."""
    return sequence_length * rows_per_step(
        per_device_train_batch_size=per_device_train_batch_size,
        accumulation_steps=accumulation_steps,
        world_size=world_size,
    )


def accumulation_steps(
    *, batch_tokens: int, sequence_length: int, per_device_train_batch_size: int, world_size: int
) -> int:
    """Micro-batches of a device per step: ceil(ceil(rows / W) / b), as `recipes/pretrain.py` makes them.

    Rows that do not divide leave some devices a smaller micro-batch; the step still has exactly batch_tokens.

    Raises:
        ValueError: batch_tokens is no whole number of rows, or fewer rows than devices.
    """
    _positive(sequence_length=sequence_length, per_device=per_device_train_batch_size, world_size=world_size)
    rows, rest = divmod(batch_tokens, sequence_length)
    if rest or rows < world_size:
        raise ValueError(
            f"{batch_tokens} tokens are no whole number of rows of {sequence_length}, {world_size} or more"
        )
    return math.ceil(math.ceil(rows / world_size) / per_device_train_batch_size)


def optimizer_steps(total_tokens: int, batch_tokens: int) -> int:
    """floor(D / tokens per step), at least 1: whole steps, never more tokens than asked for if one step fits."""
    _positive(total_tokens=total_tokens, batch_tokens=batch_tokens)
    return max(total_tokens // batch_tokens, 1)


def unused_tokens(total_tokens: int, batch_tokens: int) -> int:
    """Tokens of the request that fill no whole step; negative where a single step is already more."""
    return total_tokens - optimizer_steps(total_tokens, batch_tokens) * batch_tokens


def warmup_share(warmup_steps: int, num_steps: int) -> float:
    """Share of the run spent in warm-up; 0.005 to 0.04 is usual."""
    _positive(num_steps=num_steps)
    return warmup_steps / num_steps


# --- compute ---------------------------------------------------------------------------------------------------------


def layer_matrix_parameters(
    width: int, *, ffn_width: float | None = None, ffn_matrices: int = 3, key_value_share: float = 1.0
) -> float:
    """Weights of one transformer layer's matrices: (2 + 2 kv) d^2 of attention and ffn_matrices * d * f.

    12 d^2 with full key-value heads and f = 8/3 d in three matrices (gate, up, down; the default), or f = 4 d in two;
    with three at f = 4 d it would be 16 d^2. These are parameters: a token costs one multiplication and one addition
    with each, so the forward pass is 24 d^2 FLOPs a layer, twice the "12 d^2 FLOPs" one reads. 2 N D is right.
    """
    ffn_width = 8 * width / 3 if ffn_width is None else ffn_width
    return (2 + 2 * key_value_share) * width**2 + ffn_matrices * width * ffn_width


@dataclass(frozen=True)
class TrainingFlops:
    """The three matrix products of training; each multiplies every weight with every token once, 2 N D FLOPs.

    A layer Y = X W with X of T x d1 and W of d1 x d2 takes 2 T d1 d2. Without attention scores, which depend on the
    length: see `flops.flops_per_token`. So 6 N D is exact for the matrices and a lower bound for the model.
    """

    forward: float
    backward_activations: float
    backward_weights: float

    @property
    def total(self) -> float:
        """6 N D."""
        return self.forward + self.backward_activations + self.backward_weights


def training_flops(parameters: float, tokens: float) -> TrainingFlops:
    """C = 6 N D as 2 N D + 2 N D + 2 N D. The batch does not appear in it."""
    each = 2.0 * parameters * tokens
    return TrainingFlops(forward=each, backward_activations=each, backward_weights=each)


def device_hours(flops: float, *, peak_flops: float, mfu: float) -> float:
    """Hours of one device: FLOPs / (peak FLOP/s * MFU) / 3600; divide by the number of devices for the clock."""
    _positive(peak_flops=peak_flops, mfu=mfu)
    return flops / (peak_flops * mfu) / 3600


def cost(device_hours: float, price_per_device_hour: float) -> float:
    """In the currency of the price."""
    return device_hours * price_per_device_hour


def tokens_per_parameter(parameters: float, tokens: float) -> float:
    """D / N."""
    _positive(parameters=parameters)
    return tokens / parameters


def over_training(parameters: float, tokens: float) -> float:
    """D / N over 20: LLaMA-2 7B on 2T tokens 14.3, LLaMA-3 8B on 15T 93.75."""
    return tokens_per_parameter(parameters, tokens) / CHINCHILLA_TOKENS_PER_PARAMETER


# --- padding -----------------------------------------------------------------------------------------------------


def padding_waste(mean_document_tokens: float, sequence_length: int) -> float:
    """Share of positions, and so of matrix FLOPs, that are padding with one document a row: 1 - mean / L.

    Packed, it goes to 0, and throughput of real tokens rises by L / mean. Documents longer than a row are cut.
    """
    _positive(mean_document_tokens=mean_document_tokens, sequence_length=sequence_length)
    return max(1.0 - mean_document_tokens / sequence_length, 0.0)


# --- memory and disk -----------------------------------------------------------------------------------------------


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
    _positive(storage_gbps=storage_gbps, writers=writers)
    return checkpoint_bytes / (storage_gbps * 1e9) / writers


def checkpoint_count(num_steps: int, save_steps: int, *, last_step: bool = False) -> int:
    """floor(steps / save_steps); with `last_step` the final one too, which the Trainer always saves."""
    _positive(save_steps=save_steps)
    count, rest = divmod(num_steps, save_steps)
    return count + (1 if last_step and rest else 0)


def kept_checkpoints(count: int, save_total_limit: int | None) -> int:
    """Checkpoints on disk at most: all without a limit; with one, one more than it, as the new one is whole before an
    old one goes (`hfpretrain.training.checkpoints`)."""
    return count if not save_total_limit else min(count, save_total_limit + 1)


# --- all of it, with formulas -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A number that can be read without its context.

    Attributes:
        name: what it is; `value` is in `unit`, "share" a fraction of 1.
        formula: how it follows. b is per_device_train_batch_size, K accumulation_steps, W world_size,
            L sequence_length, N parameters, D total_tokens.
        source: whose formula, or where the rule is in force.
    """

    name: str
    value: float
    unit: str
    formula: str
    source: str = "definition"


def contradictions(
    *, total_tokens: int, batch_tokens: int, sequence_length: int, world_size: int, warmup_steps: int | None = None
) -> list[Problem]:
    """What cannot be about these counts, each of which is above 0."""
    problems = []
    rows, rest = divmod(batch_tokens, sequence_length)
    if rest:
        what = f"batch_tokens is not a whole number of rows of {sequence_length:_} tokens"
        near = ", ".join(f"{n * sequence_length:_}" for n in (rows, rows + 1) if n)
        problems.append(Problem(what, f"batch_tokens={batch_tokens:_}", "arguments", f"the nearest that fit: {near}"))
    if rows < world_size:
        what = "a step has fewer rows than there are devices, so some would have nothing to do"
        remedy = f"batch_tokens of at least {world_size * sequence_length:_}, or fewer devices"
        problems.append(Problem(what, f"{rows} rows, {world_size} devices", "arguments", remedy))
    steps = optimizer_steps(total_tokens, batch_tokens)
    if warmup_steps is not None and warmup_steps > steps:
        what = f"the warm-up is longer than the run of {steps:_} steps"
        problems.append(Problem(what, f"warmup_steps={warmup_steps:_}", "arguments", f"at most {steps:_}"))
    return problems


def step_figures(
    *,
    total_tokens: int,
    batch_tokens: int,
    sequence_length: int,
    per_device_train_batch_size: int,
    world_size: int,
    warmup_steps: int,
) -> list[Figure]:
    """The batch and the length of the run."""
    accumulation = accumulation_steps(
        batch_tokens=batch_tokens,
        sequence_length=sequence_length,
        per_device_train_batch_size=per_device_train_batch_size,
        world_size=world_size,
    )
    steps, rest = optimizer_steps(total_tokens, batch_tokens), unused_tokens(total_tokens, batch_tokens)
    share = warmup_share(warmup_steps, steps)
    return [
        Figure("batch_rows", batch_tokens // sequence_length, "rows", "batch_tokens / L; b K W where it divides"),
        Figure("accumulation_steps", accumulation, "micro-batches", "K = ceil(ceil(rows / W) / b)", "pretrain.py"),
        Figure("batch_tokens", batch_tokens, "tokens", "rows * L"),
        Figure("optimizer_steps", steps, "steps", "floor(D / batch_tokens), at least 1", "pretrain.py"),
        Figure("unused_tokens", rest, "tokens", "D - steps * batch_tokens, no whole step"),
        Figure("warmup_steps", warmup_steps, "steps", "as given, or 2 % of the steps"),
        Figure("warmup_share", share, "share", "warmup_steps / steps; 0.5 to 4 % is usual"),
    ]


def compute_figures(
    *,
    parameters: int,
    total_tokens: int,
    world_size: int,
    peak_flops: float,
    mfu: float,
    flops_per_token: float | None = None,
    price_per_device_hour: float | None = None,
) -> list[Figure]:
    """FLOPs, hours and money. `flops_per_token`, where it is known, decides the hours in place of 6 N."""
    flops = training_flops(parameters, total_tokens)
    backward = flops.backward_activations + flops.backward_weights
    work = flops.total if flops_per_token is None else flops_per_token * total_tokens
    hours = device_hours(work, peak_flops=peak_flops, mfu=mfu)
    figures = [
        Figure("forward_flops", flops.forward, "FLOPs", "2 N D", "a multiply-add of every weight and token"),
        Figure("backward_flops", backward, "FLOPs", "2 N D + 2 N D", "gradients of activations, and of weights"),
        Figure("training_flops", flops.total, "FLOPs", "C = 6 N D; the batch is not in it", "Hoffmann 2022"),
    ]
    if flops_per_token is not None:
        formula = f"D * {flops_per_token:.4g}: 6 * weights multiplied + causal attention; the hours are of this"
        figures.append(Figure("counted_flops", work, "FLOPs", formula, "planning/flops.py"))
    formula = f"FLOPs / ({peak_flops / 1e12:g} TFLOP/s * {mfu:g} MFU) / 3600"
    figures.append(Figure("device_hours", hours, "hours", formula, "the maker's bf16 peak"))
    figures.append(Figure("clock_hours", hours / world_size, "hours", "device_hours / W"))
    if price_per_device_hour is not None:
        formula = "device_hours * price_per_device_hour"
        figures.append(Figure("cost", cost(hours, price_per_device_hour), "currency", formula))
    return figures


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


def figure_table(figures: Sequence[Figure], *, explain: bool = False) -> str:
    """One line a figure: name, value, unit, and with `explain` formula and source."""
    lines = []
    for figure in figures:
        value, unit = figure.value, figure.unit
        if unit == "bytes":
            value, unit = (value / 1e12, "TB") if value >= 1e12 else (value / 1e9, "GB")
        elif unit == "share":
            value, unit = 100 * value, "%"
        whole = isinstance(figure.value, int) and unit == figure.unit
        shown = f"{value:,}" if whole else f"{value:,.4g}" if value < 1e4 else f"{value:.4g}"
        line = f"{figure.name.removesuffix('_bytes').replace('_', ' '):<36}{shown:>18} {unit:<16}"
        lines.append((f"{line}  {figure.formula}  [{figure.source}]" if explain else line).rstrip())
    return "\n".join(lines)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0; got {value}")
