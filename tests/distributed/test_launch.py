"""What was asked of the launcher is what runs, or nothing runs; two machines are as good as one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launching import REPOSITORY, command, environment, free_port, launch, remove_stale_build_locks
from runs import RECIPE, arguments, curve, write_text

pytestmark = pytest.mark.distributed
NO_DROPOUT = {"config_overrides": "n_embd=32,n_layer=2,n_head=4,n_positions=32,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"}


FAULTS_OF_RANK_1 = """
import os, runpy, sys
if os.environ["RANK"] == "1":
    sys.argv += ["--dataset", "gone.jsonl"]
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def _refused(run: list[str], **env: str) -> str:
    done = subprocess.run(
        run, cwd=REPOSITORY, env=environment(**env), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode != 0, done.stdout[-2000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("topology", ["zero2", "zero3"])
def test_two_machines_log_the_same_losses_as_one(topology: str, tmp_path: Path) -> None:
    remove_stale_build_locks()
    write_text(tmp_path / "text.jsonl")
    changes: dict[str, Any] = NO_DROPOUT | {"max_steps": 6, "logging_steps": 1, "eval_steps": 3}
    one, two = tmp_path / "one", tmp_path / "two"
    printed = launch(topology, RECIPE, *arguments(tmp_path, **changes, output_dir=one, probe_step="always"))
    assert "2 full row(s) of 32 forward and backward" in printed  # and yet the curves are the same
    assert f"DeepSpeedEngine at ZeRO {topology[-1]} on 2 process(es)" in printed
    config = tmp_path / "two_machines.yaml"
    multi_node = (REPOSITORY / "accelerate_configs" / "multi_node.yaml").read_text()
    config.write_text(multi_node.replace("ds_configs/zero2.json", f"ds_configs/{topology}.json"))
    port = str(free_port())
    machines = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config)),
                *("--num_machines", "2", "--machine_rank", str(rank), "--num_processes", "2"),
                *("--main_process_ip", "127.0.0.1", "--main_process_port", port),
                *(str(RECIPE), *arguments(tmp_path, **changes, output_dir=two)),
            ],
            cwd=REPOSITORY,
            env=environment(),
            stdout=(tmp_path / f"machine{rank}.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    codes = [machine.wait(timeout=240) for machine in machines]
    assert codes == [0, 0], (tmp_path / "machine0.log").read_text()[-4000:]
    assert curve(two) == curve(one)
    assert sorted(folder.name for folder in two.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]


def test_ranks_and_batches_do_not_change_the_evaluation(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    changes: dict[str, Any] = NO_DROPOUT | {"max_steps": 4, "logging_steps": 1, "eval_steps": 2}
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    launch("single", RECIPE, *arguments(tmp_path, **changes, output_dir=alone, per_device_eval_batch_size=8))
    launch("cpu_ddp", RECIPE, *arguments(tmp_path, **changes, output_dir=ranks, per_device_eval_batch_size=3))
    for mine, theirs in zip(curve(alone), curve(ranks), strict=True):
        assert mine.keys() == theirs.keys()
        np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=2e-5)
    evaluations = [line for line in curve(alone) if "eval_bpb" in line]
    assert evaluations[0]["eval_target_tokens"] == evaluations[0]["eval_text_bytes"]  # the byte tokenizer


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """The order of rows depends on neither, so one process's checkpoint is two ranks' as well."""
    write_text(tmp_path / "text.jsonl")
    changes: dict[str, Any] = NO_DROPOUT | {"max_steps": 6, "logging_steps": 1, "eval_steps": 6}
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    launch("single", RECIPE, *arguments(tmp_path, **changes, output_dir=alone))
    shutil.copytree(alone / "checkpoint-3", moved / "checkpoint-3")
    launch("cpu_ddp", RECIPE, *arguments(tmp_path, **changes, output_dir=moved))
    for mine, theirs in zip(curve(alone), curve(moved), strict=True):
        np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=2e-5)


def test_two_processes_asked_for_and_one_started_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    config = tmp_path / "multi_cpu.yaml"
    config.write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_machines: 1\nnum_processes: 2\n")
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config)]
    message = _refused([*launcher, str(RECIPE), *arguments(tmp_path)])
    assert "several processes were asked for, but accelerate started one" in message
    assert not (tmp_path / "run").exists()


def test_deepspeed_asked_for_and_ddp_started_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    message = _refused(command("zero2", RECIPE, *arguments(tmp_path)), ACCELERATE_USE_CPU="true")
    assert "runs plain DDP in place of DeepSpeed" in message


def test_all_faults_of_a_deepspeed_configuration_come_at_once(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    config = json.loads((REPOSITORY / "ds_configs" / "zero2.json").read_text())
    del config["gradient_clipping"]
    config |= {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    topology = tmp_path / "ds.yaml"
    yaml = (REPOSITORY / "accelerate_configs" / "zero2.yaml").read_text()
    topology.write_text(yaml.replace("ds_configs/zero2.json", str(tmp_path / "ds.json")))
    run = command("zero2", RECIPE, *arguments(tmp_path))
    run[run.index("--config_file") + 1] = str(topology)
    message = _refused(run)
    assert "3 problems" in message
    for word in ("optimizer block", "scheduler block", "without gradient_clipping"):
        assert message.count(word) == 1  # said once, not by every rank


def test_what_one_rank_alone_stumbles_over_stops_all_with_one_list(tmp_path: Path) -> None:
    """A machine without the data, and a batch that is wrong on both: rank 0 tells of both, once."""
    write_text(tmp_path / "text.jsonl")
    worker = tmp_path / "worker.py"
    worker.write_text(FAULTS_OF_RANK_1)
    message = _refused(command("cpu_ddp", worker, str(RECIPE), *arguments(tmp_path, batch_tokens=250)))
    assert message.count("2 problems with this run") == 1
    assert message.count("gone.jsonl  (command line, on rank 1 only)") == 1
    assert message.count("remedy: the nearest that fit: 224, 256") == 1
    assert not (tmp_path / "run").exists()
