"""A sweep on real ranks: begun under DDP, killed, ended under ZeRO 3, with the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tune_lr
from launching import REPOSITORY, command, kill_when, launch, remove_stale_build_locks
from runs import arguments, write_text

pytestmark = pytest.mark.distributed
RECIPE = REPOSITORY / "recipes" / "tune_lr.py"


def words(folder: Path, output_dir: Path) -> list[str]:
    sizes = "hidden_size=64,intermediate_size=128,num_hidden_layers=1,num_attention_heads=4,num_key_value_heads=4"
    changes = {
        "model_type": "llama",
        "config_overrides": f"{sizes},head_dim=16,max_position_embeddings=32,initializer_range=0.1",
        "max_steps": 6,
        "output_dir": output_dir,
        "save_strategy": "no",
    }
    run = arguments(folder, **changes)
    del run[run.index("--save_steps") : run.index("--save_steps") + 2]
    widths = ["--widths", "16", "32", "--learning_rates", "1e-2", "3e-2", "1e4"]
    return [*run, *widths, "--json", str(output_dir.with_suffix(".json"))]


def test_on_one_process_and_on_two_ranks_that_are_killed(tmp_path: Path) -> None:
    """A rate that diverges stops a trial on all ranks alike, and the next one starts from a clean state."""
    remove_stale_build_locks()
    write_text(tmp_path / "text.jsonl")
    one = tune_lr.main(words(tmp_path, tmp_path / "one"))
    ranks = tmp_path / "ranks"
    run = command("cpu_ddp", RECIPE, *words(tmp_path, ranks))
    kill_when(run, ranks / "width-16" / "lr-0.01" / "seed-42", log=tmp_path / "killed.log")
    done = {path: path.stat().st_mtime_ns for path in ranks.rglob("outcome.json")}
    assert len(done) == 3  # all of width 32, the one that diverges among them
    output = launch("zero3", RECIPE, *words(tmp_path, ranks))
    assert "6 trials, 3 of them done" in output
    assert "learning_rate: 0.03" in output
    assert output.count("for the run's YAML") == 1  # of one rank
    assert {path: path.stat().st_mtime_ns for path in done} == done
    records = [json.loads(path.read_text()) for path in ranks.rglob("run.json")]
    assert [record["world_size"] for record in records] == [2] * 6
    two = json.loads((tmp_path / "ranks.json").read_text())
    for mine, theirs in zip(two["widths"], one["widths"], strict=True):
        assert mine["width"] == theirs["width"]
        losses = [[row["by_seed"][0] for row in width["losses"]] for width in (mine, theirs)]
        assert losses[0][2] is losses[1][2] is None
        assert losses[0][:2] == pytest.approx(losses[1][:2], abs=1e-4)
        assert losses[0][1] < losses[0][0]
