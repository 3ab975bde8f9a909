"""The worked numbers of the two source documents about floating-point operations, hours and money."""

from __future__ import annotations

from typing import Any

import pytest

from hfpretrain.planning.compute import (
    compute_figures,
    cost,
    device_hours,
    layer_matrix_parameters,
    over_training,
    parameter_figures,
    tokens_per_parameter,
    training_flops,
)
from hfpretrain.planning.flops import TokenCost


def test_training_flops_are_two_and_two_and_two() -> None:
    flops = training_flops(7e9, 1e12)
    assert flops.forward == flops.backward_activations == flops.backward_weights == 2 * 7e9 * 1e12
    assert flops.backward_activations + flops.backward_weights == 4 * 7e9 * 1e12
    assert flops.total == 6 * 7e9 * 1e12 == 4.2e22


def test_twelve_d_squared_are_parameters() -> None:
    """The second document says "about 12 d^2 FLOPs" a token; a weight is a multiplication and an addition: 24 d^2."""
    d = 3072
    assert layer_matrix_parameters(d) == 12 * d**2  # q, k, v, o: 4; gate, up, down at 8/3 d: 8
    assert layer_matrix_parameters(d, ffn_width=4 * d, ffn_matrices=2) == 12 * d**2
    assert layer_matrix_parameters(d, ffn_width=4 * d) == 16 * d**2
    tokens = 1000
    products = [(d, d)] * 4 + [(d, 8 * d // 3)] * 2 + [(8 * d // 3, d)]
    assert sum(2 * tokens * d1 * d2 for d1, d2 in products) == 24 * d**2 * tokens  # Y = X W: 2 T d1 d2
    assert training_flops(layer_matrix_parameters(d), tokens).forward == 24 * d**2 * tokens
    # LLaMA-2 7B, d = 4096, f = 11008, 32 layers of 12.06 d^2: 6.5 of its 6.7 billion parameters.
    layer = layer_matrix_parameters(4096, ffn_width=11008)
    assert layer / 4096**2 == pytest.approx(12.06, abs=0.005)
    assert 32 * layer == 6_476_005_376


def test_over_training() -> None:
    """LLaMA-2 7B/2T and LLaMA-3 8B/15T, "14 to 100 times": 14.3 and 94 by the rule of 20."""
    assert over_training(7e9, 2e12) == pytest.approx(14.29, abs=0.005)
    assert over_training(8e9, 15e12) == pytest.approx(93.75)
    assert tokens_per_parameter(8e9, 15e12) == 1875


def test_hours_and_money() -> None:
    """4.2e22 FLOPs at 400 TFLOP/s: 105 million seconds = 29,167 hours."""
    hours = device_hours(4.2e22, peak_flops=1e15, mfu=0.4)
    assert hours == pytest.approx(29_166.67, abs=0.01)
    assert cost(hours, 2.5) == pytest.approx(72_916.67, abs=0.01)


def test_figures_of_a_counted_model() -> None:
    """10 weights inside, a head of 4 and scores of 5 FLOPs: 33 forward, 99 in training, 25 of them a second time."""
    token = TokenCost(matrices={"mlp": 20.0, "head": 8.0}, attention={None: 5.0}, full_attention=10.0)
    assert (token.weights, token.forward, token.training, token.recomputed) == (28, 33, 99, 25)
    assert token.training_full_attention == 3 * 38
    figures = compute_figures(
        parameters=14,
        total_tokens=1000,
        world_size=2,
        peak_flops=1e3,
        mfu=0.25,
        cost_of_token=token,
        gradient_checkpointing=True,
        price_per_device_hour=3.6,
    )
    values = {figure.name: figure.value for figure in figures}
    assert values["training_flops"] == 6 * 14 * 1000
    assert values["matrix_flops"] == 6 * 14 * 1000
    assert values["counted_flops"] == 99_000
    assert values["recomputed_flops"] == 25_000
    assert values["hardware_utilisation"] == pytest.approx(0.25 * 124 / 99)
    assert values["device_hours"] == pytest.approx(99_000 / 250 / 3600)
    assert values["clock_hours"] == pytest.approx(values["device_hours"] / 2)
    assert values["cost"] == pytest.approx(0.396)


def test_recomputation_of_a_bare_number_is_eight_n_d() -> None:
    figures = compute_figures(
        parameters=7e9, total_tokens=10**12, world_size=1, peak_flops=1e15, mfu=0.3, gradient_checkpointing=True
    )
    values = {figure.name: figure.value for figure in figures}
    assert values["training_flops"] + values["recomputed_flops"] == 8 * 7e9 * 1e12
    assert values["hardware_utilisation"] == pytest.approx(0.4)


def test_parameters_by_role_add_up() -> None:
    parts = {"embedding": (100, 0, 0.0), "experts": (80, 80, 20.0), "norm": (3, 0, 0.0), "head": (100, 100, 100.0)}
    values = {figure.name: figure.value for figure in parameter_figures(283, parts)}
    assert sum(values[f"{role}_parameters"] for role in parts) == values["parameters"]
    assert values["multiplied_parameters"] == 180
    assert values["active_parameters"] == 120


@pytest.mark.parametrize(
    "call",
    [
        lambda: device_hours(1.0, peak_flops=1.0, mfu=0.0),
        lambda: over_training(0, 1),
    ],
)
def test_counts_must_be_positive(call: Any) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        call()
