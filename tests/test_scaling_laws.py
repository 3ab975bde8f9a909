"""Published tables, the two source documents' numbers, and the equations that each closed form must satisfy."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hfpretrain.planning.scaling_laws import (
    BESIROGLU,
    HOFFMANN_PRINTED,
    HOFFMANN_TEX,
    LOSS_FITS,
    Allocation,
    LossFit,
    adam_learning_rate,
    adam_learning_rate_near_noise,
    compute_optimal,
    deepseek_batch_tokens,
    deepseek_learning_rate,
    first_order_residual,
    kaplan_critical_batch_tokens,
    law_figures,
    learning_rate_for_width,
    lifetime_flops,
    lifetime_optimal,
    loss,
    noise_scale,
    optimal_for_loss,
    optimal_tokens,
    power_law_through,
    sgd_learning_rate,
    sgd_learning_rate_near_noise,
    step_law_batch_tokens,
    step_law_learning_rate,
    steps_ratio,
    tokens_for_loss,
    tokens_ratio,
    zhang_critical_batch_tokens,
    zhang_critical_batch_tokens_at_fixed_data,
)

FITS = pytest.mark.parametrize("fit", LOSS_FITS.values(), ids=LOSS_FITS.keys())


# --- size and data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flops", "fit", "parameters", "tokens", "per_parameter"),
    [
        (1e21, HOFFMANN_PRINTED, 1.82e9, 91e9, 50),
        (1e21, BESIROGLU, 2.78e9, 60e9, 21.6),
        (5.76e23, HOFFMANN_PRINTED, 32e9, 3.0e12, 93),
        (5.76e23, BESIROGLU, 72e9, 1.33e12, 18.4),
    ],
)
def test_published_optima(flops: float, fit: LossFit, parameters: float, tokens: float, per_parameter: float) -> None:
    best = compute_optimal(flops, fit)
    assert best.parameters == pytest.approx(parameters, rel=0.01)
    assert best.tokens == pytest.approx(tokens, rel=0.01)
    assert best.tokens_per_parameter == pytest.approx(per_parameter, rel=0.01)
    assert best.training_flops == pytest.approx(flops)


@pytest.mark.parametrize(
    ("fit", "of_size", "of_data"),
    [(HOFFMANN_PRINTED, 0.4516, 0.5484), (HOFFMANN_TEX, 0.4565, 0.5435), (BESIROGLU, 0.5126, 0.4874)],
)
def test_where_045_and_055_come_from(fit: LossFit, of_size: float, of_data: float) -> None:
    """The second document's 0.45 and 0.55 are .28/.62, rounded; four digits give 0.46 and 0.54, the refit 0.51."""
    assert fit.optimal_exponents == (pytest.approx(of_size, abs=5e-5), pytest.approx(of_data, abs=5e-5))
    slope = math.log10(compute_optimal(1e22, fit).parameters / compute_optimal(1e21, fit).parameters)
    assert slope == pytest.approx(fit.optimal_exponents[0])


@FITS
def test_the_optimum_is_one(fit: LossFit) -> None:
    """No other size does better on the same compute."""
    best = compute_optimal(1e22, fit)
    lowest = loss(best.parameters, best.tokens, fit)
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert loss(best.parameters * factor, best.tokens / factor, fit) > lowest


@FITS
def test_round_trips(fit: LossFit) -> None:
    best = compute_optimal(3e21, fit)
    target = loss(best.parameters, best.tokens, fit)
    assert optimal_tokens(best.parameters, fit) == pytest.approx(best.tokens)
    assert tokens_for_loss(target, best.parameters, fit) == pytest.approx(best.tokens)
    assert optimal_for_loss(target, fit).parameters == pytest.approx(best.parameters)
    assert optimal_for_loss(target, fit).tokens == pytest.approx(best.tokens)


def test_over_training_by_the_fit_in_place_of_the_rule() -> None:
    """LLaMA-2 7B/2T and LLaMA-3 8B/15T against what the default fit calls optimal for their size: 13.8 and 91."""
    assert 2e12 / optimal_tokens(7e9) == pytest.approx(13.85, abs=0.005)
    assert 15e12 / optimal_tokens(8e9) == pytest.approx(91.5, abs=0.05)


def test_chinchilla_loss_by_hand() -> None:
    """E + A / N^a + B / D^b at N = 1e10, D = 1e11, term by term."""
    assert pytest.approx(0.16179, abs=1e-5) == 406.4 / 1e10**0.34
    assert pytest.approx(0.34161, abs=1e-5) == 410.7 / 1e11**0.28
    assert loss(1e10, 1e11, HOFFMANN_PRINTED) == pytest.approx(1.69 + 0.16179 + 0.34161, abs=2e-5)


