"""The batch and the length of a run, in rows, tokens and steps. Plain arithmetic on counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hfpretrain.planning.figures import Figure, positive

_RECIPE = "pretrain.py"


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
    positive(sequence_length=sequence_length, per_device=per_device_train_batch_size, world_size=world_size)
    rows, rest = divmod(batch_tokens, sequence_length)
    if rest or rows < world_size:
        raise ValueError(
            f"{batch_tokens} tokens are no whole number of rows of {sequence_length}, {world_size} or more"
        )
    return math.ceil(math.ceil(rows / world_size) / per_device_train_batch_size)


def optimizer_steps(total_tokens: int, batch_tokens: int) -> int:
    """floor(D / tokens per step), at least 1: whole steps, never more tokens than asked for if one step fits."""
    positive(total_tokens=total_tokens, batch_tokens=batch_tokens)
    return max(total_tokens // batch_tokens, 1)


def unused_tokens(total_tokens: int, batch_tokens: int) -> int:
    """Tokens of the request that fill no whole step; negative where a single step is already more."""
    return total_tokens - optimizer_steps(total_tokens, batch_tokens) * batch_tokens


def warmup_share(warmup_steps: int, num_steps: int) -> float:
    """Share of the run spent in warm-up; 0.005 to 0.04 is usual."""
    positive(num_steps=num_steps)
    return warmup_steps / num_steps


def padding_waste(mean_document_tokens: float, sequence_length: int) -> float:
    """Share of positions, and so of matrix FLOPs, that are padding with one document a row: 1 - mean / L.

    Packed, it goes to 0, and throughput of real tokens rises by L / mean. Documents longer than a row are cut.
    """
    positive(mean_document_tokens=mean_document_tokens, sequence_length=sequence_length)
    return max(1.0 - mean_document_tokens / sequence_length, 0.0)


def step_figures(
    *,
    num_steps: int,
    batch_tokens: int,
    total_tokens: int,
    unused_tokens: int,
    micro_batches_per_step: int,
    sequence_length: int,
    warmup_steps: int,
    decay_steps: int,
    grows: bool = False,
) -> list[Figure]:
    """The length of a run whose counts are known (`hfpretrain.training.run_length.RunLength`).

    Args:
        grows: the batch changes, so that batch_tokens is the last one.
    """
    last = "the largest batch; " if grows else ""
    length = "steps of the ramp within D" if grows else "floor(D / batch_tokens), at least 1; or max_steps"
    share = warmup_share(warmup_steps, num_steps)
    return [
        Figure(
            "batch_rows", batch_tokens // sequence_length, "rows", f"{last}batch_tokens / L; b K W where it divides"
        ),
        Figure("accumulation_steps", micro_batches_per_step, "micro-batches", "K = ceil(ceil(rows / W) / b)", _RECIPE),
        Figure("batch_tokens", batch_tokens, "tokens", f"{last}rows * L"),
        Figure("optimizer_steps", num_steps, "steps", length, _RECIPE),
        Figure("total_tokens", total_tokens, "tokens", "D: of all these steps"),
        Figure("unused_tokens", unused_tokens, "tokens", "what was asked for beyond whole steps", _RECIPE),
        Figure("warmup_steps", warmup_steps, "steps", "as given, or 2 % of the run", _RECIPE),
        Figure("warmup_share", share, "share", "warmup_steps / steps; 0.5 to 4 % is usual"),
        Figure("decay_steps", decay_steps, "steps", "final decay: as given, or 20 % of the run under WSD", _RECIPE),
    ]


def stage_figures(stages: Sequence[tuple[int, int, int, float]]) -> list[Figure]:
    """Stages of a batch ramp: (first token, batch tokens, steps, multiple of the peak learning rate) each."""
    figures = []
    for number, (first, batch, steps, factor) in enumerate(stages, start=1):
        name = f"stage_{number}"
        figures += [
            Figure(f"{name}_first_token", first, "tokens", "first step boundary at or after its mark", _RECIPE),
            Figure(f"{name}_batch_tokens", batch, "tokens", "as given in batch_ramp", _RECIPE),
            Figure(f"{name}_steps", steps, "steps", "until the next stage, or the end", _RECIPE),
            Figure(f"{name}_learning_rate", factor, "of the peak", "(batch / largest)^(1/2, 1 or 0)", "batch_ramp_lr"),
        ]
    return figures
