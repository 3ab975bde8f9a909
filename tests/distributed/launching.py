"""Start real ranks through `accelerate launch`, with the accelerate configurations that users start from."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
# One folder for all launches of all sessions: DeepSpeed compiles a small op into it once (about 40 s).
EXTENSIONS = REPOSITORY / ".cache" / "torch_extensions"
TOPOLOGIES = ("single", "cpu_ddp", "zero0", "zero1", "zero2", "zero3")


def environment(**extra: str) -> dict[str, str]:
    """The environment of a launch: one thread per rank, no network, the virtual environment's ninja on PATH."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "HFPRETRAIN_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    fixed = {
        "PATH": path,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
    }
    return inherited | fixed | extra


def remove_stale_build_locks() -> None:
    """A run killed while it compiled leaves a lock that hangs every later one."""
    for lock in EXTENSIONS.glob("*/*/lock"):
        lock.unlink()
    EXTENSIONS.mkdir(parents=True, exist_ok=True)


def command(topology: str, script: Path | str, *arguments: str, extra: tuple[str, ...] = ()) -> list[str]:
    """The command line for a topology: `single` is one plain Python process, all others are two ranks."""
    if topology == "single":
        return [sys.executable, str(script), *arguments]
    config = REPOSITORY / "accelerate_configs" / f"{topology}.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config)]
    port = ("--main_process_port", str(free_port())) if "--main_process_port" not in extra else ()
    size = ("--num_processes", "2") if "--num_processes" not in extra else ()
    return [*launch, *port, *size, *extra, str(script), *arguments]


def launch(topology: str, script: Path | str, *arguments: str, timeout: float = 300, **env: str) -> str:
    """Run to the end and return everything printed; a failure shows the end of it."""
    done = subprocess.run(
        command(topology, script, *arguments),
        cwd=REPOSITORY,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{topology} exited with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


def kill_when(run: list[str], folder: Path, *, log: Path) -> None:
    """SIGKILL for the launcher and all ranks as soon as a folder stands there.

    The launcher gives each rank a session of its own: killed with its process group alone, ranks would run to the end.
    """
    with (
        log.open("wb") as out,  # a pipe that nobody reads would fill up and stop the run
        subprocess.Popen(
            run, cwd=REPOSITORY, env=environment(), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        deadline = time.monotonic() + 300
        while not folder.is_dir():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.005)
        launcher = psutil.Process(process.pid)
        family = [launcher, *launcher.children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def has_compiler() -> bool:
    return shutil.which("g++") is not None
