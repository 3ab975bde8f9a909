"""Noise scales of a known law are read back from logs; ramps and verdicts are those that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import critical_batch
from hfpretrain.arguments.types import batch_ramp
from hfpretrain.errors import ConfigError
from hfpretrain.planning.critical_batch import (
    Reading,
    largest_harmless,
    loss_after,
    proposed_ramp,
    readings,
    settled_noise_scale,
)
from hfpretrain.training.branch import branch_point


def line(tokens: int, least: float | None, *, batch: int = 64, loss: float = 3.0) -> Reading:
    return Reading(tokens, loss, batch, None if least is None else least + 1, None if least is None else 1.0)


def test_readings_are_in_input_positions() -> None:
    """Half of the positions are targets, so 100 targets of noise are 200 positions of a batch."""
    known = {"noise_scale_tokens": 100.0, "noise_scale_stderr_tokens": 10.0}
    logged = {"loss": 2.0, "input_tokens": 400, "target_tokens": 200, "batch_tokens": 40}
    got = readings([logged | known, {"eval_loss": 1.0}, logged, {"train_runtime": 3.0}])
    assert got == [Reading(400, 2.0, 40, 200.0, 20.0), Reading(400, 2.0, 40, None, None)]
    assert (got[0].least, got[1].least) == (180.0, None)


def test_settled() -> None:
    assert settled_noise_scale([line(n, n) for n in range(1, 9)]) == (8.5, 1.0)  # the last two of eight: 7 + 1, 8 + 1
    assert settled_noise_scale([line(1, None)]) is None
    assert settled_noise_scale([]) is None


def test_a_ramp_that_doubles_where_the_noise_scale_passes_it() -> None:
    """Noise 3, 6, 9, ... rows of 10 at 100, 200, ...: above 4 rows from 200, 8 from 300, 16 from 600, 32 from 1100."""
    lines = [line(100 * n, 30.0 * n) for n in range(1, 13)]
    assert proposed_ramp(lines, sequence_length=10) == [
        (0, 20),
        (200, 40),
        (300, 80),
        (600, 160),
    ]  # 1100: too few after
    assert proposed_ramp(lines, sequence_length=10, hold=2)[-1] == (1100, 320)
    assert proposed_ramp(lines, sequence_length=10, smallest_rows=3) == [(0, 30), (200, 60), (400, 120), (800, 240)]
    assert proposed_ramp(lines, sequence_length=10, smallest_rows=1000) == [(0, 10_000)]
    assert proposed_ramp(lines[:2], sequence_length=10) == []


def test_a_ramp_neither_follows_an_outlier_nor_shrinks() -> None:
    noise = [25.0, 25, 25, 900, 25, None, 25, 45, 45, 45, 25, 170, 170, 170]
    lines = [line(10 * (n + 1), least) for n, least in enumerate(noise)]
    assert proposed_ramp(lines, sequence_length=10) == [(0, 20), (80, 40), (120, 160)]  # two doublings at once


def test_probe_verdict() -> None:
    assert largest_harmless({1: 3.0, 2: 3.0, 4: 3.01, 8: 3.03}) == 4
    assert largest_harmless({1: 3.0, 2: 2.95, 4: 3.0}) == 2  # 4 is no worse than 1, but worse than 2
    assert largest_harmless({1: 3.0, 2: 3.2, 4: 3.005}) == 4
    assert largest_harmless({2: 9.0}) == 2
    with pytest.raises(ValueError, match="no loss"):
        largest_harmless({})


def test_loss_after_weights_lines_by_tokens() -> None:
    lines = [line(10, None, loss=9.0), line(20, None, loss=1.0), line(50, None, loss=3.0)]
    assert loss_after(lines, 10) == (10 * 1.0 + 30 * 3.0) / 40
    assert loss_after(lines, 15) == 3.0
    with pytest.raises(ValueError, match="log more often"):
        loss_after(lines, 21)


def write_run(folder: Path, *, parameters: int, noise: Any, checkpoint_only: bool = False) -> Path:
    """A run of 100 lines, 1000 tokens each, nine targets in ten positions."""
    target = folder / "checkpoint-100" if checkpoint_only else folder
    target.mkdir(parents=True)
    log: list[dict[str, Any]] = [
        {
            "loss": 5.0 - n / 50,
            "input_tokens": 1000 * n,
            "target_tokens": 900 * n,
            "batch_tokens": 1000,
            "noise_scale_tokens": 0.9 * noise(1000 * n),
            "noise_scale_stderr_tokens": 0.9,
            "step": n,
        }
        for n in range(1, 101)
    ]
    (target / "trainer_state.json").write_text(json.dumps({"log_history": [*log, {"eval_loss": 3.0}]}))
    plan = {"sequence_length": 50, "world_size": 2}
    (folder / "run.json").write_text(json.dumps({"model_parameters": parameters, "plan": plan}))
    return folder


def test_the_recipe_recovers_a_known_law(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B = 3 N^0.4 at the end of each run, and within a run B = 0.02 tokens: doublings at 50 times the batch."""
    sizes = (10_000, 100_000, 1_000_000)
    runs = [
        write_run(tmp_path / str(n), parameters=n, noise=lambda _, n=n: 3 * n**0.4, checkpoint_only=n == sizes[0])
        for n in sizes
    ]
    out = tmp_path / "found.json"
    critical_batch.main([*map(str, runs), "--json", str(out), "--png", str(tmp_path / "found.png")])
    found = json.loads(out.read_text())
    assert found["law"]["exponent"] == pytest.approx(0.4, rel=1e-9)
    assert found["law"]["scale"] == pytest.approx(3.0, rel=1e-9)
    assert found["runs"][1]["noise_scale_tokens"] == pytest.approx(300.0)
    assert found["runs"][1]["proposed_ramp"] == "0:200"  # of 2 processes' 100 tokens: 200 is below 299, 400 is not
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "B = 3 N^0.400" in printed
    assert "1.30     4.33" in printed  # S/Smin = 1 + 300/1000, E/Emin = 1 + 1000/300
    growing = write_run(tmp_path / "growing", parameters=5, noise=lambda tokens: 0.02 * tokens)
    critical_batch.main([str(growing), "--json", str(out)])
    (run,) = json.loads(out.read_text())["runs"]
    assert batch_ramp(run["proposed_ramp"]) == ((0, 100), (11_000, 200), (21_000, 400), (41_000, 800), (81_000, 1600))


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run"):
        critical_batch.main([str(tmp_path)])
    folder = write_run(tmp_path / "a", parameters=5, noise=lambda tokens: 1.0)
    state = json.loads((folder / "trainer_state.json").read_text())
    state["log_history"] = [{k: v for k, v in entry.items() if "noise" not in k} for entry in state["log_history"]]
    (folder / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="train with --log_noise_scale 1"):
        critical_batch.main([str(folder)])
    for words in ([], [str(folder), "--probe", "x"], ["--probe", "x"]):
        with pytest.raises(SystemExit):
            critical_batch.main(words)


