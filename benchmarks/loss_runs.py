"""Whole runs of the demo: the same curve on both paths of the loss; log Z with and without z-loss.

python benchmarks/loss_runs.py paths    # at the head and from the logits, z-loss off
python benchmarks/loss_runs.py drift    # a learning rate that is far too high: a table, and docs/z_loss.png
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hfpretrain.loss import fuse
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
    fused = run(folder / "fused", z_loss_weight=0)
    with from_the_logits():
        plain = run(folder / "logits", z_loss_weight=0)
    print(f"\n{'step':>6}  {'at the head':>12}  {'from logits':>12}  difference")
    for ours, theirs in zip(fused[:: len(fused) // 8], plain[:: len(plain) // 8], strict=True):
        difference = abs(ours["loss"] - theirs["loss"])
        print(f"{ours['step']:6}  {ours['loss']:12.7f}  {theirs['loss']:12.7f}  {difference:.1e}")
    for name in ("loss", "grad_norm"):
        largest = max(abs(a[name] / b[name] - 1) for a, b in zip(fused, plain, strict=True))
        print(f"largest relative difference of {name} over {len(fused)} log lines: {largest:.1e}")
    seconds = [sum(line["step_seconds"] for line in lines) for lines in (fused, plain)]
    print(f"time of the steps, at the head / from the logits: {seconds[0] / seconds[1]:.2f}")


def drift(folder: Path, learning_rate: float, output: Path) -> None:
    changes = {
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "config_overrides": "tie_word_embeddings=false",
    }
    runs = {weight: run(folder / str(weight), z_loss_weight=weight, **changes) for weight in (0, 1e-4, 1e-3)}
    print(f"\nlearning rate {learning_rate:g}, constant after the warm-up; log Z is the mean over target tokens")
    print(f"{'step':>6}" + "".join(f"   w={weight:<6g} log Z  max|logit|   loss" for weight in runs))
    lines = list(zip(*runs.values(), strict=True))
    for row in [*lines[:: len(lines) // 8], lines[-1]]:
        cells = [f"   {line['log_z_mean']:14.2f} {line['logit_max']:11.1f} {line['loss']:6.3f}" for line in row]
        print(f"{row[0]['step']:6}" + "".join(cells))
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
    figure.suptitle(f"The demo's Llama, untied, at a learning rate of {learning_rate:g}")
    figure.savefig(output, dpi=120)
    print(f"figure: {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("paths", "drift"))
    parser.add_argument("--learning_rate", type=float, default=3e-2, help="of drift")
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
