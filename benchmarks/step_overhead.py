"""What our step costs beside a hand-written PyTorch loop: same Llama, same rows, same numbers, one process.

    python benchmarks/step_overhead.py             # about three minutes on two cores
    python benchmarks/step_overhead.py --smoke     # seconds; its ratio means nothing

Both sides start from the same weights and take the same optimizer steps on the same isolated rows in the same
micro-batches: cross-entropy as a sum divided by the step's target tokens, global norm clipped at 1.0, fused AdamW with
our parameter groups. They take turns step by step (ours, loop, ours, loop, ...) in one process, so that a machine that
slows down slows both. Our side is everything that `PretrainTrainer.train` does between two steps: reading and collating
rows, counting, logging, callbacks. The loop gets its batches ready made and does nothing else, which favours it.

Printed are target tokens/s of both, and their ratio as the median over pairs of neighbouring steps (goal: 0.97 or
more). Below the goal, or with --profile, both sides run a few more steps under cProfile, and the functions are listed
in which ours spends more time. That the two do the same work is seen from their losses, printed side by side.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import TrainerCallback

from hfpretrain.arguments import PretrainArguments
from hfpretrain.data.collator import PackedBlocks, PackedCollator
from hfpretrain.data.isolation import Way
from hfpretrain.data.order import BlockOrder
from hfpretrain.data.packing import pack_concat
from hfpretrain.data.steps import TrainingSteps
from hfpretrain.model import build_model, load_config, parameter_count
from hfpretrain.training.optimizer import parameter_groups
from hfpretrain.training.schedule import lr_factor
from hfpretrain.training.trainer import PretrainTrainer
from machine import describe_machine
from memory_tokens import MemoryTokens

GOAL = 0.97
PEAK_LR, WEIGHT_DECAY, BETAS, EPS = 1e-3, 0.1, (0.9, 0.95), 1e-8


def main() -> None:
    options = _options()
    num_steps = options.untimed_steps + options.rounds + options.profiled_steps
    steps = training_steps(options, num_steps)
    models = [llama(options) for _ in range(2)]
    schedule = partial(lr_factor, schedule="constant", num_steps=num_steps, warmup_steps=1)
    loop = HandWrittenLoop(models[1], steps, schedule)
    turns = Turns(loop, options)
    with tempfile.TemporaryDirectory() as folder:
        args = PretrainArguments(
            output_dir=folder,
            max_steps=num_steps,
            per_device_train_batch_size=options.rows_at_once,
            learning_rate=PEAK_LR,
            weight_decay=WEIGHT_DECAY,
            eval_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = PretrainTrainer(
            models[0],
            args,
            train_dataset=steps,
            lr_factor=schedule,
            isolation=[Way("position_ids")],
            callbacks=[turns],
        )
        trainer.train()
    _report(turns, trainer, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="timed optimizer steps of each side")
    parser.add_argument("--untimed_steps", type=int, default=3, help="optimizer steps of each side before them")
    parser.add_argument("--profiled_steps", type=int, default=5, help="optimizer steps of each side in the profile")
    parser.add_argument("--profile", action="store_true", help="profile even if the goal is reached")
    parser.add_argument("--sequence_length", type=int, default=512, help="tokens per row")
    parser.add_argument("--batch_tokens", type=int, default=8192, help="input tokens of one optimizer step")
    parser.add_argument("--rows_at_once", type=int, default=4, help="rows of one micro-batch")
    parser.add_argument("--mean_tokens", type=float, default=300.0, help="mean length of a document, in tokens")
    parser.add_argument("--hidden_size", type=int, default=192, help="width of the Llama")
    parser.add_argument("--layers", type=int, default=4, help="layers of the Llama")
    parser.add_argument("--vocab_size", type=int, default=4096, help="entries of the vocabulary")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few steps, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.untimed_steps, options.profiled_steps = 6, 1, 2
        options.sequence_length, options.batch_tokens = 128, 1024
        options.hidden_size, options.layers, options.vocab_size = 64, 2, 512
    return options


def training_steps(options: argparse.Namespace, num_steps: int) -> TrainingSteps:
    """Random tokens in documents of log-normal length: neither side's speed depends on what the text says."""
    generator = np.random.default_rng(0)
    num_tokens = options.batch_tokens * (num_steps + 1)
    mean = options.mean_tokens
    drawn = generator.lognormal(np.log(mean) - 0.5, 1.0, int(2 * num_tokens / mean) + 100).astype(np.int64)
    lengths = np.maximum(drawn, 3)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1]
    tokens = generator.integers(2, options.vocab_size, int(lengths.sum()), dtype=np.uint16)
    documents: Any = SimpleNamespace(tokens=MemoryTokens(tokens), end_id=1)
    index = pack_concat(lengths, options.sequence_length)
    return TrainingSteps(
        PackedBlocks(documents, index),
        BlockOrder(index.num_blocks, seed=0),
        batch_tokens=options.batch_tokens,
        sequence_length=options.sequence_length,
        per_device_train_batch_size=options.rows_at_once,
        rank=0,
        world_size=1,
        collator=PackedCollator(),
        num_steps=num_steps,
    )


