"""The estimator against closed forms and simulations with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hfpretrain.training.noise_estimate import HORIZON_STEPS, Estimate, NoiseAverage, estimate

TOKENS = [50, 400, 1000, 20, 700, 128, 128, 2000]
GRADIENT = np.array([0.6, -0.5, 0.4, 0.3, 0.2, -0.1])
VARIANCES = np.array([40.0, 25.0, 30.0, 10.0, 5.0, 20.0])  # of one token's gradient, per coordinate


def draw(generator: np.random.Generator) -> np.ndarray:
    """Mean gradients [micro-batches, coordinates] of one step."""
    noise = generator.standard_normal((len(TOKENS), len(GRADIENT)))
    return GRADIENT + noise * np.sqrt(VARIANCES / np.array(TOKENS)[:, None])


def test_two_micro_batches_by_hand() -> None:
    """m = (2, 0) over 1 token and (0, 4) over 3: M = (0.5, 3), Q = 1/4 * 4 + 3/4 * 16 = 13, |M|^2 = 9.25."""
    found = estimate([1, 3], [4.0, 16.0], 9.25)
    assert found == Estimate(grad_sq=pytest.approx(2 * 9.25 - 13), grad_trace=pytest.approx(4 * (13 - 9.25)))


def test_the_trace_is_the_variance_between_micro_batches() -> None:
    """sum_k n_k |m_k - M|^2 / (K - 1), the textbook form, never negative."""
    means = draw(np.random.default_rng(0))
    weights = np.array(TOKENS) / sum(TOKENS)
    total = weights @ means
    found = estimate(TOKENS, list((means**2).sum(1)), float(total @ total))
    between = (np.array(TOKENS)[:, None] * (means - total) ** 2).sum() / (len(TOKENS) - 1)
    assert found is not None
    assert found.grad_trace == pytest.approx(between, rel=1e-9)
    assert found.grad_sq == pytest.approx(total @ total - between / sum(TOKENS), rel=1e-9)


@pytest.mark.parametrize("equal_weights", [False, True])
def test_simulation_with_unequal_counts(equal_weights: bool) -> None:
    """Unbiased within its standard error of 4000 steps; the formula for equal batches, fed with their mean, is not."""
    generator = np.random.default_rng(1)
    count, total_tokens = len(TOKENS), sum(TOKENS)
    weights = np.full(count, 1 / count) if equal_weights else np.array(TOKENS) / total_tokens
    right, naive = [], []
    for _ in range(4000):
        means = draw(generator)
        squares, total = (means**2).sum(1), weights @ means
        found = estimate(TOKENS, list(squares), float(total @ total), weights=list(weights))
        assert found is not None
        right.append((found.grad_sq, found.grad_trace))
        small, big = total_tokens / count, total_tokens
        large, little = float(total @ total), squares.mean()
        naive.append(((big * large - small * little) / (big - small), (little - large) / (1 / small - 1 / big)))
    truth = np.array([GRADIENT @ GRADIENT, VARIANCES.sum()])
    errors = (np.mean(right, axis=0) - truth) / (np.std(right, axis=0) / math.sqrt(4000))
    assert abs(errors).max() < 4
    assert np.std(right, axis=0)[1] / math.sqrt(4000) < 0.02 * truth[1]  # sharp enough to show the next line's error
    assert np.mean(naive, axis=0)[1] > 3 * truth[1]


def test_not_defined() -> None:
    assert estimate([], [], 1.0) is None
    assert estimate([0, 0], [0.0, 0.0], 0.0) is None
    assert estimate([7], [2.0], 2.0) is None
    assert estimate([7, 0], [2.0, 0.0], 2.0) is None  # a filler is no second micro-batch
    assert estimate([7, 5], [2.0, math.inf], 2.0) is None
    assert estimate([7, 5], [2.0, 3.0], math.nan) is None
    with_filler, without = estimate([7, 0, 5], [2.0, 0.0, 3.0], 1.5), estimate([7, 5], [2.0, 3.0], 1.5)
    assert with_filler == without is not None


def test_the_average_forgets_its_start() -> None:
    """The first of T estimates has weight prod (t - 1) / (t + 3) = 24 / (T (T + 1) (T + 2) (T + 3))."""
    average = NoiseAverage(horizon=10**6)
    average.add(Estimate(grad_sq=1e6, grad_trace=0.0))
    for _ in range(99):
        average.add(Estimate(grad_sq=0.0, grad_trace=0.0))
    assert average.grad_sq == pytest.approx(1e6 * 24 / (100 * 101 * 102 * 103), rel=1e-9)


def test_the_average_looks_back_on_its_horizon() -> None:
    """Weights a (1 - a)^k with a = 1 / horizon have the squared sum a / (2 - a)."""
    average = NoiseAverage()
    for _ in range(3000):
        average.add(Estimate(grad_sq=2.0, grad_trace=300.0))
    assert average.squared_weights == pytest.approx(1 / (2 * HORIZON_STEPS - 1), rel=1e-6)
    assert average.noise_scale() == (pytest.approx(150.0), pytest.approx(0.0, abs=1e-4))


def test_a_ratio_that_is_not_known_is_absent() -> None:
    def after(grad_sq: list[float], grad_trace: float = 1.0) -> tuple[float, float] | None:
        average = NoiseAverage()
        for value in grad_sq:
            average.add(Estimate(value, grad_trace))
        return average.noise_scale()

    assert after([2.0] * 19) is None  # too few for an error
    assert after([2.0] * 20) == (0.5, 0.0)
    assert after([-2.0] * 40) is None
    assert after([0.0] * 40) is None
    assert after([1.1, -1.0] * 40) is None  # positive on average, and lost in noise
    assert after([2.0] * 40, grad_trace=0.0) is None


def test_the_standard_error_covers() -> None:
    """The true ratio is within one and two standard errors about as often as for a normal distribution (0.68, 0.95)."""
    generator = np.random.default_rng(2)
    truth, within_one, within_two, runs = VARIANCES.sum() / (GRADIENT @ GRADIENT), 0, 0, 300
    for _ in range(runs):
        average = NoiseAverage()
        for _ in range(80):
            means = draw(generator)
            total = np.array(TOKENS) @ means / sum(TOKENS)
            found = estimate(TOKENS, list((means**2).sum(1)), float(total @ total))
            assert found is not None
            average.add(found)
        ratio, error = average.noise_scale() or (math.nan, math.nan)
        within_one += abs(ratio - truth) < error
        within_two += abs(ratio - truth) < 2 * error
    assert 0.58 < within_one / runs < 0.78
    assert 0.90 < within_two / runs < 0.99
