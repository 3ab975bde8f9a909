"""How the loss is computed on every causal architecture that can be built small, and how exactly: a table.

python benchmarks/loss_architectures.py [--only llama gpt2 ...] [--output docs/loss_architectures.md]

Beside what `FusedLoss.verify` decides, loss and gradient of *all* parameters in train mode (cross-entropy, z-loss and
router loss) are compared with those that autograd finds through the model's own logits.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, logging

from hfpretrain.loss import IGNORE_INDEX, FusedLoss, shift_labels
from hfpretrain.small_models import NotBuildable, causal_model_types, tiny_model
from machine import describe_machine

Z_LOSS_WEIGHT = 1e-2  # a hundred times the usual one, so that a wrong z-loss shows


@dataclass(frozen=True)
class Row:
    """One line of the table. `difference`: largest relative one, of the loss and of the gradient of all parameters."""

    model_type: str
    path: str
    reason: str
    head: str = ""
    difference: float = math.nan
    own_loss_differs: bool = False


def examine(model_type: str) -> Row:
    """Build, decide, compare; a model that cannot be built small is listed as such."""
    try:
        model = tiny_model(model_type)
    except NotBuildable as error:
        return Row(model_type, "not built", " ".join(str(error).split())[:120])
    fused = FusedLoss(model, z_loss_weight=Z_LOSS_WEIGHT)
    verdict = fused.verify()
    head = ""
    if fused.head is not None:
        tied = fused.head.weight is getattr(model.get_input_embeddings(), "weight", None)
        head = ("tied" if tied else "untied") + (", bias" if fused.head.bias is not None else "")
    if verdict.path == "refused":
        return Row(model_type, "refused", verdict.reason, head)
    own, ours = verdict.own_loss, verdict.our_loss
    differs = own is not None and ours is not None and abs(own - ours) > 1e-2 * abs(ours)
    reason = str(verdict.transform) if verdict.transform is not None else verdict.reason
    return Row(model_type, verdict.path, reason, head, whole_difference(model, fused), differs)


def whole_difference(model: PreTrainedModel, fused: FusedLoss) -> float:
    """Loss and gradient of all parameters in train mode, ours against autograd through the model's own logits."""
    model.train()
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(0, model.config.get_text_config().vocab_size, (2, 32), generator=generator)
    labels = input_ids.clone()
    labels[0, 5:9] = IGNORE_INDEX
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.manual_seed(2)  # the same dropout in both
    ours = fused.output(labels, None, {"input_ids": input_ids}).loss
    assert ours is not None
    made = torch.autograd.grad(ours, parameters, allow_unused=True)
    torch.manual_seed(2)
    outputs = fused.forward_logits(model, {"input_ids": input_ids})
    theirs = by_hand(outputs.logits, labels) + fused.forward_logits.router_loss(outputs, like=outputs.logits)
    expected = torch.autograd.grad(theirs, parameters, allow_unused=True)
    return max(relative([ours.detach()], [theirs.detach()]), relative(made, expected))


def by_hand(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Token-mean cross-entropy and z-loss in float64."""
    logits, targets = logits_BTV.double().flatten(0, 1), shift_labels(labels_BT).flatten()
    is_target = targets != IGNORE_INDEX
    z_loss = (logits.logsumexp(-1).square() * is_target).sum()
    cross_entropy = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return (cross_entropy + Z_LOSS_WEIGHT * z_loss) / is_target.sum()


def relative(made: list[Tensor] | tuple[Tensor, ...], expected: list[Tensor] | tuple[Tensor, ...]) -> float:
    """|made - expected| / |expected| over all tensors together; infinite where one has a gradient the other lacks."""
    missed = size = 0.0
    for a, b in zip(made, expected, strict=True):
        if (a is None) != (b is None):
            other = a if a is not None else b
            if bool(other.any()):
                return math.inf
        elif a is not None:
            missed += float((a.double() - b.double()).square().sum())
            size += float(b.double().square().sum())
    return math.sqrt(missed / size)


def write(rows: list[Row], output: Path, command: str) -> None:
    counts = Counter(row.path for row in rows)
    worst = max((row.difference for row in rows if not math.isnan(row.difference)), default=math.nan)
    machine = ", ".join(f"{name}: {value}" for name, value in describe_machine(["torch", "transformers"]).items())
    lines = [
        "# How the loss is computed, architecture by architecture",
        "",
        f"Made by `{command}` ({machine}).",
        "",
        "Every causal architecture of the installed transformers that can be built small: 2 rows of 32 tokens,",
        f"float32, train mode, cross-entropy + z-loss ({Z_LOSS_WEIGHT:g}) + router loss. *Difference*: the largest",
        "relative one, of the loss and of the gradient of all parameters, against float64 cross-entropy and z-loss on",
        "the model's own logits. *Own loss*: whether the model by itself makes another loss of the same labels.",
        "",
        "; ".join(f"{path}: {number}" for path, number in counts.most_common()) + f". Largest difference: {worst:.1e}.",
        "",
        "| model type | path | head | what makes logits of its scores, or why not | difference | own loss |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        difference = "" if math.isnan(row.difference) else f"{row.difference:.1e}"
        own = "another" if row.own_loss_differs else ""
        cells = (row.model_type, row.path, row.head, row.reason.replace("|", "/"), difference, own)
        lines.append("| " + " | ".join(cells) + " |")
    output.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=None, help="model types; default: all")
    parser.add_argument("--output", type=Path, default=None, help="Markdown file; default: print only")
    asked = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for model_type in asked.only or causal_model_types():
        start = time.perf_counter()
        rows.append(examine(model_type))
        row = rows[-1]
        seconds = time.perf_counter() - start
        print(
            f"{model_type:28} {row.path:10} {row.difference:8.1e} {seconds:5.1f} s  {row.head}; {row.reason}",
            flush=True,
        )
    print(Counter(row.path for row in rows))
    if asked.output is not None:
        write(rows, asked.output, f"python benchmarks/{Path(__file__).name} --output {asked.output}")


if __name__ == "__main__":
    main()
