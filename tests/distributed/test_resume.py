"""Interrupted = uninterrupted, bitwise: kill -9 in the middle, run the same command again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from launching import command, kill_when, launch, remove_stale_build_locks
from runs import RECIPE, arguments, curve, weights_hash, write_text

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("topology", ["single", "zero2", "zero3"])
def test_killed_and_repeated_run_is_the_uninterrupted_one(topology: str, tmp_path: Path) -> None:
    remove_stale_build_locks()
    write_text(tmp_path / "text.jsonl")
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    # With muP the trainer compares the engine's rates with muP's ratios at every log line, after the resume as well.
    changes: dict[str, Any] = {"mup_base_width": 16} if topology == "zero3" else {}
    first = launch(topology, RECIPE, *arguments(tmp_path, output_dir=straight, **changes))
    run = command(topology, RECIPE, *arguments(tmp_path, output_dir=broken, **changes))
    kill_when(run, broken / "checkpoint-6", log=tmp_path / "broken.log")
    assert not (broken / "checkpoint-12").exists(), "it was not interrupted"
    output = launch(topology, RECIPE, *arguments(tmp_path, output_dir=broken, **changes))
    assert ("muP from base width 16 to 32" in first) == bool(changes)
    config = json.loads((broken / "config.json").read_text())
    assert config.get("mup") == json.loads((broken / "run.json").read_text())["mup"]
    assert "tokenising" not in output
    assert curve(broken) == curve(straight)
    assert weights_hash(broken) == weights_hash(straight)
    assert [line["step"] for line in curve(straight) if "loss" in line] == [1, 2, 4, 6, 8, 10, 12, 14]
    assert curve(straight)[-1]["epoch"] > 2  # the kill fell into the second epoch's data
    assert json.loads((broken / "run.json").read_text())["earlier_launches"][0]["was"] == {}
    loads_in_stock_transformers(straight)


def loads_in_stock_transformers(run: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run)
    logits = model(torch.tensor([[256, 97, 98]])).logits
    assert logits.shape == (1, 3, 258)
    assert torch.isfinite(logits).all()


def test_sigterm_to_one_rank_saves_on_all_and_the_same_command_goes_on(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    launch("cpu_ddp", RECIPE, *arguments(tmp_path, output_dir=straight, save_steps=1000))
    worker = Path(__file__).with_name("stopping_worker.py")
    output = launch("cpu_ddp", worker, *arguments(tmp_path, output_dir=stopped, save_steps=1000))
    assert "stopped   after step 5" in output
    assert [folder.name for folder in stopped.glob("checkpoint-*")] == ["checkpoint-5"]
    assert not (stopped / "model.safetensors").exists()
    launch("cpu_ddp", RECIPE, *arguments(tmp_path, output_dir=stopped, save_steps=1000))
    assert curve(stopped) == curve(straight)
    assert weights_hash(stopped) == weights_hash(straight)
