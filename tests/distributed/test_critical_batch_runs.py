"""The recipes on a real run: a batch that follows the measured noise scale, its log read, and branches from it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import critical_batch
from hfpretrain.training.checkpoints import list_checkpoints
from launching import environment, launch
from runs import RECIPE, arguments, curve, weights_hash, write_text

pytestmark = pytest.mark.distributed


def test_adaptive_run_its_resume_its_log_and_its_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "text.jsonl", 100)
    settings = {
        "batch_ramp": "noise_scale:64,factor:0.01,steps:4",  # a threshold that any noise scale is above
        "per_device_train_batch_size": 1,
        "log_noise_scale": 1,
        "logging_steps": 1,
        "save_steps": 10,
        "save_total_limit": "none",
        "warmup_fraction": 0.01,
        "decay_fraction": 0.1,
    }
    words = arguments(tmp_path, **settings)
    position = words.index("--max_steps")
    words[position : position + 2] = ["--total_tokens", "8Ki"]
    straight = tmp_path / "run"
    output = launch("single", RECIPE, *words)
    assert "at most 128 steps" in output
    lines = [line for line in curve(straight) if "loss" in line]
    grown = [line["step"] for line in lines if "next_batch_tokens" in line]
    assert [line["batch_tokens"] for line in lines] == [
        64 * 2 ** sum(step + 1 < line["step"] for step in grown) for line in lines
    ]
    assert {line["batch_tokens"] for line in lines} == {64, 128, 256}
    assert 8192 - 256 < lines[-1]["input_tokens"] <= 8192
    for step in grown:
        assert all("noise_scale_tokens" in line for line in lines if step - 4 <= line["step"] <= step)
        assert f"step {step}: the batch grows" in output
    assert lines[grown[0] - 1]["learning_rate"] == pytest.approx(3e-3 / 2)  # sqrt(64 / 256)
    assert lines[grown[0] + 1]["learning_rate"] == pytest.approx(3e-3 / math.sqrt(2))

    # From the checkpoint before the second growth, in another folder: bitwise the same.
    checkpoint = straight / f"checkpoint-{grown[1] // 10 * 10}"
    again = tmp_path / "again"
    words[words.index("--output_dir") + 1] = str(again)
    launch("single", RECIPE, *words, "--resume_from_checkpoint", str(checkpoint))
    assert curve(again) == curve(straight)
    assert weights_hash(again) == weights_hash(straight)
    assert json.loads((again / "run.json").read_text())["parent"] == str(checkpoint)

    out = tmp_path / "found.json"
    critical_batch.main([str(straight), "--json", str(out), "--png", str(tmp_path / "found.png")])
    (run,) = json.loads(out.read_text())["runs"]
    assert run["noise_scale_tokens"] > 0
    assert run["parameters"] == json.loads((straight / "run.json").read_text())["model_parameters"]

    # Branches: at the same batch the parent's own steps, to the last bit; at twice the batch half as many.
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    words = ["--probe", str(checkpoint), "--probe_factors", "1", "2", "--probe_tokens", "1024", "--json", str(out)]
    critical_batch.main(words)
    losses = json.loads(out.read_text())["losses"]
    done = int(checkpoint.name.partition("-")[2])
    batch = lines[done - 1]["batch_tokens"]
    folders = [tmp_path / "run-probe" / f"{checkpoint.name}-1024-x{factor}" for factor in (1, 2)]
    for factor, folder in zip((1, 2), folders, strict=True):
        after = [line for line in curve(folder) if "loss" in line and line["step"] > done]
        assert len(after) == 1024 // (factor * batch)
        assert {line["batch_tokens"] for line in after} == {factor * batch}
        assert after[-1]["input_tokens"] == lines[done - 1]["input_tokens"] + 1024
        (rate,) = {line["learning_rate"] for line in after}
        assert rate == pytest.approx(lines[done]["learning_rate"] * math.sqrt(factor), rel=1e-12)
        assert losses[str(factor)] == curve(folder)[-1]["eval_loss"]
        assert json.loads((folder / "run.json").read_text())["parent"] == str(checkpoint)
        if factor == 1:
            same = [line for line in lines if done < line["step"] <= min(grown[1] + 1, done + len(after))]
            assert same
            for mine, parents in zip(after, same, strict=False):
                assert mine["loss"] == parents["loss"]
                assert mine["grad_norm"] == parents["grad_norm"]
    written = [path / name for path in (straight, *folders) for name in ("run.json", "trainer_state.json")]
    before = [path.stat().st_mtime_ns for path in written]
    critical_batch.main(words)  # all branches are done
    assert [path.stat().st_mtime_ns for path in written] == before
    assert len(list_checkpoints(straight)) == len(list(straight.glob("checkpoint-*"))) == lines[-1]["step"] // 10 + 1