def test_a_smaller_model_needs_more_data_for_the_same_loss() -> None:
    target = loss(7e9, 144e9)
    tokens = [tokens_for_loss(target, size) for size in (7e9, 5e9, 3e9)]
    assert tokens == sorted(tokens)
    with pytest.raises(ValueError, match="never get below"):
        tokens_for_loss(target, 0.5e9)


# --- lifetime --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "target", "inference", "parameters", "tokens", "per_parameter", "cost"),
    [
        (7e9, 2.1713, 1e12, 3.37e9, 390e9, 116, 0.73),
        (7e9, 2.1713, 1e13, 2.06e9, 1.35e12, 657, 0.40),
        (13e9, 2.1027, 1e12, 7.23e9, 547e9, 75.6, 0.82),
        (13e9, 2.1027, 1e13, 4.26e9, 1.72e12, 403, 0.46),
    ],
)
def test_lifetime_optimum(
    size: float, target: float, inference: float, parameters: float, tokens: float, per_parameter: float, cost: float
) -> None:
    """Targets are what a compute-optimal 7B (144B tokens) and 13B reach; figures of research/gns.md, section 4."""
    chinchilla = Allocation(size, optimal_tokens(size))
    reached = loss(chinchilla.parameters, chinchilla.tokens)
    assert reached == pytest.approx(target, abs=5e-5)
    best = lifetime_optimal(reached, inference)
    assert best.parameters == pytest.approx(parameters, rel=0.005)
    assert best.tokens == pytest.approx(tokens, rel=0.005)
    assert best.tokens_per_parameter == pytest.approx(per_parameter, rel=0.005)
    before = lifetime_flops(chinchilla.parameters, chinchilla.tokens, inference)
    assert lifetime_flops(best.parameters, best.tokens, inference) / before == pytest.approx(cost, abs=0.006)
    assert best.extrapolates == (per_parameter > 341)


@FITS
@pytest.mark.parametrize("inference", [0.0, 1e9, 1e12, 1e15, 1e18])
def test_lifetime_optimum_satisfies_its_conditions(fit: LossFit, inference: float) -> None:
    target = fit.irreducible + 0.35
    best = lifetime_optimal(target, inference, fit)
    assert abs(first_order_residual(best, inference, fit)) < 1e-8
    assert loss(best.parameters, best.tokens, fit) == pytest.approx(target, abs=1e-12)
    least = lifetime_flops(best.parameters, best.tokens, inference)
    for factor in (0.98, 1.02):
        other = best.parameters * factor
        assert lifetime_flops(other, tokens_for_loss(target, other, fit), inference) > least


def test_without_inference_it_is_the_compute_optimum() -> None:
    target = loss(7e9, optimal_tokens(7e9))
    assert lifetime_optimal(target, 0).parameters == pytest.approx(7e9)
    sizes = [lifetime_optimal(target, inference).parameters for inference in (0, 1e11, 1e12, 1e13)]
    assert sizes == sorted(sizes, reverse=True)  # the more it serves, the smaller
    assert lifetime_flops(7e9, 2e12, 1e13) == 6 * 7e9 * 2e12 + 2 * 7e9 * 1e13


# --- batch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "steps", "tokens"), [(1e6, 2, 2), (4e6, 1.25, 5), (0.25e6, 5, 1.25)])
def test_first_document_hyperbola(batch: float, steps: float, tokens: float) -> None:
    """B_crit of 1M tokens: twice the steps and twice the tokens at it; 1.25 x steps and 5 x tokens at four times it."""
    assert steps_ratio(batch, 1e6) == steps
    assert tokens_ratio(batch, 1e6) == tokens
    assert (steps_ratio(batch, 1e6) - 1) * (tokens_ratio(batch, 1e6) - 1) == pytest.approx(1)
    # E = B S, so the ratios differ by B / B_crit: B_crit = E_min / S_min.
    assert tokens_ratio(batch, 1e6) / steps_ratio(batch, 1e6) == pytest.approx(batch / 1e6)


def test_noise_scale() -> None:
    assert noise_scale(134.92, 0.9640) == pytest.approx(139.96, abs=0.01)
    assert noise_scale(1.0, 0.5) > noise_scale(1.0, 1.0)  # a shrinking gradient: it grows during training


@pytest.mark.parametrize(("nats", "tokens"), [(4.0, 0.27e6), (3.0, 1.07e6), (2.5, 2.55e6), (2.2, 4.7e6), (2.0, 7.4e6)])
def test_kaplan(nats: float, tokens: float) -> None:
    assert kaplan_critical_batch_tokens(nats) == pytest.approx(tokens, rel=0.01)


