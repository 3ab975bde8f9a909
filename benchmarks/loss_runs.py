"""Whole runs of the demo: the same curve on both paths of the loss; log Z with and without z-loss.

python benchmarks/loss_runs.py paths    # at the head and from the logits, z-loss off
python benchmarks/loss_runs.py drift    # a learning rate that is far too high: a table, and docs/z_loss.png
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hfpretrain.loss import fuse, head
from hfpretrain.loss.verify import Verdict
from machine import describe_machine

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "recipes"))
import pretrain  # noqa: E402


def run(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """The log lines of the demo with `changes` to its arguments; a finished run of the same folder is read again."""
    arguments = ["--config", str(REPOSITORY / "recipes/configs/demo.yaml"), "--output_dir", str(folder)]
    settings = {"logging_steps": 5, "save_strategy": "no", "eval_strategy": "no", "disable_tqdm": "true"} | changes
    arguments += [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    pretrain.main(arguments)
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [line for line in history if "loss" in line]


@contextmanager
def from_the_logits() -> Iterator[None]:
    """Every verdict is "logits", whatever was measured."""
    decide = fuse.verify

    def verdict(*arguments: Any) -> Verdict:
        found = decide(*arguments)
        return Verdict("logits", "asked for by this benchmark", own_loss=found.own_loss, our_loss=found.our_loss)

    with patch.object(fuse, "verify", verdict):
        yield


def compare_paths(folder: Path) -> None:
    """Float32 rounding grows from step to step; how fast shows the same path with chunks of another size."""
    fused = run(folder / "fused", z_loss_weight=0)
    with from_the_logits():
        plain = run(folder / "logits", z_loss_weight=0)
    with patch.dict(head._CHUNK_BYTES, {"cpu": 2**21}):
        control = run(folder / "control", z_loss_weight=0)
    print(f"\n{'step':>6}  {'at the head':>12}  {'from logits':>12}  {'difference':>12}  other chunks")
    for ours, theirs, other in list(zip(fused, plain, control, strict=True))[:: len(fused) // 8]:
        losses = f"{ours['loss']:12.7f}  {theirs['loss']:12.7f}"
        path, chunks = (abs(ours["loss"] / line["loss"] - 1) for line in (theirs, other))
        print(f"{ours['step']:6}  {losses}  {path:12.1e}  {chunks:.1e}")
    means = [statistics.fmean(line["loss"] for line in lines) for lines in (fused, plain, control)]
    print(
        "mean loss of the run, at the head / from the logits / other chunks: " + " / ".join(f"{m:.5f}" for m in means)
    )
    seconds = [statistics.median(line["step_seconds"] for line in lines) for lines in (fused, plain)]
    print(f"median time of a step, at the head / from the logits: {seconds[0] / seconds[1]:.2f}")


def drift(folder: Path, learning_rate: float, output: Path) -> None:
    """A Qwen3 of 0.15M parameters (its attention scores are normalised, so that only the head can drift)."""
    changes = {
        "model_type": "qwen3",
        "config_overrides": "hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=4,"
        "num_key_value_heads=4,max_position_embeddings=128,tie_word_embeddings=false",
        "tokenizer_name": "train:512",
        "sequence_length": 128,
        "batch_tokens": 512,
        "total_tokens": 1250 * 512,
        "learning_rate": learning_rate,
        "weight_decay": 0,
        "decay_fraction": 0.01,
        "logging_steps": 25,
    }
    runs = {weight: run(folder / str(weight), z_loss_weight=weight, **changes) for weight in (0, 1e-4, 1e-2)}
    print(f"\nlearning rate {learning_rate:g}, constant to the last 1 %; log Z is the mean over target tokens")
    print("| step |" + "".join(f" log Z, w = {weight:g} | loss |" for weight in runs))
    print("|---|" + "---|---|" * len(runs))
    lines = list(zip(*runs.values(), strict=True))
    for row in [*lines[:: len(lines) // 10], lines[-1]]:
        print(f"| {row[0]['step']} |" + "".join(f" {line['log_z_mean']:.2f} | {line['loss']:.2f} |" for line in row))
    plot(runs, learning_rate, output)


def plot(runs: dict[float, list[dict[str, Any]]], learning_rate: float, output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axis, name, title in zip(
        axes, ("log_z_mean", "loss"), ("mean log Z", "cross-entropy, nats per token"), strict=True
    ):
        for weight, lines in runs.items():
            axis.plot(
                [line["step"] for line in lines], [line[name] for line in lines], label=f"z_loss_weight {weight:g}"
            )
        axis.set(xlabel="optimizer step", title=title)
        axis.legend()
    figure.suptitle(f"Qwen3 of 0.15M parameters at a learning rate of {learning_rate:g}, no weight decay")
    figure.savefig(output, dpi=120)
    print(f"figure: {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("paths", "drift"))
    parser.add_argument("--learning_rate", type=float, default=1.0, help="of drift")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "z_loss.png", help="figure of drift")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.what == "paths":
            compare_paths(Path(folder))
        else:
            drift(Path(folder), asked.learning_rate, asked.output)
    print(", ".join(f"{name}: {value}" for name, value in describe_machine(["torch", "transformers"]).items()))


if __name__ == "__main__":
    main()
