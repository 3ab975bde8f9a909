"""Every real token of every held-out document is scored once, whatever the batch, the rank or the length."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hfpretrain.loss import IGNORE_INDEX, logits_sums
from hfpretrain.training.evaluation import evaluate_bits_per_byte, evaluation_windows, summarise

START, END, VOCAB = 0, 1, 50


def _documents(real_lengths: list[int]) -> Any:
    generator = np.random.default_rng(0)
    documents = [[START, *generator.integers(2, VOCAB, size=n).tolist(), END] for n in real_lengths]
    flat = np.array([token for document in documents for token in document], dtype=np.uint16)
    lengths = np.array([len(document) for document in documents])
    return SimpleNamespace(
        tokens=SimpleNamespace(read=lambda start, length: flat[start : start + length]),
        lengths=lengths,
        starts=np.cumsum(lengths) - lengths,
        text_bytes=np.array([3 * n for n in real_lengths]),
        raw=documents,
    )


def _nats(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return logits_sums(logits, batch["labels"]).cross_entropy


@pytest.mark.parametrize("length", [2, 5, 8, 100])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_real_token_is_a_target_once(length: int, rows: int, world_size: int) -> None:
    documents = _documents([1, length - 1, length, length + 1, 2 * length, 2 * length + 1, 13])
    windows = evaluation_windows(documents, length)
    seen: list[int] = []
    turns = set()
    for rank in range(world_size):
        batches = list(windows.batches(rows=rows, rank=rank, world_size=world_size))
        turns.add(len(batches))
        for batch in batches:
            inputs, labels = batch["input_ids"], batch["labels"]
            assert inputs.shape[1] <= length
            assert labels.shape == (len(inputs), inputs.shape[1] + 1)
            targets = labels[labels != IGNORE_INDEX]
            also_input = (labels[:, :-1] != IGNORE_INDEX) & (
                labels[:, 1:] != IGNORE_INDEX
            )  # the last is only predicted
            assert torch.equal(labels[:, :-1][also_input], inputs[also_input])
            assert (labels[:, 0] == IGNORE_INDEX).all()
            seen += targets.tolist()
    assert turns == {math.ceil(math.ceil(len(windows.windows) / rows) / world_size)}
    assert sorted(seen) == sorted(token for document in documents.raw for token in document[1:-1])
    assert windows.num_targets == len(seen)


def test_uniform_model_gives_log2_vocabulary_bits_per_token() -> None:
    documents = _documents([4, 1, 9, 30])
    windows = evaluation_windows(documents, 8)
    metrics = evaluate_bits_per_byte(
        lambda batch: _nats(torch.zeros(*batch["input_ids"].shape, VOCAB), batch),
        windows,
        rows=2,
        device=torch.device("cpu"),
    )
    assert metrics["target_tokens"] == 44
    assert metrics["text_bytes"] == 132
    assert metrics["loss"] == pytest.approx(math.log(VOCAB), rel=1e-6)
    assert metrics["ppl"] == pytest.approx(VOCAB, rel=1e-5)
    assert metrics["bpb"] == pytest.approx(math.log2(VOCAB) * 44 / 132, rel=1e-6)


def test_batch_size_does_not_change_the_result_and_windows_follow_the_chain_rule() -> None:
    """A bigram model's score of a document is a plain sum over neighbours, so windows must add up to exactly that."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    documents = _documents([4, 1, 9, 30, 17])
    expected = sum(
        -table[a].double().log_softmax(-1)[b].item()
        for document in documents.raw
        for a, b in itertools.pairwise(document[:-1])
    )
    for rows in (1, 3, 8):
        metrics = evaluate_bits_per_byte(
            lambda batch: _nats(table[batch["input_ids"]], batch),
            evaluation_windows(documents, 6),
            rows=rows,
            device=torch.device("cpu"),
        )
        assert metrics["loss"] * metrics["target_tokens"] == pytest.approx(expected, rel=1e-6)


def test_nothing_to_score_is_nan_not_a_crash() -> None:
    assert math.isnan(summarise(0.0, target_tokens=0, text_bytes=0)["bpb"])
    assert summarise(1e6, target_tokens=1, text_bytes=1)["ppl"] == pytest.approx(math.exp(700))