def test_zhang_by_size_is_zhang_by_data() -> None:
    """93.20 N^0.47 with D = 20 N is 22.80 D^0.47, printed as 22.91."""
    assert pytest.approx(22.80, abs=0.005) == 93.20 / 20**0.47
    for size in (85e6, 1.2e9):
        by_size, by_data = zhang_critical_batch_tokens(parameters=size), zhang_critical_batch_tokens(tokens=20 * size)
        assert by_data / by_size == pytest.approx(22.91 / 22.80, rel=1e-3)
    assert zhang_critical_batch_tokens(parameters=1e6) == pytest.approx(93.20 * 512)
    tenfold = [zhang_critical_batch_tokens_at_fixed_data(size) for size in (1e8, 1e9)]
    assert tenfold[1] / tenfold[0] == pytest.approx(10**0.087)
    for wrong in ({}, {"parameters": 1e9, "tokens": 1e9}):
        with pytest.raises(ValueError, match="one of"):
            zhang_critical_batch_tokens(**wrong)


def test_power_law_through_points() -> None:
    """B* ~ N^0.5 (second document): a hundred times the size, ten times the batch."""
    law = power_law_through([(1e7, 50e3), (1e8, 50e3 * math.sqrt(10))])
    assert law.exponent == 0.5
    assert law(1e7) == pytest.approx(50e3)
    assert law(1e9) == pytest.approx(500e3)
    assert power_law_through([(1e7, 50e3)])(1e9) == pytest.approx(500e3)
    fitted = power_law_through([(x, 3 * x**0.47) for x in (1e7, 3e7, 1e9)], exponent=None)
    assert (fitted.scale, fitted.exponent) == (pytest.approx(3), pytest.approx(0.47))
    for points, exponent in (([], 0.5), ([(1e7, 1.0), (1e7, 2.0)], None)):
        with pytest.raises(ValueError, match="not enough points"):
            power_law_through(points, exponent)


def test_deepseek_and_step_law() -> None:
    assert deepseek_batch_tokens(1e21) == pytest.approx(2.16e6, rel=0.005)
    assert deepseek_learning_rate(1e21) == pytest.approx(7.4e-4, rel=0.005)
    assert step_law_batch_tokens(1e11) == pytest.approx(1.11e6, rel=0.005)
    # 1.79 * (1e9)^-0.713 * (1e11)^0.307 = 1.79 * 10^(-6.417 + 3.377)
    assert step_law_learning_rate(1e9, 1e11) == pytest.approx(1.79 * 10**-3.04)


# --- learning rate ----------------------------------------------------------------------------------------------------


def test_learning_rate_rules() -> None:
    assert adam_learning_rate(3e-4, batch_tokens=1e6, new_batch_tokens=4e6) == pytest.approx(6e-4)
    assert sgd_learning_rate(3e-4, batch_tokens=1e6, new_batch_tokens=4e6) == pytest.approx(12e-4)
    assert learning_rate_for_width(3e-4, width=1024, new_width=4096) == pytest.approx(1.5e-4)


def test_learning_rate_near_the_noise_scale() -> None:
    def surge(batch: float) -> float:
        return adam_learning_rate_near_noise(1.0, batch_tokens=batch, noise_scale_tokens=1e6)

    def sgd(batch: float) -> float:
        return sgd_learning_rate_near_noise(1.0, batch_tokens=batch, noise_scale_tokens=1e6)

    assert surge(1e6) == pytest.approx(1)
    assert surge(4e6) == surge(0.25e6) == pytest.approx(1 / (0.5 * (2 + 0.5)))
    assert surge(400) / surge(100) == pytest.approx(2, rel=1e-3)  # far below: the square-root rule
    assert sgd(400) / sgd(100) == pytest.approx(4, rel=1e-3)  # far below: the linear rule
    assert sgd(1e6) == 0.5


# --- together ------------------------------------------------------------------------------------------------------


def test_law_figures_of_a_run() -> None:
    figures = law_figures(
        parameters=8e9,
        tokens=15e12,
        batch_tokens=4e6,
        inference_tokens=1e13,
        critical_batch_points=[(1e8, 1e5)],
    )
    values = {figure.name: figure.value for figure in figures}
    assert values["over_training"] == pytest.approx(93.75)
    assert values["critical_batch_points"] == pytest.approx(1e5 * math.sqrt(80))
    assert values["steps_ratio_points"] == pytest.approx(1 + values["critical_batch_points"] / 4e6)
    assert 0 < values["lifetime_flops_ratio"] < 1
    assert len(values) == len(figures)
    assert all(figure.unit and figure.formula and figure.source for figure in figures)


@pytest.mark.parametrize(
    "call",
    [
        lambda: loss(0, 1),
        lambda: compute_optimal(0),
        lambda: optimal_tokens(-1),
        lambda: steps_ratio(0, 1),
        lambda: tokens_ratio(1, 0),
        lambda: kaplan_critical_batch_tokens(0),
        lambda: noise_scale(1, 0),
        lambda: power_law_through([(0, 1)]),
    ],
)
def test_values_must_be_positive(call: Any) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        call()


def test_losses_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="no model gets below"):
        optimal_for_loss(1.5)
    with pytest.raises(ValueError, match="negative"):
        lifetime_optimal(2.2, -1)
