"""Held-out loss and bits per byte: every real token scored once, sums only, no logits kept.

A document is start token + real tokens + end token. The start token is context and never a target, the end token is
not scored, so the targets are exactly the tokens that stand for the document's bytes. Windows, and what a token is
predicted from, are those of `hfpretrain.bpb` with the start token as prefix.

Shape suffixes: B rows, T positions of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from hfpretrain.bpb.windows import Windows, cut_windows, dealt
from hfpretrain.data.documents import Documents
from hfpretrain.loss import IGNORE_INDEX, count_targets

METRICS = ("loss", "ppl", "bpb", "target_tokens", "text_bytes", "seconds")  # logged with a prefix such as eval_


@dataclass(frozen=True)
class EvaluationWindows:
    """Windows over held-out documents, none of which holds two documents, so no architecture can leak here."""

    documents: Documents
    windows: Windows

    @property
    def num_targets(self) -> int:
        return self.windows.num_scored

    def batches(
        self, *, rows: int, rank: int = 0, world_size: int = 1, padding_id: int = 0
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield this rank's batches, longest windows first: `input_ids` int64 [B, T], padded on the right, and `labels`
        int64 [B, T + 1] in Hugging Face's habit (label t = token t) with the token that the last input predicts.

        Every rank gets the same number of batches; one without work left repeats the first with no label.
        """
        for numbers, counts in dealt(self.windows.batches(rows=rows), rank=rank, world_size=world_size):
            input_ids, targets = self.windows.filled(numbers, self._read, padding_id=padding_id)
            labels = np.pad(targets, ((0, 0), (1, 0)), constant_values=IGNORE_INDEX)
            if not counts:
                labels.fill(IGNORE_INDEX)
            yield {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}

    def _read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self.documents.tokens.read(int(self.documents.starts[document]) + start, stop - start)


def evaluation_windows(documents: Documents, sequence_length: int) -> EvaluationWindows:
    """Cut every document, without its end token, into windows of `sequence_length` inputs; see `bpb.windows`."""
    real_tokens = documents.lengths - 2  # without the start and the end token
    return EvaluationWindows(documents, cut_windows(real_tokens, max_length=sequence_length))


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
        cross_entropy_sum: `{"input_ids": [B, T], "labels": [B, T + 1]}` -> nats, the sum over all targets: of a model
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
