"""Documents -> windows that fit into a model: every token scored once, with as much context as fits.

A document of T tokens behind a prefix is the stream [prefix, t_0 ... t_{T-1}]: stream position j predicts token j.
Without a prefix the stream begins at t_0, which nothing predicts. A forward pass has at most `max_length` inputs.

With stride = max_length these are the rolling windows of lm-eval (`utils.get_rolling_token_windows`, context_len 1):
full windows side by side, whose first token has one token of context, and a last one that is pulled back to be full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

NO_TARGET = -100  # Hugging Face's label for "no loss here"


@dataclass(frozen=True)
class Windows:
    """Windows in the order of the documents, and of the tokens inside them; one array element per window.

    Attributes:
        document: int64, whose document it is.
        start, stop: int64, stream positions that are fed: [start, stop).
        scored: int64, how many of these, the last ones, are scored.
        num_documents: documents that were cut, those without any window included.
        has_prefix: whether the streams begin with a prefix.
    """

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    scored: np.ndarray
    num_documents: int
    has_prefix: bool

    def __len__(self) -> int:
        return len(self.document)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64, input positions of each window."""
        lengths: np.ndarray = self.stop - self.start
        return lengths

    @property
    def num_scored(self) -> int:
        return int(self.scored.sum())

    @property
    def mean_context(self) -> float:
        """Inputs that a scored token is predicted from, itself not counted, the prefix counted; mean over tokens."""
        fewest = self.lengths - self.scored + 1
        total = int((self.scored * (fewest + self.lengths)).sum())  # twice the sum of fewest .. lengths
        return total / 2 / self.num_scored if self.num_scored else math.nan

    def batches(self, *, rows: int, least_positions: int | None = None) -> list[np.ndarray]:
        """Window numbers of each forward pass, longest first, so that windows of like length share one.

        Args:
            rows: most windows of a batch.
            least_positions: a batch is closed early where another row would be padded by more than an eighth, but not
                before it has this many input positions: padding costs as much as tokens do, a small pass little less
                than a larger one. None: never early.
        """
        order = np.argsort(-self.lengths, kind="stable")
        batches = []
        first = 0
        while first < len(order):
            longest = int(self.lengths[order[first]])
            stop = min(first + rows, len(order))
            fits = self.lengths[order[first:stop]] * 8 >= longest * 7
            small = np.arange(stop - first) * longest < (math.inf if least_positions is None else least_positions)
            stop = first + int((fits | small).argmin() or stop - first)
            batches.append(order[first:stop])
            first = stop
        return batches

    def filled(
        self, numbers: np.ndarray, read: Callable[[int, int, int], np.ndarray], *, padding_id: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Windows of one batch -> inputs [B, T] and what each position is to predict [B, T], NO_TARGET where nothing.

        Args:
            read: (document, start, stop) -> tokens of that document's stream at these positions. The stream of
                `stop` + 1 positions exists for every window: the last input predicts what follows it.
        """
        shape = (len(numbers), int(self.lengths[numbers].max()))
        inputs = np.full(shape, padding_id, dtype=np.int64)
        targets = np.full(shape, NO_TARGET, dtype=np.int64)
        for row, number in enumerate(numbers.tolist()):
            length, scored = int(self.lengths[number]), int(self.scored[number])
            tokens = read(int(self.document[number]), int(self.start[number]), int(self.stop[number]) + 1)
            inputs[row, :length] = tokens[:-1]
            targets[row, length - scored : length] = tokens[len(tokens) - scored :]
        return inputs, targets


def cut_windows(
    token_counts: np.ndarray, *, max_length: int, stride: int | None = None, has_prefix: bool = True
) -> Windows:
    """Cut documents into windows of at most `max_length` inputs.

    The first window of a document scores as many tokens as fit; each next one scores min(stride, what is left), and its
    inputs are the last `max_length` stream positions before its end, or all of them where there are fewer.

    Args:
        token_counts: tokens of each document, the prefix not counted; 0 gives no window.
        stride: new tokens of a window; `max_length` if not given (fastest, least context).

    Raises:
        ValueError: max_length below 1, or stride not in 1 .. max_length.
    """
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; expected at least 1 input position")
    stride = max_length if stride is None else stride
    if not 1 <= stride <= max_length:
        raise ValueError(
            f"stride is {stride} with max_length {max_length}; expected 1 to {max_length}: a larger one would skip "
            "tokens, a smaller one would not move"
        )
    counts = np.asarray(token_counts, dtype=np.int64)
    predictions = counts if has_prefix else np.maximum(counts - 1, 0)
    further = -(-np.maximum(predictions - max_length, 0) // stride)
    per_document = (predictions > 0) + further
    document = np.repeat(np.arange(len(counts)), per_document)
    first = np.cumsum(per_document) - per_document
    number = np.arange(len(document)) - first[document]
    stop = np.minimum(max_length + number * stride, predictions[document])
    before = np.where(number > 0, max_length + (number - 1) * stride, 0)
    return Windows(
        document=document,
        start=np.maximum(stop - max_length, 0),
        stop=stop,
        scored=stop - before,
        num_documents=len(counts),
        has_prefix=has_prefix,
    )


def dealt(batches: list[np.ndarray], *, rank: int, world_size: int) -> Iterator[tuple[np.ndarray, bool]]:
    """This rank's batches in turn, and whether each counts.

    Every rank gets the same number (ZeRO-3 gathers weights in step): one without work left repeats the first batch,
    which does not count.
    """
    for turn in range(math.ceil(len(batches) / world_size)):
        index = turn * world_size + rank
        yield (batches[index], True) if index < len(batches) else (batches[0], False)
