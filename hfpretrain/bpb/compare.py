"""Nats of documents -> bits per byte, and how sure one can be of them and of their differences.

Bits per byte of a corpus are a ratio of sums, nats / (ln 2 * bytes): long documents weigh more, as they do in the text.
Documents, not tokens, are what is drawn anew in a bootstrap, because the tokens of one document go together (Efron &
Tibshirani 1993, ch. 8.4: resample the independent units). Pure numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 10_000  # the ends of a 95 % interval then move by about 2 % of its width from seed to seed
_CHUNK = 1 << 22  # (draw, document) pairs in memory at once
FEW_DOCUMENTS = 20  # below, a percentile interval is known to be too narrow
LARGE_SHARE = 0.2  # of all bytes in one document: the interval is about that document then
SUSPICIOUS_BPB = 0.3  # the best models stand well above on text that they have not seen


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % percentile interval over documents; NaN with fewer than two documents."""

    value: float
    low: float
    high: float
    standard_error: float


@dataclass(frozen=True)
class Total:
    """Sums over some documents.

    Attributes:
        bpb: bits per byte of these documents, ratio of sums.
        nats_per_token: comparable for one tokenizer only.
        tokens_per_byte: what links the two: bpb = nats_per_token * tokens_per_byte / ln 2.
    """

    documents: int
    nats: float
    tokens: int
    text_bytes: int

    @property
    def bpb(self) -> float:
        return bits_per_byte(np.array([self.nats]), np.array([self.text_bytes]))

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def tokens_per_byte(self) -> float:
        return self.tokens / self.text_bytes if self.text_bytes else math.nan


@dataclass(frozen=True)
class Pair:
    """Second model minus first, on the same documents: negative where the second predicts the text better.

    Attributes:
        difference: in bits per byte, its interval from the same resampled documents for both.
        better_documents: documents on which the second has fewer nats; `equal_documents`: the same nats.
        documents: how many were compared; those without text do not count.
    """

    difference: Interval
    better_documents: int
    equal_documents: int
    documents: int

    @property
    def decided(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.difference.low > 0 or self.difference.high < 0


def bits_per_byte(nats: np.ndarray, text_bytes: np.ndarray) -> float:
    """sum(nats) / (ln 2 * sum(text_bytes)); NaN without a byte."""
    total = int(np.sum(text_bytes))
    return math.fsum(np.asarray(nats, dtype=np.float64)) / (math.log(2) * total) if total else math.nan


def mean_of_documents(nats: np.ndarray, text_bytes: np.ndarray) -> float:
    """Mean of each document's own bits per byte, those without text left out: every document weighs the same.

    No corpus total: short documents, of which a model knows little beforehand, pull it up.
    """
    kept = np.asarray(text_bytes) > 0
    return float(np.mean(nats[kept] / (math.log(2) * text_bytes[kept]))) if kept.any() else math.nan


def totals(
    nats: np.ndarray, tokens: np.ndarray, text_bytes: np.ndarray, domains: Sequence[str]
) -> tuple[Total, dict[str, Total]]:
    """(the corpus, each domain in the order of its first document); arrays are [documents]."""
    names = np.array(domains, dtype=object)

    def total(chosen: np.ndarray) -> Total:
        sums = math.fsum(nats[chosen]), int(tokens[chosen].sum()), int(text_bytes[chosen].sum())
        return Total(int(chosen.sum()), *sums)

    return total(np.ones(len(nats), dtype=bool)), {name: total(names == name) for name in dict.fromkeys(domains)}


def uniform_bound(tokens: int, text_bytes: int, vocabulary: int) -> float:
    """Bits per byte of a model that gives every entry of its vocabulary the same probability."""
    return math.log2(vocabulary) * tokens / text_bytes if text_bytes else math.nan


def interval(nats: np.ndarray, text_bytes: np.ndarray, *, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Bits per byte with an interval over documents: the ratio of sums is made anew for every draw of documents."""
    drawn = _resampled(nats, text_bytes, draws=draws, seed=seed)
    return _interval(bits_per_byte(nats, text_bytes), drawn)


def paired(
    first_nats: np.ndarray, second_nats: np.ndarray, text_bytes: np.ndarray, *, draws: int = DRAWS, seed: int = 0
) -> Pair:
    """Two models on the same documents: the same documents are drawn for both, and the difference made per draw.

    What is hard about a document is hard for both and cancels, so the interval is far narrower than two single ones.
    """
    apart = np.asarray(second_nats, dtype=np.float64) - first_nats
    text = np.asarray(text_bytes) > 0
    drawn = _resampled(apart, text_bytes, draws=draws, seed=seed)
    return Pair(
        difference=_interval(bits_per_byte(apart, text_bytes), drawn),
        better_documents=int((apart[text] < 0).sum()),
        equal_documents=int((apart[text] == 0).sum()),
        documents=int(text.sum()),
    )


def _resampled(nats: np.ndarray, text_bytes: np.ndarray, *, draws: int, seed: int) -> np.ndarray:
    """[draws] bits per byte of as many documents, drawn with replacement; one seed draws the same documents always."""
    text = np.asarray(text_bytes) > 0
    columns = np.stack([np.asarray(nats, dtype=np.float64)[text], np.asarray(text_bytes, dtype=np.float64)[text]])
    num_documents = columns.shape[1]
    if num_documents < 2:
        return np.full(draws, math.nan)
    generator = np.random.default_rng(seed)
    ratios = []
    for first in range(0, draws, step := max(1, _CHUNK // num_documents)):
        chosen = generator.integers(num_documents, size=(min(step, draws - first), num_documents), dtype=np.int32)
        nats_drawn, bytes_drawn = (column[chosen].sum(axis=1) for column in columns)
        ratios.append(nats_drawn / (math.log(2) * bytes_drawn))
    return np.concatenate(ratios)


def _interval(value: float, drawn: np.ndarray) -> Interval:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(value, float(low), float(high), float(drawn.std(ddof=1)))


def warnings_about(text_bytes: np.ndarray) -> list[str]:
    """What about the documents makes every interval over them less than it seems."""
    sizes = np.asarray(text_bytes)
    sizes = sizes[sizes > 0]
    found = []
    if len(sizes) < FEW_DOCUMENTS:
        found.append(f"{len(sizes)} documents with text: fewer than {FEW_DOCUMENTS}, the intervals are too narrow")
    if len(sizes) and (share := sizes.max() / sizes.sum()) > LARGE_SHARE:
        found.append(f"one document holds {share:.0%} of the bytes: the intervals hang on it")
    return found


def sanity(bpb: float, uniform: float) -> list[str]:
    """What is suspicious about a model's bits per byte."""
    found = []
    if bpb < SUSPICIOUS_BPB:
        found.append(
            f"{bpb:.4f} bits per byte is below {SUSPICIOUS_BPB}: the text was trained on, or repeats itself, or "
            "tokens see themselves"
        )
    if bpb > uniform:
        found.append(
            f"{bpb:.4f} bits per byte is above the {uniform:.4f} of a uniform guess: untrained, or the tokenizer is "
            "not the model's"
        )
    return found
