"""Which causal architectures of transformers can be built small, and why the others cannot.

python benchmarks/architectures.py                    # try all
python benchmarks/architectures.py --only llama gpt2
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a config that needs a download is reported, not waited for

import torch

from hfpretrain.small_models import NotBuildable, causal_model_types, tiny_model

SECONDS_PER_TYPE = 120


@contextmanager
def time_limit(seconds: float, *, of_cpu: bool = False) -> Iterator[None]:
    """TimeoutError in the main thread when the block takes longer; of_cpu: counted while this process runs only."""
    number, timer = (signal.SIGPROF, signal.ITIMER_PROF) if of_cpu else (signal.SIGALRM, signal.ITIMER_REAL)

    def stop(*_: object) -> None:
        raise TimeoutError(f"{seconds} s")

    previous = signal.signal(number, stop)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, previous)


def _report(model_type: str) -> bool:
    """Prints one line about `model_type`; whether it was built."""
    start = time.perf_counter()
    built = False
    try:
        with time_limit(SECONDS_PER_TYPE):
            outcome = f"{tiny_model(model_type).num_parameters():,} parameters"
        built = True
    except (NotBuildable, TimeoutError) as error:
        outcome = f"NOT BUILT  {error}"
    print(f"{model_type:28} {time.perf_counter() - start:6.1f} s  {outcome}", flush=True)
    return built


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", metavar="MODEL_TYPE", default=causal_model_types())
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    start = time.perf_counter()
    built = sum([_report(model_type) for model_type in asked.only])
    print(f"{built} of {len(asked.only)} built in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
