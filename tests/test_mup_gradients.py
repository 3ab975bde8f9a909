"""Epsilon follows the gradients: how large they are per role, over widths, is measured against `RULES`."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from test_mup_apply import BASE, config_of, tokens
from torch import nn

from hfpretrain.model import build_model, name_template
from hfpretrain.mup.apply import apply
from hfpretrain.mup.infer import infer

RATIOS = (2, 4, 8)


def gradient_slopes(model_type: str, **changes: Any) -> dict[str, tuple[str, float, float]]:
    """Parameter -> (role, eps exponent of the spec, slope of log2 RMS gradient against log2 width) at the start."""
    points: dict[str, list[float]] = defaultdict(list)
    for ratio in RATIOS:
        config = config_of(model_type, ratio, initializer_range=0.2, **changes)
        spec = infer(config, base_width=BASE)
        squares: dict[str, float] = defaultdict(float)
        for seed in range(2):
            model = build_model(config, seed=seed)
            apply(model, spec)
            logits = model(input_ids=tokens()).logits
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                squares[name_template(name)] += float(parameter.grad.square().mean())
        for name, square in squares.items():
            points[name].append(0.5 * math.log2(square))
    x = torch.tensor([math.log2(ratio) for ratio in RATIOS])
    slopes = {
        n: float(((x - x.mean()) * torch.tensor(y)).sum() / (x - x.mean()).square().sum()) for n, y in points.items()
    }
    exponents = {n: math.log2(spec.of(n.replace("*", "0")).multipliers.eps) / math.log2(RATIOS[-1]) for n in slopes}
    return {name: (spec.of(name.replace("*", "0")).role, exponents[name], slope) for name, slope in slopes.items()}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("mixtral", {"num_local_experts": 4, "tie_word_embeddings": False}), ("gemma", {})],
)
def test_epsilon_scales_like_the_gradient(model_type: str, changes: dict[str, Any]) -> None:
    seen = set()
    for name, (role, exponent, slope) in gradient_slopes(model_type, **changes).items():
        seen.add((role, exponent))
        if name.endswith("mlp.gate.weight"):  # independent terms add up at the start, aligned ones after training
            assert -0.65 < slope < 0.15, name
        else:
            assert abs(slope - exponent) < 0.2, f"{name}: {slope:+.2f}, {role} has {exponent:+.2f}"
    if model_type == "gemma":  # embeddings are multiplied by sqrt(width), so they and the final gain share 1/width
        assert seen == {("input", -0.5), ("hidden", -1.0), ("vector", -1.0), ("tied_gain", -0.5)}
    else:
        assert seen == {("input", -1.0), ("hidden", -1.0), ("vector", -1.0), ("output", 0.0)}
