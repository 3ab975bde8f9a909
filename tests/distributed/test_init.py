"""One seed gives one model: plain and partitioned over two ranks by real DeepSpeed ZeRO-3."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launching import environment, free_port, has_compiler, remove_stale_build_locks

pytestmark = pytest.mark.distributed


@pytest.mark.skipif(not has_compiler(), reason="DeepSpeed compiles its CPU communication op with g++")
def test_zero3_gives_the_weights_of_a_plain_build(tmp_path):
    remove_stale_build_locks()
    config = tmp_path / "launch.json"
    (tmp_path / "deepspeed.json").write_text("{}")  # the script brings its own; the launcher insists on a file
    settings = {"distributed_type": "DEEPSPEED", "compute_environment": "LOCAL_MACHINE", "use_cpu": False}
    settings |= {"num_machines": 1, "num_processes": 2, "machine_rank": 0}
    settings |= {"deepspeed_config": {"deepspeed_config_file": str(tmp_path / "deepspeed.json")}}
    config.write_text(json.dumps(settings))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    script = Path(__file__).parent / "check_init.py"
    done = subprocess.run(
        [*launch, "--main_process_port", str(free_port()), str(script)],
        env=environment(DS_ACCELERATOR="cpu"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    results = json.loads(line.removeprefix("RESULT "))
    assert set(results) == {"llama", "gpt2", "mixtral", "mamba"}
    for family, result in results.items():
        assert result["difference"] == 0.0, family
        assert result["world_size"] == 2
        assert result["parameters"] == result["parameters_plain"]
        assert result["partitioned"] == result["tensors"], f"{family}: not everything was partitioned"
