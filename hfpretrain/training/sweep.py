"""Run the trials of a sweep one after another in this process, on all ranks alike."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hfpretrain.training.spikes import ConsecutiveSpikesError
from hfpretrain.training.step import NonFiniteLossError
from hfpretrain.training.trials import SETTINGS, Trial, record_outcome


def run_trials(trials: Sequence[Trial], train: Callable[[list[str]], None], *, rank: int) -> None:
    """Run those that are not done; one that diverges is done, too.

    Args:
        train: what a command line of `recipes/pretrain.py` runs.
        rank: of this process; rank 0 reads, writes and reports.

    Raises:
        SystemExit: a trial was stopped by a signal; the same sweep goes on with it.
    """
    todo = from_first_rank([number for number, trial in enumerate(trials) if not trial.done])
    seconds: dict[int, list[float]] = {}
    say: Callable[[str], None] = (lambda line: print(line, flush=True)) if rank == 0 else (lambda _: None)
    say(f"sweep     {len(trials)} trials, {len(trials) - len(todo)} of them done")
    for position, number in enumerate(todo):
        trial, started = trials[number], time.monotonic()
        if rank == 0:
            trial.write()
        from_first_rank(None)  # the others wait for the file
        diverged = run_trial(trial, train, rank=rank)
        outcome = from_first_rank(record_outcome(trial, diverged=diverged) if rank == 0 else None)
        if outcome is None:
            raise SystemExit(f"{trial} was stopped; the same command goes on" if rank == 0 else 1)
        seconds.setdefault(trial.width, []).append(time.monotonic() - started)
        left = remaining_seconds([trials[later].width for later in todo[position + 1 :]], seconds)
        result = f"diverged, {outcome.why}" if outcome.loss is None else f"{outcome.loss:.4f} nats"
        say(f"{position + 1:4} of {len(todo)}  {trial}: {result}; about {left / 60:.0f} min left")


def run_trial(trial: Trial, train: Callable[[list[str]], None], *, rank: int = 0) -> str:
    """One trial, its output in `log.txt` beside its settings; why it diverged, or ""."""
    log = trial.folder / ("log.txt" if rank == 0 else f"log-rank-{rank}.txt")
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        with output_in(log):
            train(["--config", str(trial.folder / SETTINGS)])
    except (NonFiniteLossError, ConsecutiveSpikesError) as error:  # on all ranks alike
        return str(error)
    except Exception:
        print(f"{trial} failed; what it said before is in {log}", file=sys.stderr, flush=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, on_terminate)  # a run that ends early leaves its own
        gc.collect()  # trainers and models hold one another
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return ""


@contextlib.contextmanager
def output_in(path: Path) -> Iterator[None]:
    """Everything that is written to the terminal, by libraries too, goes to the end of a file instead."""
    _flush()
    kept = [(descriptor, os.dup(descriptor)) for descriptor in (1, 2)]
    with path.open("ab") as file:
        for descriptor, _ in kept:
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        _flush()
        for descriptor, copy in kept:
            os.dup2(copy, descriptor)
            os.close(copy)


def from_first_rank(value: Any) -> Any:
    """Rank 0's value, on every rank: what it reads from a disk, the others might read a moment later."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def remaining_seconds(widths: Sequence[int], seconds: Mapping[int, Sequence[float]]) -> float:
    """Of trials of these widths, by the means of those that ran; where none of a width did, by the slowest."""
    means = {width: sum(took) / len(took) for width, took in seconds.items()}
    return sum(means.get(width, max(means.values())) for width in widths)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
