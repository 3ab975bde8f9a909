"""Gradient noise scale from squared norms: the estimator, its average over steps, and the error of that. No torch.

    B = tr(Sigma) / |G|^2,   E|mean gradient of b tokens|^2 = |G|^2 + tr(Sigma) / b

(McCandlish et al. 2018, arXiv:1812.06162, appendix A.1: B_simple.) G is the true gradient of the mean loss per token,
Sigma the covariance of one token's gradient; micro-batches are independent draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Measured steps that an average looks back on. A single step's |G|^2 is lost in noise where B is above 50 batches;
# these leave a median error of 4 % at B = 125 batches and of 16 % at 500 (simulated, 8 and 16 micro-batches).
HORIZON_STEPS = 200
# The average of the first steps looks back on a quarter of them, so that it forgets the large gradients of the start.
_FORGETTING = 4
_LEAST_MEASURED = 20  # the spread of fewer estimates says too little about their error
_RESOLVED = 3.0  # standard errors that the average of |G|^2 must be above 0: its inverse is a number only then


@dataclass(frozen=True)
class Estimate:
    """What one step says, each without bias.

    Attributes:
        grad_sq: |G|^2, squared norm of the true gradient of the mean loss per token; noise can make it negative.
        grad_trace: tr(Sigma), summed variance of the gradient of one token.
    """

    grad_sq: float
    grad_trace: float


def estimate(
    tokens: Sequence[float],
    mean_squares: Sequence[float],
    total_square: float,
    *,
    weights: Sequence[float] | None = None,
) -> Estimate | None:
    """|G|^2 and tr(Sigma) from K micro-batches of unequal size; None where they are not defined.

    With mean gradients m_k over n_k tokens, M = sum_k w_k m_k and Q = sum_k w_k |m_k|^2, the two unknowns solve

        E Q = |G|^2 + tr(Sigma) sum_k w_k / n_k,    E|M|^2 = |G|^2 + tr(Sigma) sum_k w_k^2 / n_k.

    For w_k = n_k / N this is tr(Sigma) = N (Q - |M|^2) / (K - 1), which is McCandlish et al. (A.2) if all n_k are
    equal. (Their formula with the mean of unequal n_k is wrong by as much as the sizes differ.)

    Args:
        tokens: n_k; micro-batches without targets have no mean and are left out.
        mean_squares: |m_k|^2.
        total_square: |M|^2, before clipping.
        weights: w_k, sum 1; None: n_k / N, the token mean over the whole step.

    Returns None with fewer than two micro-batches that have targets, or if anything is not finite.
    """
    total = sum(tokens)
    if not total or not all(map(math.isfinite, (total_square, *mean_squares))):
        return None
    shares = [n / total for n in tokens] if weights is None else weights
    kept = [(n, m, w) for n, m, w in zip(tokens, mean_squares, shares, strict=True) if n > 0]
    if len(kept) < 2:
        return None
    mean = sum(w * m for _, m, w in kept)
    alpha = sum(w * w / n for n, _, w in kept)
    beta = sum(w / n for n, _, w in kept)
    return Estimate(
        grad_sq=(beta * total_square - alpha * mean) / (beta - alpha),
        grad_trace=(mean - total_square) / (beta - alpha),
    )


@dataclass
class NoiseAverage:
    """Exponential averages of both estimates, and the standard error of their ratio.

    The ratio of two unbiased numbers is biased and heavy-tailed, so numerator and denominator are averaged first. A
    measured step counts once, whatever its tokens: neither expectation depends on the size of the batch.

    Attributes:
        measured: estimates so far.
        grad_sq, grad_trace: averages.
        sq_sq, sq_trace, trace_trace: averages of their products.
        squared_weights: sum of the squared weights of all estimates; 1 / this is how many equal ones they are worth.
    """

    horizon: int = HORIZON_STEPS
    measured: int = 0
    grad_sq: float = 0.0
    grad_trace: float = 0.0
    sq_sq: float = 0.0
    sq_trace: float = 0.0
    trace_trace: float = 0.0
    squared_weights: float = 0.0

    def add(self, new: Estimate) -> None:
        self.measured += 1
        weight = max(1 / self.horizon, min(1.0, _FORGETTING / (self.measured + _FORGETTING - 1)))
        products = {
            "grad_sq": new.grad_sq,
            "grad_trace": new.grad_trace,
            "sq_sq": new.grad_sq**2,
            "sq_trace": new.grad_sq * new.grad_trace,
            "trace_trace": new.grad_trace**2,
        }
        for name, value in products.items():
            before = getattr(self, name)
            setattr(self, name, before + weight * (value - before))
        self.squared_weights = (1 - weight) ** 2 * self.squared_weights + weight**2

    def noise_scale(self) -> tuple[float, float] | None:
        """(B, its standard error) in tokens; None as long as |G|^2 cannot be told from 0.

        Delta method: B errs by (mean of tr(Sigma) - B |G|^2) / |G|^2, whose variance is read from the spread of that
        difference over steps and the number of steps that the average is worth.
        """
        if self.measured < _LEAST_MEASURED or self.grad_trace <= 0:
            return None
        of_mean = self.squared_weights / (1 - self.squared_weights)
        sq_error = math.sqrt(max(self.sq_sq - self.grad_sq**2, 0.0) * of_mean)
        if self.grad_sq <= _RESOLVED * sq_error or self.grad_sq <= 0:
            return None
        ratio = self.grad_trace / self.grad_sq
        spread = self.trace_trace - 2 * ratio * self.sq_trace + ratio**2 * self.sq_sq
        return ratio, math.sqrt(max(spread, 0.0) * of_mean) / self.grad_sq
