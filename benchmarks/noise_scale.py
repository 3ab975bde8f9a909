"""What measuring the gradient noise scale costs: a step with it against a step without, one process.

    python benchmarks/noise_scale.py             # about two minutes on two cores
    python benchmarks/noise_scale.py --smoke     # seconds; its ratio means nothing

One run of `PretrainTrainer` in which every other step is measured (hooks on) and the others are not (hooks off), so
that a machine that slows down slows both. Printed is their ratio, as the median over pairs of neighbouring steps (goal:
1.03 or less), in time on the clock and in this process's time on the CPU, which hardly depends on what else runs. The
model is the demo's, in micro-batches of half its step: the smaller a micro-batch, the more it costs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import TrainerCallback

from hfpretrain.arguments import PretrainArguments
from hfpretrain.data.isolation import Way
from hfpretrain.model import parameter_count
from hfpretrain.training.trainer import PretrainTrainer
from machine import describe_machine
from step_overhead import llama, training_steps

GOAL = 1.03


def main() -> None:
    options = _options()
    steps = training_steps(options, 2 * (options.untimed_pairs + options.pairs) + 1)
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder:
        args = PretrainArguments(
            output_dir=folder,
            max_steps=len(steps),
            per_device_train_batch_size=options.rows_at_once,
            learning_rate=1e-3,
            logging_steps=50,
            eval_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = PretrainTrainer(
            llama(options),
            args,
            train_dataset=steps,
            lr_factor=lambda step: 1.0,
            isolation=[Way("position_ids")],
            log_noise_scale=1,
            callbacks=[turns],
        )
        turns.trainer = trainer
        trainer.train()
    _report(turns, trainer, options)


class Turns(TrainerCallback):
    """Hooks on before even steps, off before odd ones; (clock, CPU) seconds from one step's beginning to the next."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.seconds: list[tuple[float, float]] = []
        self._since: tuple[float, float] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._since is not None:
            clock, cpu = self._since
            self.seconds.append((time.perf_counter() - clock, time.process_time() - cpu))
        noise = self.trainer.noise_scale
        if state.global_step % 2:
            noise.remove()
        else:
            noise.attach()
        self._since = (time.perf_counter(), time.process_time())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=150, help="timed pairs of steps")
    parser.add_argument("--untimed_pairs", type=int, default=5, help="pairs of steps before them")
    parser.add_argument("--sequence_length", type=int, default=256, help="tokens per row")
    parser.add_argument("--batch_tokens", type=int, default=1024, help="input tokens of one optimizer step")
    parser.add_argument("--rows_at_once", type=int, default=2, help="rows of one micro-batch")
    parser.add_argument("--mean_tokens", type=float, default=300.0, help="mean length of a document, in tokens")
    parser.add_argument("--hidden_size", type=int, default=192, help="width of the Llama")
    parser.add_argument("--layers", type=int, default=4, help="layers of the Llama")
    parser.add_argument("--vocab_size", type=int, default=2048, help="entries of the vocabulary")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few steps, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.pairs, options.untimed_pairs = 5, 1
        options.sequence_length, options.batch_tokens = 64, 256
        options.hidden_size, options.layers, options.vocab_size = 64, 2, 512
    return options


def _report(turns: Turns, trainer: PretrainTrainer, options: argparse.Namespace) -> None:
    about = describe_machine(("torch", "transformers"))
    print(*(f"{key}: {value}" for key, value in about.items()), f"threads: {torch.get_num_threads()}", sep=", ")
    micro_batches = options.batch_tokens // (options.rows_at_once * options.sequence_length)
    print(
        f"Llama of {parameter_count(trainer.causal_lm):,} parameters, {options.batch_tokens:,} tokens a step in "
        f"{micro_batches} micro-batches, {options.pairs} timed pairs of steps"
    )
    timed = turns.seconds[2 * options.untimed_pairs :]
    for index, kind in enumerate(("clock", "CPU")):
        measured, plain = ([seconds[index] for seconds in timed[first::2]] for first in (0, 1))
        ratios = sorted(a / b for a, b in zip(measured, plain, strict=True))
        quarter = len(ratios) // 4
        print(
            f"{kind:7}{1e3 * statistics.median(measured):>9.2f} ms with, {1e3 * statistics.median(plain):.2f} without"
            f"{statistics.median(ratios):>9.4f} ratio (half of the pairs {ratios[quarter]:.3f} to "
            f"{ratios[-quarter - 1]:.3f}; goal {GOAL})"
        )
    assert trainer.noise_scale is not None
    print(f"{trainer.noise_scale.average.measured} steps measured: {trainer.noise_scale.metrics()}")


if __name__ == "__main__":
    main()