def llama(options: argparse.Namespace) -> Any:
    overrides = {
        "hidden_size": options.hidden_size,
        "intermediate_size": options.hidden_size * 8 // 3,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden_size // 32,
        "num_key_value_heads": options.hidden_size // 32,
        "max_position_embeddings": options.sequence_length,
        "tie_word_embeddings": True,
    }
    config = load_config(model_type="llama", config_overrides=overrides, vocab_size=options.vocab_size)
    return build_model(config, seed=1)


class HandWrittenLoop:
    """The loop that a careful person writes by hand; one call of `step` is one optimizer step."""

    def __init__(self, model: Any, steps: TrainingSteps, schedule: Any) -> None:
        self.model = model.train()
        self.steps = steps
        groups = parameter_groups(model, weight_decay=WEIGHT_DECAY)
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=BETAS, eps=EPS, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)
        self.losses: list[float] = []
        self.target_tokens: list[int] = []
        self.ready = self.batches(0)

    def batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Inputs, positions and targets of all micro-batches of a step; not part of the loop's time."""
        return [
            (micro["input_ids"], micro["position_ids"], F.pad(micro["labels"][:, 1:], (0, 1), value=-100))
            for micro in self.steps[step]
        ]

    def step(self) -> None:
        step_tokens = sum(int((targets != -100).sum()) for _, _, targets in self.ready)
        total = 0.0
        for input_ids, position_ids, targets in self.ready:
            logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / step_tokens
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(total)
        self.target_tokens.append(step_tokens)


class Turns(TrainerCallback):
    """Stops our clock at the end of each of our steps, lets the loop take the same step, and starts it again."""

    def __init__(self, loop: HandWrittenLoop, options: argparse.Namespace) -> None:
        self.loop, self.options = loop, options
        self.ours: list[float] = []  # seconds of each step
        self.loops: list[float] = []
        self.profiles = (cProfile.Profile(), cProfile.Profile())
        self._since = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ours.append(time.perf_counter() - self._since)
        self.profiles[0].disable()
        done = state.global_step
        last_timed = self.options.untimed_steps + self.options.rounds
        if done > last_timed:
            self.profiles[1].enable()
        begin = time.perf_counter()
        self.loop.step()
        self.loops.append(time.perf_counter() - begin)
        self.profiles[1].disable()
        if done == last_timed and self.ratio() >= GOAL and not self.options.profile:
            control.should_training_stop = True
        elif done < len(self.loop.steps):
            self.loop.ready = self.loop.batches(done)
            if done >= last_timed:
                self.profiles[0].enable()
        self._since = time.perf_counter()

    def timed(self) -> slice:
        return slice(self.options.untimed_steps, self.options.untimed_steps + self.options.rounds)

    def ratio(self) -> float:
        """Our speed over the loop's: the median over pairs of steps, which a disturbance of one step does not move."""
        pairs = zip(self.ours[self.timed()], self.loops[self.timed()], strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)


def _report(turns: Turns, trainer: PretrainTrainer, options: argparse.Namespace) -> None:
    loop, timed = turns.loop, turns.timed()
    about = describe_machine(("torch", "transformers", "accelerate"))
    print(*(f"{key}: {value}" for key, value in about.items()), f"threads: {torch.get_num_threads()}", sep=", ")
    print(
        f"Llama of {parameter_count(loop.model):,} parameters, {options.batch_tokens:,} tokens a step in micro-batches "
        f"of {options.rows_at_once} x {options.sequence_length}, {options.rounds} timed steps each, taking turns\n"
    )
    tokens = sum(loop.target_tokens[timed])
    for name, seconds in (("hand-written loop", turns.loops[timed]), ("PretrainTrainer", turns.ours[timed])):
        print(
            f"{name:20}{tokens / sum(seconds):>10,.0f} target tokens/s{1e3 * statistics.median(seconds):>10.1f} ms",
            end="",
        )
        print(f" (median; {1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f})")
    print(f"{'ratio':20}{turns.ratio():>10.4f} (median over pairs of steps; goal {GOAL})")
    pairs = zip(trainer.causal_lm.parameters(), loop.model.parameters(), strict=True)
    apart = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
    first = next(line["loss"] for line in trainer.state.log_history if "loss" in line)
    print(f"same work: first loss {first:.6f} and {loop.losses[0]:.6f}, weights at the end at most {apart:.1e} apart")
    if len(turns.ours) > timed.stop:
        _print_profile(turns, steps=len(turns.ours) - timed.stop)


def _print_profile(turns: Turns, *, steps: int) -> None:
    """The functions whose own time (without what they call) differs most, in ms per step."""
    print(f"\nown time per step in ms, ours and the loop's, largest differences first ({steps} steps under cProfile)")
    stats: list[dict[Any, Any]] = [pstats.Stats(profile).stats for profile in turns.profiles]  # type: ignore[attr-defined]
    rows = []
    for key in stats[0].keys() | stats[1].keys():
        ours, theirs = (1e3 * side[key][2] / steps if key in side else 0.0 for side in stats)
        rows.append((ours - theirs, ours, theirs, key))
    for difference, ours, theirs, (file, line, name) in sorted(rows, key=lambda row: -abs(row[0]))[:15]:
        place = f"{Path(file).parent.name}/{Path(file).name}:{line} " if line else ""
        print(f"{difference:>+9.2f}{ours:>10.2f}{theirs:>10.2f}  {place}{name}")


if __name__ == "__main__":
    main()
