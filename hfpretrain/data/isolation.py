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

from hfpretrain.data.collator import Mechanism, PackedCollator

_SEED = 20260101  # the same tokens on every rank; any number would do
_EXACT = 1e-5  # of the logits' standard deviation: same shapes, so all but bitwise equal where documents are apart
_SAME = 1e-3  # the same, between different shapes; clean models reach 3e-5 in fp32, wrong positions cost 0.1 and more
_NOISE_FACTOR = 4.0  # rounding seen in one place may be a few times larger in another
# "Rounding" above this is none: the model sees its future. Same shapes (float32; half precision), then different
# shapes, where a deep model in bf16 may come close to a tenth. A smaller leak both ways in time passes as rounding: in
# float32 eager attention that adds a boolean mask to its scores, as big_bird does, is seen at 1e-2.
_CAUSAL, _CAUSAL_HALF, _CAUSAL_ALONE = 1e-3, 0.03, 0.5


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


@dataclass(frozen=True)
class Way:
    """One way to keep documents apart, to be tried.

    Attributes:
        mechanism: how the collator tells the model where documents end.
        attn_implementation: attention that goes with it; None: the one that the model was built with.
        windows, additive: see `PackedCollator`.
    """

    mechanism: Mechanism
    attn_implementation: str | None = None
    windows: Mapping[str, int | None] | int | None = None
    additive: bool = False

    def __str__(self) -> str:
        attention = f" with {self.attn_implementation}" if self.attn_implementation else ""
        return f"{self.mechanism}{attention}"

    def collator(self) -> PackedCollator:
        return PackedCollator(self.mechanism, windows=self.windows, additive=self.additive)


def ways(
    config: Any, *, attentions: Sequence[str] = (), attn_implementation: str | None = None, sequence_length: int
) -> list[Way]:
    """What to try on a model, the cheapest first.

    Args:
        config: of the model; its kinds of attention layers and their window shape the explicit mask.
        attentions: attention implementations for variable lengths that may be tried in the place of the model's own.
        attn_implementation: the model's own, as asked for; flash attention takes boundaries itself.
        sequence_length: tokens of a row: a window that is at least as long hides nothing.
    """
    found = [Way("varlen", attention) for attention in attentions]
    if attn_implementation is not None and ("flash" in attn_implementation or "varlen" in attn_implementation):
        found.append(Way("varlen"))
    found.append(Way("position_ids"))
    found.append(Way("mask", windows=_windows(config, sequence_length)))
    return [*found, Way("seq_idx")]


def _windows(config: Any, sequence_length: int) -> Mapping[str, int | None] | int | None:
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if not isinstance(window, int) or window >= sequence_length:
        return None
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        return window
    return {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)}


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
    alone: Callable[[dict[str, Any]], Tensor] | None = None,
    sequence_length: int = 32,
) -> Leak:
    """Pack documents through `collator`, change one, and compare the logits of the others.

    Three comparisons: one row of three documents with the first one changed; the same row in a batch of two (the other
    one with padding at its end); and each document in the row against the same document alone.

    Args:
        forward: batch (what `collator` makes, without labels, on `device`) -> logits [rows, positions, vocab]. Put the
            model in eval mode first: dropout would be taken for a leak.
        collator: takes blocks {"input_ids", "piece_lengths"}, such as `PackedCollator`.
        alone: the same for one document with `{"input_ids": [1, positions]}` and nothing else, in the attention that is
            to be reproduced; None: `forward` of what `collator` makes, which cannot show that a mask has lost a window
            or that the model by itself counts positions otherwise (RoBERTa).

    Works on a model wrapped by DDP or DeepSpeed, on all ranks at once: every rank makes the same nine forward calls
    (ten with `alone`) on the same tokens. No global random state is used.
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

    def logits_alone(document: np.ndarray) -> Tensor:
        if alone is None:
            return logits([document])[0]
        return alone({"input_ids": torch.from_numpy(document)[None].to(device)}).float()[0]

    (first, second, third, other), (first_changed, third_changed) = _documents(vocab_size, sequence_length)
    row = logits([first, second, third])
    separate = [logits_alone(document) for document in (first, second, third)]
    in_row = _largest(row[1:], logits([first_changed, second, third])[1:])
    noise = _largest(row[:2], logits([first, second, third_changed])[:2])
    pair = logits([first, second, third], [other])
    in_pair = _largest(pair[1:], logits([first_changed, second, third], [other])[1:])
    pair_noise = _largest(pair[:2], logits([first, second, third_changed], [other])[:2])
    alone_difference, alone_noise = _largest(row[1:], separate[1:]), _largest(row[:1], separate[:1])
    if alone is not None:  # what differs in the first document already is no rounding, unless it is so by `forward` too
        alone_difference = max(alone_difference, alone_noise)
        alone_noise = _largest(row[:1], logits([first]))
    same, causal = _limits(torch.cat(row))
    measured = {
        "changed in a row": _Measured(in_row, noise, _EXACT, causal),
        "changed in a batch of two rows": _Measured(in_pair, pair_noise, _EXACT, causal),
        "packed instead of alone": _Measured(alone_difference, alone_noise, same, _CAUSAL_ALONE),
    }
    return _verdict(measured, scale=float(torch.cat(row).std()))


@torch.no_grad()
def measure_single(forward: Callable[[dict[str, Any]], Tensor], *, vocab_size: int, device: torch.device | str) -> Leak:
    """Is a document that shares a padded batch with a longer one, one a row, what it is alone? Args as `measure_leak`.

    In a causal model nothing that follows can matter; where padding does, or the model is not causal, this shows it.
    """
    documents, _ = _documents(vocab_size, 32)
    longest = max(map(len, documents))
    blocks = [
        {"input_ids": np.pad(document, (0, longest - len(document))), "piece_lengths": [len(document)]}
        for document in documents
    ]
    together = forward({"input_ids": PackedCollator("single")(blocks)["input_ids"].to(device)}).float()
    alone = [forward({"input_ids": torch.from_numpy(document)[None].to(device)}).float()[0] for document in documents]
    rows = [row[: len(document)] for row, document in zip(together, documents, strict=True)]
    difference, tolerance = _largest(rows, alone), _limits(torch.cat(alone))[0]
    measured = {"in a padded batch instead of alone": _Measured(difference, 0.0, tolerance, _CAUSAL_ALONE)}
    return _verdict(measured, scale=float(torch.cat(alone).std()))


def _documents(vocab_size: int, sequence_length: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Three documents that fill a row, one shorter than a row; and the first and the third changed in every token."""
    generator = np.random.default_rng(_SEED)
    first, second = sequence_length * 5 // 16, sequence_length * 6 // 16
    lengths = (first, second, sequence_length - first - second, sequence_length * 3 // 4)
    documents = [generator.integers(0, vocab_size, size=length) for length in lengths]
    changed = [(d + generator.integers(1, vocab_size, size=len(d))) % vocab_size for d in (documents[0], documents[2])]
    return documents, changed


def _limits(logits: Tensor) -> tuple[float, float]:
    """By the precision the logits were computed in: tolerance between shapes, largest rounding at the same."""
    for dtype in (torch.bfloat16, torch.float16):  # upcast or not, such logits fit into their own type without loss
        if torch.equal(logits, logits.to(dtype).float()):
            return max(_SAME, 4.0 * torch.finfo(dtype).eps), _CAUSAL_HALF
    return _SAME, _CAUSAL


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
