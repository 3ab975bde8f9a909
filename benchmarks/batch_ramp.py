"""Small, middle and large fixed batches against a ramp read off the small one's noise scale: steps, tokens to a loss.

    python benchmarks/batch_ramp.py --folder runs/batch_ramp     # about half an hour on one core; docs/noise_scale.png

A 0.43M-parameter Llama on this Python's standard library, 4Mi tokens each, at a constant learning rate after a warm-up
(so that runs can be compared at every point), scaled by the square root of the batch. Finished runs in the folder are
read again. One seed: differences of a few percent mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hfpretrain.planning.critical_batch import proposed_ramp, readings
from machine import describe_machine

REPOSITORY = Path(__file__).resolve().parents[1]
LARGEST, LEARNING_RATE, ROW = 16_384, 6e-3, 128
SIZES = "hidden_size=96,intermediate_size=256,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=4"
SHARED = {
    "dataset": "stdlib",
    "tokenizer_name": "train:1024",
    "validation_fraction": 0.004,
    "sequence_length": ROW,
    "model_type": "llama",
    "config_overrides": f"{SIZES},max_position_embeddings={ROW},tie_word_embeddings=true",
    "per_device_eval_batch_size": 64,
    "total_tokens": "4Mi",
    "lr_scheduler_type": "constant",
    "warmup_fraction": 0.05,
    "save_steps": 100_000,
    "disable_tqdm": "true",
}
# batch tokens, rows at once, steps between log lines, evaluations and noise scales
FIXED = {"small": (1024, 4, 25, 100, 5), "middle": (4096, 16, 10, 25, 2), "large": (LARGEST, 32, 2, 6, 1)}


def train(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """The log of a run; a finished one is read again."""
    state = folder / "trainer_state.json"
    if not state.exists():
        words = [str(w) for name, value in (SHARED | settings).items() for w in (f"--{name}", value)]
        script = str(REPOSITORY / "recipes" / "pretrain.py")
        subprocess.run([sys.executable, script, "--output_dir", str(folder), *words], check=True)
    history: list[dict[str, Any]] = json.loads(state.read_text())["log_history"]
    return history


def scores(history: Sequence[dict[str, Any]], tokens_of: dict[int, int]) -> list[tuple[int, int, float]]:
    """(step, tokens, held-out loss) of every evaluation."""
    found = {line["step"]: line["eval_loss"] for line in history if "eval_loss" in line}
    return [(step, tokens_of[step], loss) for step, loss in sorted(found.items())]


def tokens_by_step(history: Sequence[dict[str, Any]], stages: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Step -> input tokens, for stages of (tokens seen, batch tokens); each begins at the first step boundary."""
    last = max(line["step"] for line in history)
    tokens, result = 0, {}
    for step in range(1, last + 1):
        tokens += [batch for mark, batch in stages if mark <= tokens][-1]
        result[step] = tokens
    return result


def reaching(points: Sequence[tuple[int, int, float]], target: float) -> tuple[int, int] | None:
    """(steps, tokens) when the held-out loss first passes the target, between evaluations in proportion."""
    for (step, tokens, loss), (next_step, next_tokens, next_loss) in pairwise(points):
        if next_loss <= target < loss:
            share = (loss - target) / (loss - next_loss)
            return round(step + share * (next_step - step)), round(tokens + share * (next_tokens - tokens))
    return None


def draw(curves: dict[str, list[tuple[int, int, float]]], noise: dict[str, list[Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    scale, by_steps, by_tokens = figure.subplots(1, 3)
    for name, lines in noise.items():
        defined = [line for line in lines if line.least is not None]
        scale.plot([line.loss for line in defined], [line.noise_scale_tokens for line in defined], label=name)
    scale.set(yscale="log", xlabel="loss (nats)", ylabel="tokens", title="noise scale as the loss falls")
    scale.invert_xaxis()
    for name, points in curves.items():
        by_steps.plot([step for step, _, _ in points], [loss for _, _, loss in points], label=name)
        by_tokens.plot([tokens for _, tokens, _ in points], [loss for _, _, loss in points], label=name)
    by_steps.set(xscale="log", xlabel="optimizer steps", ylabel="held-out loss (nats)", title="steps")
    by_tokens.set(xscale="log", xlabel="tokens", title="tokens")
    for axes in (scale, by_steps, by_tokens):
        axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/batch_ramp"), help="where the runs are")
    parser.add_argument("--png", type=Path, default=REPOSITORY / "docs" / "noise_scale.png")
    args = parser.parse_args()
    print(", ".join(f"{k} {v}" for k, v in describe_machine(("torch", "transformers")).items()))
    curves, noise = {}, {}
    for name, (batch, rows, log, evaluate, measure) in FIXED.items():
        history = train(
            args.folder / name,
            batch_tokens=batch,
            per_device_train_batch_size=rows,
            learning_rate=LEARNING_RATE * (batch / LARGEST) ** 0.5,
            logging_steps=log,
            eval_steps=evaluate,
            log_noise_scale=measure,
        )
        curves[f"{name}, {batch:,}"] = scores(history, tokens_by_step(history, [(0, batch)]))
        noise[f"batch {batch:,}"] = readings(history)
    stages = [s for s in proposed_ramp(noise["batch 1,024"], sequence_length=ROW, smallest_rows=8) if s[1] <= LARGEST]
    ramp = ",".join(f"{tokens:_}:{batch:_}" for tokens, batch in stages)
    settings = {"batch_ramp": ramp, "per_device_train_batch_size": 8, "learning_rate": LEARNING_RATE}
    history = train(args.folder / "ramp", **settings, logging_steps=10, eval_steps=15)
    curves["ramp"] = scores(history, tokens_by_step(history, stages))
    print(f"ramp {ramp}\n{'held-out loss':>14}" + "".join(f"{name:>24}" for name in curves))
    for target in (4.5, 4.0, 3.5, 3.31):
        cells = [reaching(points, target) for points in curves.values()]
        print(f"{target:14}" + "".join(f"{f'{c[0]:,} steps {c[1]:,}' if c else 'not reached':>24}" for c in cells))
    last = [f"{points[-1][2]:.4f} in {points[-1][0]:,} steps" for points in curves.values()]
    print(f"{'after 4Mi':>14}" + "".join(f"{cell:>24}" for cell in last))
    draw(curves, noise, args.png)


if __name__ == "__main__":
    main()
