"""Two ranks score what one does, to the last bit, and named held-out sets are scored in training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from hfpretrain.bpb.models import load
from hfpretrain.bpb.score import score
from launching import REPOSITORY, launch
from runs import RECIPE, arguments, write_text

pytestmark = pytest.mark.distributed
WORKER = REPOSITORY / "tests" / "distributed" / "score_worker.py"
NO_DROPOUT = {"config_overrides": "n_embd=32,n_layer=2,n_head=4,n_positions=32,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"}


def test_ranks_share_the_work_and_the_result(tmp_path: Path) -> None:
    path = str(REPOSITORY / "tests" / "distributed")
    for topology in ("single", "cpu_ddp"):
        launch(topology, WORKER, str(tmp_path), PYTHONPATH=f"{REPOSITORY}:{path}")
    alone, first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1"))
    assert first == second  # the number of forward passes, too
    assert first["nats"] == alone["nats"]
    assert math.ceil(alone["forwards"] / 2) <= first["forwards"] < alone["forwards"] * 0.6


def test_named_held_out_sets_are_scored_by_the_same_code(tmp_path: Path) -> None:
    """On two ranks under ZeRO 3, against `score` on the saved model; one set is training data and is said to be."""
    write_text(tmp_path / "text.jsonl")
    texts = [json.loads(line)["text"] for line in (tmp_path / "text.jsonl").read_text().split("\n") if line]
    other = ["", "가나다 라마바사", "x" * 200, "a\r\nb"]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in other))
    (tmp_path / "known.txt").write_text(texts[0])
    changes: dict[str, Any] = NO_DROPOUT | {"max_steps": 4, "eval_steps": 2, "validation_fraction": 0}
    sets = ["--eval_data", f"other={tmp_path}/other.jsonl", f"known={tmp_path}/known.txt"]
    printed = launch("zero3", RECIPE, *arguments(tmp_path, **changes), *sets)
    assert "eval_data known: 1 of its 1 documents are training data as well" in printed
    assert "eval_data other" not in printed
    run = tmp_path / "run"
    results = json.loads((run / "eval_results.json").read_text())
    log = json.loads((run / "trainer_state.json").read_text())["log_history"]
    assert [line["step"] for line in log if "eval_other_bpb" in line] == [2, 4]
    assert not [line for line in log if "eval_bpb" in line]
    loaded = load(str(run))
    assert loaded.prefix_id == 256
    assert "from run.json" in loaded.prefix_why
    ids = [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in other]
    scores = score(loaded, ids, prefix_id=loaded.prefix_id, max_length=32)
    size = sum(len(text.encode()) for text in other)
    assert results["eval_other_text_bytes"] == results["eval_other_target_tokens"] == size
    assert results["eval_other_bpb"] == pytest.approx(scores.nats.sum() / math.log(2) / size, rel=1e-5)
    checkpoint = load(str(run / "checkpoint-3"))
    assert checkpoint.prefix_id == 256
    at_three = AutoModelForCausalLM.from_pretrained(run / "checkpoint-3")
    np.testing.assert_array_equal(score(checkpoint, ids, prefix_id=256).nats, score(at_three, ids, prefix_id=256).nats)
