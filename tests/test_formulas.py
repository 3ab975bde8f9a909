"""docs/formulas.md names functions and tests that exist; and the equations of the optimizer, which torch computes."""

from __future__ import annotations

import ast
import importlib
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hfpretrain.arguments import PretrainArguments

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS.parent / "docs" / "formulas.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ") and "`" in line]


def test_every_row_names_what_exists() -> None:
    assert len(ROWS) > 40
    for row in ROWS:
        functions, tests = re.findall(r"`([^`]+)`", row[-2]), re.findall(r"`([^`]+)`", row[-1])
        assert tests, row
        for name in functions:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(f"hfpretrain.{module}"), attribute), name
        for name in tests:
            file, _, test = name.partition("::")
            tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def test_defaults_of_the_first_document() -> None:
    args = PretrainArguments(output_dir="unused", max_steps=1)
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.9, 0.95, 1e-8)
    assert (args.weight_decay, args.max_grad_norm, args.z_loss_weight) == (0.1, 1.0, 1e-4)


def steps(gradients: list[float], *, lr: float = 0.1, beta2: float = 0.95, decay: float = 0.0) -> list[float]:
    """A single weight of 1, after each step of torch's AdamW."""
    weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=lr, betas=(0.9, beta2), eps=1e-8, weight_decay=decay)
    seen = []
    for gradient in gradients:
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        seen.append(weight.item())
    return seen


def test_adamw_is_the_written_one() -> None:
    """m, v, their bias corrections, and decay outside the quotient: section 2.3.8, by hand in float64."""
    gradients, weight, m, v, expected = [0.3, -0.2, 0.5], 1.0, 0.0, 0.0, []
    for t, gradient in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        corrected_m, corrected_v = m / (1 - 0.9**t), v / (1 - 0.95**t)
        weight -= 0.1 * (corrected_m / (math.sqrt(corrected_v) + 1e-8) + 0.2 * weight)
        expected.append(weight)
    assert steps(gradients, decay=0.2) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_a_step_of_adam_is_about_the_learning_rate(scale: float) -> None:
    seen = [1.0, *steps([scale] * 5)]
    assert [before - after for before, after in pairwise(seen)] == pytest.approx([0.1] * 5, rel=1e-4)


def test_a_smaller_beta2_damps_a_spike() -> None:
    """After 200 gradients of +-1 one of 100: its step is (1 - beta1) 100 / sqrt((1 - beta2) 100^2 + ...) * lr."""
    noise = [(-1.0) ** step for step in range(200)]

    def jump(beta2: float) -> float:
        seen = steps([*noise, 100.0], beta2=beta2)
        return abs(seen[-1] - seen[-2]) / 0.1

    assert jump(0.999) == pytest.approx(0.1 * 100 / math.sqrt(0.001 * 1e4 / (1 - 0.999**201) + 1), rel=0.02)
    assert jump(0.95) == pytest.approx(0.1 * 100 / math.sqrt(0.05 * 1e4 + 0.95), rel=0.02)
    assert jump(0.999) > 2.5 * jump(0.95)


def test_clipping_keeps_the_direction() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    norm = math.sqrt(3 * 9 + 4 * 16)
    assert torch.nn.utils.clip_grad_norm_(parameters, 1.0).item() == pytest.approx(norm)
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, value / norm), rtol=1e-5, atol=0)
