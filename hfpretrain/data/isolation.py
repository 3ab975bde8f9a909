"""Do documents packed into one row see each other? Measured on the model at hand, through its own attention backend.

Restarting position_ids keeps documents apart on some architectures only, and silently fails on others (a mask built
without positions, recurrent or convolutional layers, flash attention with several rows, an attention_mask of ones, a
cache). No list of names stays right, so one document's tokens are changed and the logits of the others are compared.

What counts as rounding is measured too, by differences that cannot be real in a causal model: a change of the *last*
document seen in the earlier ones, and the *first* document in its row against the same document alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hfpretrain.errors import Problem

_SEED = 20260101  # the same tokens on every rank; any number would do
_EXACT = 1e-5  # of the logits' standard deviation: same shapes, so all but bitwise equal where documents are apart
_SAME = 1e-3  # the same, between different shapes; clean models reach 3e-5 in fp32, wrong positions cost 0.1 and more
_NOISE_FACTOR = 4.0  # rounding seen in one place may be a few times larger in another
# "Rounding" above this is none: the model sees its future. Same shapes, then different shapes, where a deep model in
# bf16 may come close to a tenth. A guess on the generous side: a smaller leak both ways in time would pass as rounding.
_CAUSAL, _CAUSAL_ALONE = 0.03, 0.5


@dataclass(frozen=True)
class Leak:
    """What one document does to another.

    Attributes:
        max_difference: largest change of a logit of one document by another document, or by being packed at all.
        scale: standard deviation of the logits; differences are judged relative to it.
        isolated: whether the differences are no more than rounding.
        detail: the measured numbers in a sentence or two.
    """

    max_difference: float
    scale: float
    isolated: bool
    detail: str

    def problem(self, model_name: str) -> Problem:
        """What to say when a leak must stop a run."""
        return Problem(
            what=f"{model_name} lets a document of a row see the one before it",
            given=self.detail,
            source="isolate_documents",
            remedy="isolate_documents: false to train on rows of unseparated documents, or another model or attention",
        )


@dataclass(frozen=True)
class _Measured:
    """A difference between logits, the rounding seen beside it, and (relative to the scale) what to make of each."""

    difference: float
    rounding: float
    tolerance: float
    largest_rounding: float


@torch.no_grad()
def measure_leak(
    forward: Callable[[dict[str, Any]], Tensor],
    *,
    vocab_size: int,
    device: torch.device | str,
    collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
    sequence_length: int = 32,
) -> Leak:
    """Pack documents through `collator`, change one, and compare the logits of the others.

    Three comparisons: one row of three documents with the first one changed; the same row in a batch of two (the other
    one with padding at its end); and each document in the row against the same document alone.

    Args:
        forward: batch (what `collator` makes, without labels, on `device`) -> logits [rows, positions, vocab]. Put the
            model in eval mode first: dropout would be taken for a leak.
        collator: takes blocks {"input_ids", "piece_lengths"}, such as `PackedCollator`.

    Works on a model wrapped by DDP or DeepSpeed, on all ranks at once: every rank makes the same nine forward calls on
    the same tokens. No global random state is used.
    """
    if sequence_length < 8 or vocab_size < 2:
        raise ValueError(f"needs sequence_length >= 8 and vocab_size >= 2; got {sequence_length=}, {vocab_size=}")

    def logits(*rows: Sequence[np.ndarray]) -> list[Tensor]:
        """Logits of every document of every row, [tokens, vocab] each."""
        length = max(sum(map(len, row)) for row in rows)
        blocks = []
        for row in rows:
            tokens = np.concatenate([*row, np.zeros(length - sum(map(len, row)), dtype=np.int64)])
            blocks.append({"input_ids": tokens, "piece_lengths": np.array([len(document) for document in row])})
        batch = {key: value for key, value in collator(blocks).items() if key != "labels"}
        on_device = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        flat = forward(on_device).float().reshape(len(rows) * length, -1)
        starts = [index * length + sum(map(len, row[:k])) for index, row in enumerate(rows) for k in range(len(row))]
        lengths = [len(document) for row in rows for document in row]
        return [flat[start : start + n] for start, n in zip(starts, lengths, strict=True)]

    (first, second, third, other), (first_changed, third_changed) = _documents(vocab_size, sequence_length)
    row = logits([first, second, third])
    alone = [logits([document])[0] for document in (first, second, third)]
    in_row = _largest(row[1:], logits([first_changed, second, third])[1:])
    noise = _largest(row[:2], logits([first, second, third_changed])[:2])
    pair = logits([first, second, third], [other])
    in_pair = _largest(pair[1:], logits([first_changed, second, third], [other])[1:])
    pair_noise = _largest(pair[:2], logits([first, second, third_changed], [other])[:2])
    alone_difference, alone_noise = _largest(row[1:], alone[1:]), _largest(row[:1], alone[:1])
    measured = {
        "changed in a row": _Measured(in_row, noise, _EXACT, _CAUSAL),
        "changed in a batch of two rows": _Measured(in_pair, pair_noise, _EXACT, _CAUSAL),
        "packed instead of alone": _Measured(alone_difference, alone_noise, _same(torch.cat(row)), _CAUSAL_ALONE),
    }
    return _verdict(measured, scale=float(torch.cat(row).std()))


def _documents(vocab_size: int, sequence_length: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Three documents that fill a row, one shorter than a row; and the first and the third changed in every token."""
    generator = np.random.default_rng(_SEED)
    first, second = sequence_length * 5 // 16, sequence_length * 6 // 16
    lengths = (first, second, sequence_length - first - second, sequence_length * 3 // 4)
    documents = [generator.integers(0, vocab_size, size=length) for length in lengths]
    changed = [(d + generator.integers(1, vocab_size, size=len(d))) % vocab_size for d in (documents[0], documents[2])]
    return documents, changed


def _same(logits: Tensor) -> float:
    """Relative tolerance between different shapes: a few last digits of the precision the logits were computed in."""
    for dtype in (torch.bfloat16, torch.float16):  # upcast or not, such logits fit into their own type without loss
        if torch.equal(logits, logits.to(dtype).float()):
            return max(_SAME, 4.0 * torch.finfo(dtype).eps)
    return _SAME


def _largest(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Largest absolute difference; NaN if anything is not a number."""
    return float(torch.stack([(a - b).abs().max() for a, b in zip(ours, theirs, strict=True)]).max())


def _verdict(measured: Mapping[str, _Measured], *, scale: float) -> Leak:
    largest = max(result.difference for result in measured.values())
    if not np.isfinite(
        [scale, *(n for result in measured.values() for n in (result.difference, result.rounding))]
    ).all():
        return Leak(float("nan"), scale, isolated=False, detail="the logits are not finite, so nothing can be measured")
    if scale == 0.0:
        return Leak(largest, scale, isolated=False, detail="all logits are equal, so nothing can be measured")
    reports, isolated = [], True
    for done, result in measured.items():
        rounding = result.rounding / scale
        if rounding > result.largest_rounding:
            text = f"tokens depend on what follows them ({rounding:.1e} of the logits' std): not a causal model?"
            return Leak(largest, scale, isolated=False, detail=text)
        clean = result.difference <= max(result.tolerance * scale, _NOISE_FACTOR * result.rounding)
        isolated &= clean
        mark = "" if clean else " (LEAK)"
        reports.append(f"{done}: {result.difference / scale:.1e}{mark} (rounding {rounding:.1e})")
    head = "documents do not see each other" if isolated else "documents see each other"
    return Leak(largest, scale, isolated, f"{head}; largest difference over the logits' std: {'; '.join(reports)}")
