"""The `evaluate` metric, offline: from the repository by name, from the installed package by path."""

from __future__ import annotations

import math
from pathlib import Path

import evaluate
import pytest

from hfpretrain.bpb import metric

FOLDER = Path(metric.__file__).resolve().parent
TEXTS = ["ab", "\ud55c", "caf\u00e9\r\n"]  # 2, 3 and 7 bytes
NATS = [math.log(2) * bits for bits in (5.0, 1.0, 18.0)]


def test_by_name_and_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[2])
    for name in ("hfpretrain/bpb/metric", str(FOLDER)):
        found = evaluate.load(name).compute(predictions=NATS, references=TEXTS)
        assert found["bpb"] == pytest.approx(24 / 12, rel=1e-15)
        assert found["byte_perplexity"] == pytest.approx(4, rel=1e-15)  # 2 ** bpb
        assert found["byte_perplexity"] == pytest.approx(math.exp(found["nats"] / found["text_bytes"]), rel=1e-14)
        assert (found["text_bytes"], found["documents"]) == (12, 3)


def test_lengths_in_place_of_texts_and_batches_in_place_of_lists() -> None:
    scorer = evaluate.load(str(FOLDER))
    whole = scorer.compute(predictions=NATS, references=[2, 3, 7])
    scorer.add_batch(predictions=NATS[:2], references=TEXTS[:2])
    scorer.add(prediction=NATS[2], reference=TEXTS[2])
    assert scorer.compute() == whole
    empty = scorer.compute(predictions=[0.0], references=[""])
    assert math.isnan(empty["bpb"])


def test_what_no_model_can_say() -> None:
    scorer = evaluate.load(str(FOLDER))
    with pytest.raises(ValueError, match=r"document 1: nan nats, 2 bytes"):
        scorer.compute(predictions=[1.0, math.nan], references=["a", "bc"])
    with pytest.raises(ValueError, match=r"document 0: -1.0 nats, 1 bytes"):
        scorer.compute(predictions=[-1.0], references=["a"])
