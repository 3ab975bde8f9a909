"""Our cross-entropy sum beside `F.cross_entropy`, forward and backward from the same logits, taking turns.

python benchmarks/cross_entropy.py [--tokens 2048] [--vocabulary 8192] [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from hfpretrain.loss import cross_entropy_sum, shift_labels
from machine import describe_machine


def stock(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """What transformers' own loss does with float32 logits."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), shift_labels(labels_BT).flatten(), reduction="sum")


def seconds(loss: Callable[..., torch.Tensor], logits: torch.Tensor, labels: torch.Tensor) -> float:
    leaf = logits.clone().requires_grad_()
    start = time.perf_counter()
    (loss(leaf, labels) * 1e-3).backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, asked.tokens, asked.vocabulary, generator=generator)
    labels = torch.randint(0, asked.vocabulary, (1, asked.tokens), generator=generator)
    contenders = {"F.cross_entropy": stock, "hfpretrain": cross_entropy_sum}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(asked.rounds + 1):
        for name, loss in contenders.items():
            times[name].append(seconds(loss, logits, labels))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    print(", ".join(f"{name}: {value}" for name, value in describe_machine(["torch"]).items()))
    for name, median in medians.items():
        print(f"{name:16} {1e3 * median:7.1f} ms for {asked.tokens:,} tokens, V = {asked.vocabulary:,}")
    print(f"{'ratio':16} {medians['hfpretrain'] / medians['F.cross_entropy']:7.2f}")


if __name__ == "__main__":
    main()
