"""Published laws for batch and learning rate against the numbers that their papers and the source documents give."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hfpretrain.planning.batch_laws import (
    adam_learning_rate,
    adam_learning_rate_near_noise,
    deepseek_batch_tokens,
    deepseek_learning_rate,
    kaplan_critical_batch_tokens,
    learning_rate_for_width,
    noise_scale,
    power_law_through,
    rule_of_thumb_learning_rate,
    sgd_learning_rate,
    sgd_learning_rate_near_noise,
    step_law_batch_tokens,
    step_law_learning_rate,
    steps_ratio,
    tokens_ratio,
    zhang_critical_batch_tokens,
    zhang_critical_batch_tokens_at_fixed_data,
)
from hfpretrain.planning.law_figures import batch_figures, law_notes, rate_figures, size_figures

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


# --- figures of a run -------------------------------------------------------------------------------------------------


def test_figures_of_a_run() -> None:
    size: dict[str, Any] = {"parameters": 8e9, "tokens": 15e12}
    figures = size_figures(**size, inference_tokens=1e13)
    figures += batch_figures(**size, batch_tokens=4e6, noise_scale_points=[(1e8, 1e5)])
    rates = rate_figures(**size, batch_tokens=4e6, learning_rate=3e-4, width=4096, mup_base_width=256)
    figures += rates
    values = {figure.name: figure.value for figure in figures}
    assert values["over_training"] == pytest.approx(93.75)
    assert values["critical_batch_points"] == pytest.approx(1e5 * math.sqrt(80))
    assert values["steps_ratio_points"] == pytest.approx(1 + values["critical_batch_points"] / 4e6)
    assert 0 < values["lifetime_flops_ratio"] < 1
    assert values["learning_rate_rules_of_thumb"] == pytest.approx(6e-4 * math.sqrt(8) * math.sqrt(768 / 4096))
    assert values["mup_hidden_learning_rate"] == 1 / 16
    among = [values[f"learning_rate_{name}"] for name in ("deepseek", "step_law", "rules_of_thumb")]
    assert (values["learning_rate_lowest"], values["learning_rate_highest"]) == (min(among), max(among))
    assert len(values) == len(figures)
    assert all(figure.unit and figure.formula and figure.source for figure in figures)
    notes = law_notes(**size, rates=rates, inference_tokens=1e17)
    assert [note for note in notes if note.startswith("expected_loss extrapolates: 1.5e+13 tokens")]
    assert [note for note in notes if note.startswith("lifetime_optimal extrapolates")]
    assert [note for note in notes if note.startswith("learning_rate 0.0003 is outside")]


def test_laws_that_leave_the_vocabulary_out_are_given_what_they_count() -> None:
    size: dict[str, Any] = {"parameters": 2e8, "tokens": 1e10, "batch_tokens": 1e6}
    rates = rate_figures(**size, learning_rate=1e-3, inner_parameters=1e8, inner_flops=1e19)
    values = {figure.name: figure.value for figure in rates + batch_figures(**size, inner_flops=1e19)}
    assert values["learning_rate_step_law"] == step_law_learning_rate(1e8, 1e10)
    assert values["learning_rate_deepseek"] == deepseek_learning_rate(1e19)
    assert values["best_batch_deepseek"] == deepseek_batch_tokens(1e19)


def test_no_notes_within_all_ranges() -> None:
    """100M parameters on 4B ... 5B tokens are what every law saw."""
    rates = rate_figures(parameters=1e8, tokens=5e9, batch_tokens=5e5, learning_rate=2e-3, width=768)
    assert law_notes(parameters=1e8, tokens=5e9, rates=rates) == []


def test_rule_of_thumb_at_its_reference_and_far_from_it() -> None:
    """GPT-3 125M by definition; 4.3 times the published rate of its 6.7B, as the docstring warns."""
    assert rule_of_thumb_learning_rate(500_000, 768) == pytest.approx(6e-4)
    assert rule_of_thumb_learning_rate(2e6, 4096) / 1.2e-4 == pytest.approx(4.33, abs=0.01)


@pytest.mark.parametrize(
    "call",
    [
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