def write_checkpoint(folder: Path, *, rate: float = 1e-3, rule: str = "sqrt", world_size: int = 1) -> Path:
    """After 7 steps: 3 of 2 rows and 4 of 5 rows of 10 tokens; a stage that was only planned comes later."""
    checkpoint = folder / "checkpoint-7"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    state = {
        "data_position": {"step": 7},
        "fingerprint": {"sequence_length": 10},
        "batch": {"stages": [[0, 2], [3, 5], [9, 50]], "adaptive": None},
        "world_size": world_size,
    }
    (checkpoint / "pretrain_state.json").write_text(json.dumps(state))
    torch.save({"_last_lr": [rate, rate]}, checkpoint / "scheduler.pt")
    arguments = {
        "model": {"model_type": "gpt2", "config_overrides": {"n_embd": 32}, "tokenizer_name": None},
        "data": {"dataset": ["a", "b"], "sequence_length": 10},
        "training": {"learning_rate": 5.0, "decay_fraction": 0.5, "seed": 7, "batch_ramp": "x", "adam_beta2": 0.9},
    }
    named = ["model_type", "config_overrides", "dataset", "sequence_length", "learning_rate", "decay_fraction", "seed"]
    record = {"arguments": arguments, "sources": dict.fromkeys([*named, "batch_ramp"], "command line")}
    (folder / "run.json").write_text(json.dumps(record | {"plan": {"lr_rule": rule}}))
    return checkpoint


def test_a_branch_keeps_the_past_and_changes_batch_and_rate(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "run")
    point = branch_point(checkpoint, factors=[1, 2, 4], tokens=400)
    assert (point.tokens, point.batch_tokens) == (3 * 20 + 4 * 50, 50)
    got = yaml.safe_load(yaml.safe_dump(point.branch(4, tokens=400, output_dir=tmp_path / "x4")))
    assert got == {
        "model_type": "gpt2",
        "config_overrides": {"n_embd": 32},
        "dataset": ["a", "b"],
        "sequence_length": 10,
        "seed": 7,
        "output_dir": str(tmp_path / "x4"),
        "resume_from_checkpoint": str(checkpoint),
        "batch_ramp": "0:20,60:50,260:200",
        "total_tokens": 660,
        "learning_rate": pytest.approx(2e-3),
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "save_steps": 1,
        "save_total_limit": 1,
    }
    same = point.branch(1, tokens=400, output_dir=tmp_path / "x1")
    assert (same["batch_ramp"], same["learning_rate"], same["save_steps"]) == ("0:20,60:50", 1e-3, 4)
    linear = branch_point(write_checkpoint(tmp_path / "sgd", rule="linear"), factors=[4], tokens=400)
    assert linear.at_batch(4) == pytest.approx(4e-3)
    begun = tmp_path / "x4" / "checkpoint-8"
    begun.mkdir(parents=True)
    (begun / "trainer_state.json").write_text("{}")
    assert point.branch(4, tokens=400, output_dir=tmp_path / "x4")["resume_from_checkpoint"] == str(begun)


def test_what_cannot_be_probed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        branch_point(tmp_path, factors=[1], tokens=50)
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError) as caught:
        branch_point(write_checkpoint(tmp_path / "a", rate=0.0), factors=[1, 2, 3], tokens=100)
    told = str(caught.value)
    assert len(caught.value.problems) == 2
    assert "come down to 0" in told
    assert "100 are no whole steps of 150" in told
    for factors in ([1, 1], [0, 2], []):
        with pytest.raises(ConfigError, match="whole numbers of at least 1, each once"):
            branch_point(write_checkpoint(tmp_path / str(factors)), factors=factors, tokens=100)
    several = write_checkpoint(tmp_path / "b", world_size=2)
    with pytest.raises(ConfigError, match="the run had 2 processes"):
        critical_batch.main(["--probe", str(several), "--probe_factors", "1", "--probe_tokens", "100"])
