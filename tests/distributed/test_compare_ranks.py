"""`recipes/compare_bpb.py` on two ranks says what one process says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compare_bpb
from comparison import LOSSY_ID, RECIPE, arguments, build_world
from launching import launch

pytestmark = pytest.mark.distributed


def test_two_ranks_score_as_one_process(tmp_path: Path) -> None:
    build_world(tmp_path)
    # 16 positions and few rows: many windows, an odd number of batches, a document over several ranks.
    choices = ("--max_length", "16", "--stride", "8", "--batch_size", "3")
    results: list[dict[str, Any]] = []
    for name in ("alone", "ranks"):
        output = tmp_path / f"{name}.json"
        argv = arguments(tmp_path, "bytes bpe nfc", *choices, output=output)
        if name == "alone":
            compare_bpb.main(argv)
        else:
            printed = launch("cpu_ddp", RECIPE, *argv)
            assert printed.count("bits per byte of the whole text") == 1  # rank 0 alone prints
        results.append(json.loads(output.read_text(encoding="utf-8")))
    alone, ranks = results
    assert (alone["choices"].pop("ranks"), ranks["choices"].pop("ranks")) == (1, 2)
    assert alone["data"] == ranks["data"]
    assert list(ranks["data"]["lossy"]) == [LOSSY_ID]
    for mine, theirs in zip(alone["documents"], ranks["documents"], strict=True):
        assert mine["tokens"] == theirs["tokens"]
        np.testing.assert_allclose(list(mine["nats"].values()), list(theirs["nats"].values()), rtol=1e-6)
    for name, model in alone["models"].items():
        assert ranks["models"][name]["bpb"] == pytest.approx(model["bpb"], rel=1e-6)
        assert ranks["models"][name]["interval"] == pytest.approx(model["interval"], rel=1e-6)
        assert ranks["models"][name]["fingerprint"] == model["fingerprint"]
    for mine, theirs in zip(alone["pairs"], ranks["pairs"], strict=True):
        assert theirs["difference"] == pytest.approx(mine["difference"], rel=1e-5)
        assert theirs["better_documents"] == mine["better_documents"]
