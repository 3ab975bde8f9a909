"""Held-out loss and bits per byte: every real token scored once, sums only, no logits kept.

A document is start token + real tokens + end token. The start token is context and never a target, the end token is
not scored, so the targets are exactly the tokens that stand for the document's bytes.

Shape suffixes: B rows, T positions of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from hfpretrain.data.documents import Documents
from hfpretrain.loss import IGNORE_INDEX, count_targets


@dataclass(frozen=True)
class EvaluationWindows:
    """Windows of at most `sequence_length` tokens over held-out documents, longest first.

    A document longer than one window goes on in the next one, which repeats the last token of the former as its only
    context: each real token is a target once. Windows never hold two documents, so no architecture can leak here.
    """

    documents: Documents
    starts: np.ndarray  # int64 [num_windows], offset of the first token in documents.tokens
    lengths: np.ndarray  # int64 [num_windows], tokens of the window; all but the first are targets

    @property
    def num_targets(self) -> int:
        return int((self.lengths - 1).sum())

    def batches(
        self, *, rows: int, rank: int = 0, world_size: int = 1, padding_id: int = 0
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield this rank's batches, `input_ids` and `labels` int64 [B, T], padded on the right.

        Every rank gets the same number of batches (ZeRO-3 gathers weights in step): a rank without work left repeats
        the first batch with no label, which adds nothing to the sums.
        """
        num_batches = math.ceil(len(self.starts) / rows)
        for turn in range(math.ceil(num_batches / world_size)):
            index = turn * world_size + rank
            first = index * rows if index < num_batches else 0
            batch = self._batch(slice(first, first + rows), padding_id)
            if index >= num_batches:
                batch["labels"].fill_(IGNORE_INDEX)
            yield batch

    def _batch(self, chosen: slice, padding_id: int) -> dict[str, torch.Tensor]:
        starts, lengths = self.starts[chosen], self.lengths[chosen]
        input_ids = np.full((len(starts), int(lengths.max())), padding_id, dtype=np.int64)
        labels = np.full_like(input_ids, IGNORE_INDEX)
        for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            input_ids[row, :length] = self.documents.tokens.read(start, length)
            labels[row, 1:length] = input_ids[row, 1:length]
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


def evaluation_windows(documents: Documents, sequence_length: int) -> EvaluationWindows:
    """Cut every document, without its end token, into windows of `sequence_length` tokens that overlap by one."""
    if sequence_length < 2:
        raise ValueError(f"sequence_length is {sequence_length}; a window needs at least 2 tokens to score one")
    stride = sequence_length - 1
    targets = documents.lengths - 2  # without the start and the end token
    windows_per_document = -(-targets // stride)
    document = np.repeat(np.arange(len(targets)), windows_per_document)
    first_window = np.cumsum(windows_per_document) - windows_per_document
    offset = (np.arange(len(document)) - first_window[document]) * stride
    starts = documents.starts[document] + offset
    lengths = np.minimum(targets[document] - offset, stride) + 1
    longest_first = np.argsort(-lengths, kind="stable")
    return EvaluationWindows(documents=documents, starts=starts[longest_first], lengths=lengths[longest_first])


@torch.no_grad()
def evaluate_bits_per_byte(
    cross_entropy_sum: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    windows: EvaluationWindows,
    *,
    rows: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> dict[str, float]:
    """Score all windows over all ranks; every rank returns the same numbers.

    Args:
        cross_entropy_sum: `{"input_ids": [B, T], "labels": [B, T]}` -> nats, the sum over all targets: of a model
            with a fused loss `model(**batch).cross_entropy`; eval mode is the caller's business.
        rows: rows of a forward pass on one rank; changes speed and memory, not the result.

    Returns:
        `loss` (nats per target token), `ppl` = exp(loss), `bpb` = nats / (ln 2 * UTF-8 bytes of the original text),
        `target_tokens`, `text_bytes`. Source: seed document, section 2.3.1.
    """
    nats, targets = 0.0, 0
    for batch in windows.batches(rows=rows, rank=rank, world_size=world_size):
        targets += int(count_targets(batch["labels"]))
        nats += float(cross_entropy_sum({name: tensor.to(device) for name, tensor in batch.items()}))
    totals = torch.tensor([nats, targets], dtype=torch.float64)
    if world_size > 1:
        gathered: list[list[float]] = [[] for _ in range(world_size)]
        dist.all_gather_object(gathered, totals.tolist())
        totals = torch.tensor(gathered, dtype=torch.float64).sum(dim=0)
    nats, target_tokens = float(totals[0]), int(totals[1])
    if target_tokens != windows.num_targets:
        raise RuntimeError(
            f"scored {target_tokens} tokens of {windows.num_targets}: the windows were not all scored once"
        )
    return summarise(nats, target_tokens=target_tokens, text_bytes=int(windows.documents.text_bytes.sum()))


def summarise(nats: float, *, target_tokens: int, text_bytes: int) -> dict[str, float]:
    """Sums of a corpus -> its metrics; nothing to score gives NaN, not a division error."""
    loss = nats / target_tokens if target_tokens else math.nan
    return {
        "loss": loss,
        "ppl": math.exp(min(loss, 700.0)) if target_tokens else math.nan,  # exp overflows float64 at 709
        "bpb": nats / (math.log(2) * text_bytes) if text_bytes else math.nan,
        "target_tokens": target_tokens,
        "text_bytes": text_bytes,
    }
