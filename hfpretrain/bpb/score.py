"""Documents of tokens -> nats of each document: float32 log-softmax, float64 sums, no logits of a whole batch.

    nats(document) = sum_t -ln p(token_t | the inputs of its window before it)
    bits per byte  = sum of nats / (ln 2 * sum of UTF-8 bytes)

Windows never hold two documents, so nothing can leak from one to another on any architecture. Several windows in one
row would save nothing but padding, and of that `Windows.batches` leaves at most 0.3 % of the positions of a corpus and
2 % of those of 25 Bible chapters, manuals or source files (windows of 1024, batches of 8).

Shape suffixes: B rows, T positions of a row.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hfpretrain.bpb.windows import Windows, cut_windows, dealt
from hfpretrain.data.isolation import measure_single
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.loss import FusedLoss

if TYPE_CHECKING:
    from hfpretrain.bpb.models import LoadedModel

DEFAULT_MAX_LENGTH = 2048
PADDING_ID = 0  # any: that padding does not matter is measured, with this id
# A forward pass of fewer positions takes another row at any padding. On a CPU core, 6 of the 30 layers of a 135M Llama
# take 0.94 ms a position at 32 positions, 0.49 at 256, 0.49 at 1024: from 256 on only padding counts.
_LEAST_POSITIONS = {"cpu": 256}
_LEAST_POSITIONS_ELSEWHERE = 4096  # a guess: no GPU was at hand


@dataclass(frozen=True)
class Scores:
    """What a model makes of documents, and every choice that moves it.

    Attributes:
        nats: float64 [documents], -ln p of each whole document.
        tokens: int64 [documents], tokens whose nats these are; all that were given.
        uniform_tokens: first tokens that had nothing to be predicted from (no prefix). Each is charged
            ln(vocabulary), a uniform code, so that every model is charged for the same bytes.
        vocabulary: number of entries that the model's softmax runs over.
        prefix_id: the token before each document; None: none.
        max_length, stride: see `cut_windows`.
        batch_size: most windows of a forward pass; 1 where padding was measured to matter.
        windows: number of windows.
        mean_context: mean number of tokens that a scored token was predicted from, the prefix included.
        seconds: wall time of scoring, without loading.
        verdict: how the probabilities were computed and why.
        notes: what a reader of the figures should know.
    """

    nats: np.ndarray
    tokens: np.ndarray
    uniform_tokens: int
    vocabulary: int
    prefix_id: int | None
    max_length: int
    stride: int
    batch_size: int
    windows: int
    mean_context: float
    seconds: float
    verdict: str
    notes: tuple[str, ...] = ()


def score(
    model: LoadedModel | PreTrainedModel,
    token_ids: Sequence[np.ndarray],
    *,
    prefix_id: int | None,
    max_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    device: torch.device | str | None = None,
) -> Scores:
    """Score documents of tokens, each by itself, every token once.

    When torch.distributed runs, every rank calls this with the same documents and the whole model; the windows are
    dealt and every rank returns the same result, bit by bit that of one process.

    Args:
        token_ids: integers [tokens] of each document, no special token added; may be empty.
        prefix_id: what the first token is predicted from (the start token that the model was trained with); None:
            nothing, and the first token is charged ln(vocabulary).
        max_length: most input positions; default min(the model's positions, 2048).
        stride: see `cut_windows`; default max_length.
        batch_size: most windows of a forward pass; changes speed and memory, not the result.
        device: where the model is moved to first; default: it stays.

    Raises:
        ConfigError: ids the model does not have, windows longer than its positions, a stride that does not fit; a model
            whose logits see what follows.
        FloatingPointError: nats that are not finite, with the documents.
    """
    choices: dict[str, Any] = {"max_length": max_length, "stride": stride, "batch_size": batch_size}
    own: Any = model if isinstance(model, PreTrainedModel) else model.model
    if device is not None:
        own.to(device)
    if not isinstance(model, PreTrainedModel):
        return replace(model.scorer, device=own.device).score(token_ids, prefix_id=prefix_id, **choices)
    with measured(own) as scorer:
        return scorer.score(token_ids, prefix_id=prefix_id, **choices)


@dataclass(frozen=True)
class Scorer:
    """A model of which is known how its probabilities are computed and whether padding matters.

    Attributes:
        fused: the verified loss on the model.
        forward: what is called: the model or its wrapper, in eval mode.
        padding: why rows may not be padded; None: they may.
    """

    fused: FusedLoss
    forward: nn.Module
    device: torch.device
    padding: str | None

    @classmethod
    def of(cls, fused: FusedLoss, forward: nn.Module, device: torch.device) -> Scorer:
        """Measure whether a row is the same in a padded batch; `fused` was verified. Every rank must call this."""

        def logits(batch: dict[str, Any]) -> Tensor:
            found: Tensor = fused.forward_logits(forward, batch).logits
            return found

        try:
            leak = measure_single(logits, vocab_size=vocabulary_size(fused.model.config), device=device)
            why = None if leak.isolated else leak.detail
        except Exception as error:  # a model that takes one row only
            why = f"{type(error).__name__}: {error}"
        return cls(fused, forward, device, why)

    def score(
        self,
        token_ids: Sequence[np.ndarray],
        *,
        prefix_id: int | None,
        max_length: int | None = None,
        stride: int | None = None,
        batch_size: int = 8,
    ) -> Scores:
        """See `score`."""
        start = time.perf_counter()
        model = self.fused.model
        max_length, notes = _max_length(model, max_length)
        vocabulary = vocabulary_size(model.config)
        counts = np.array([len(ids) for ids in token_ids], dtype=np.int64)
        refuse(_problems(model, token_ids, prefix_id, max_length, stride, batch_size))
        windows = cut_windows(counts, max_length=max_length, stride=stride, has_prefix=prefix_id is not None)
        if self.padding is not None:
            batch_size = 1
            notes += (f"one window a forward pass, since padding changes this model's logits: {self.padding}",)
        nats = self.window_nats(windows, _reader(token_ids, prefix_id), rows=batch_size)
        per_document = np.bincount(windows.document, weights=nats, minlength=len(counts))
        uniform = int((counts > 0).sum()) if prefix_id is None else 0
        if uniform:
            per_document = per_document + (counts > 0) * math.log(vocabulary)
            notes += (f"no prefix: the first token of {uniform} documents is charged ln({vocabulary}), a uniform code",)
        _refuse_non_finite(per_document)
        return Scores(
            nats=per_document,
            tokens=counts,
            uniform_tokens=uniform,
            vocabulary=vocabulary,
            prefix_id=prefix_id,
            max_length=max_length,
            stride=max_length if stride is None else stride,
            batch_size=batch_size,
            windows=len(windows),
            mean_context=windows.mean_context,
            seconds=time.perf_counter() - start,
            verdict=str(self.fused.verdict),
            notes=notes,
        )

    @torch.no_grad()
    def window_nats(self, windows: Windows, read: Callable[[int, int, int], np.ndarray], *, rows: int) -> np.ndarray:
        """Nats of each window, float64 [windows], the same on every rank: each is computed once and added to zeros."""
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        least = _LEAST_POSITIONS.get(self.device.type, _LEAST_POSITIONS_ELSEWHERE)
        batches = windows.batches(rows=rows, least_positions=least)
        nats = np.zeros(len(windows))
        with tqdm(total=len(windows), desc="scoring", unit="window", delay=2, disable=rank > 0) as bar:
            for numbers, counts in dealt(batches, rank=rank, world_size=world_size):
                inputs, targets = (torch.from_numpy(a) for a in windows.filled(numbers, read, padding_id=PADDING_ID))
                found = self._nats(inputs.to(self.device), targets.to(self.device))
                if counts:
                    per_row = found.double().cpu().split(windows.scored[numbers].tolist())
                    nats[numbers] = [float(row.sum()) for row in per_row]
                bar.update(min(len(numbers) * world_size, len(windows) - bar.n))
        if world_size > 1:
            total = torch.from_numpy(nats).to(self.device if dist.get_backend() == "nccl" else "cpu")
            dist.all_reduce(total)
            nats = total.cpu().numpy()
        return nats

    def _nats(self, inputs: Tensor, targets: Tensor) -> Tensor:
        try:
            return self.fused.nats(self.forward, {"input_ids": inputs}, targets)
        except (IndexError, RuntimeError) as error:
            if not re.search("out of (range|bounds)", str(error)):
                raise
            what = "the model has no position for every input of a window (some keep a few of theirs for padding)"
            given = f"windows of {inputs.shape[1]:,} inputs: {error}"
            raise ConfigError([Problem(what, given, "max_length", "a smaller max_length")]) from error


def position_limit(config: Any) -> int | None:
    """Most input positions of a model; None: no limit, or none that its configuration tells."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def vocabulary_size(config: Any) -> int:
    """Entries of a model's embedding, those of a padded vocabulary included."""
    return int(config.get_text_config().vocab_size)


@contextmanager
def measured(model: PreTrainedModel) -> Iterator[Scorer]:
    """The model in eval mode with a verified loss on it, as before afterwards; a loss that is there is used."""
    before: FusedLoss | None = model.__dict__.get("_fused_loss")
    fused = FusedLoss(model) if before is None else before
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        verdict = fused.verdict or fused.verify()
        refuse([verdict.problem(type(model).__name__)] if verdict.path == "refused" else [])
        yield Scorer.of(fused, model, model.device)
    finally:
        for module, mode in modes.items():
            module.training = mode
        if fused is not before:
            fused.remove()


def _reader(token_ids: Sequence[np.ndarray], prefix_id: int | None) -> Callable[[int, int, int], np.ndarray]:
    def read(document: int, start: int, stop: int) -> np.ndarray:
        ids = token_ids[document]
        if prefix_id is None:
            return ids[start:stop]
        return np.concatenate(([prefix_id], ids[: stop - 1])) if start == 0 else ids[start - 1 : stop - 1]

    return read


def _max_length(model: PreTrainedModel, asked: int | None) -> tuple[int, tuple[str, ...]]:
    positions = position_limit(model.config)
    if asked is not None:
        return asked, ()
    if positions is None or positions >= DEFAULT_MAX_LENGTH:
        return DEFAULT_MAX_LENGTH, ()
    return positions, (f"windows of {positions:,} inputs, all positions that the model has",)


def _problems(
    model: PreTrainedModel,
    token_ids: Sequence[np.ndarray],
    prefix_id: int | None,
    max_length: int,
    stride: int | None,
    batch_size: int,
) -> list[Problem]:
    name, vocabulary, positions = type(model).__name__, vocabulary_size(model.config), position_limit(model.config)
    problems = []
    if positions is not None and max_length > positions:
        what = f"windows are longer than the {positions:,} positions of {name}"
        problems.append(Problem(what, str(max_length), "max_length", f"at most {positions}"))
    if max_length < 1:
        problems.append(Problem("a window needs an input", str(max_length), "max_length", "at least 1"))
    elif stride is not None and not 1 <= stride <= max_length:
        what = "a stride outside 1 .. max_length would skip tokens or not move"
        problems.append(Problem(what, str(stride), "stride", f"1 to {max_length}"))
    if batch_size < 1:
        problems.append(Problem("a forward pass needs a window", str(batch_size), "batch_size", "at least 1"))
    if prefix_id is not None and not 0 <= prefix_id < vocabulary:
        what = f"{name} has no such token to begin documents with"
        problems.append(Problem(what, str(prefix_id), "prefix", f"0 to {vocabulary - 1}"))
    outside = [n for n, ids in enumerate(token_ids) if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary]
    if outside:
        largest = max(int(token_ids[n].max()) for n in outside)
        what = f"documents hold ids that {name} does not have (vocabulary {vocabulary:,})"
        given = f"id {largest} in {len(outside)} documents, the first is number {outside[0]}"
        problems.append(Problem(what, given, "token_ids", "encode with the model's own tokenizer"))
    return problems


def _refuse_non_finite(nats: np.ndarray) -> None:
    bad = np.flatnonzero(~np.isfinite(nats))
    if len(bad):
        raise FloatingPointError(
            f"nats of {len(bad)} of {len(nats)} documents are not finite, document {bad[0]} first ({nats[bad[0]]}): "
            "the model's weights or activations overflow; try --dtype float32, and look at this document"
        )
