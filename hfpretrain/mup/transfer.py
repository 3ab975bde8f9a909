"""What a sweep of learning rates over widths says: the best rate per width, how far it moves, which one to take.

Losses are nats, rates are compared as log2(rate): a grid in factors of 2 has steps of 1. A trial that diverged has the
loss infinity; it bounds the rates that work from above like any other loss. muP promises that the best rate does not
depend on the width (Yang et al. 2022, arXiv:2203.03466, section 6); here is what a sweep shows of that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class Point:
    """The loss of one trial, in nats; infinity where it diverged."""

    width: int
    learning_rate: float
    seed: int
    loss: float


@dataclass(frozen=True)
class Optimum:
    """The vertex of a parabola over log2 of the learning rate.

    Attributes:
        log2_rate: where it is.
        stderr: its standard error from the spread of the seeds, in log2; None with one seed.
        resolution: half the larger step to the neighbours, in log2. A parabola through three points lies within half a
            step of the middle one whatever the curve does between them, and true curves are none: they rise faster
            towards rates that are too high. So three points say in which cell of the grid the minimum is, and hardly
            more, however well the seeds agree.
    """

    log2_rate: float
    stderr: float | None
    resolution: float

    @property
    def uncertainty(self) -> float:
        """In log2; the standard error, but never less than the resolution."""
        return max(self.stderr or 0.0, self.resolution)

    @property
    def learning_rate(self) -> float:
        return float(2.0**self.log2_rate)


@dataclass(frozen=True)
class Curve:
    """Loss against learning rate at one width.

    Attributes:
        losses: learning rate, ascending -> loss of each seed, the seeds in the same order everywhere.
    """

    width: int
    losses: Mapping[float, tuple[float, ...]]

    @cached_property
    def mean(self) -> dict[float, float]:
        """Learning rate -> mean over seeds; infinity where any diverged, for a rate must work with every seed."""
        return {rate: sum(losses) / len(losses) for rate, losses in self.losses.items()}

    def spread(self, rate: float) -> float | None:
        """Standard deviation over seeds, in nats; None with one seed, or where one diverged."""
        losses = self.losses[rate]
        return statistics.stdev(losses) if len(losses) > 1 and math.isfinite(sum(losses)) else None

    @property
    def best(self) -> float:
        """The rate of the grid with the lowest mean; of several, the lowest rate."""
        return min(self.mean, key=self.mean.__getitem__)

    @property
    def bracketed(self) -> bool:
        """Whether there are worse rates on both sides of the best one."""
        return not self.missing()

    def missing(self) -> tuple[float, ...]:
        """The two rates beyond the edge that the best one stands at, in the steps of the grid there; else none."""
        rates, best = list(self.losses), self.best
        if best == rates[0]:  # also where all diverged
            factor = rates[1] / rates[0] if len(rates) > 1 else 2.0
            return (best / factor**2, best / factor)
        if best == rates[-1]:
            factor = rates[-1] / rates[-2]
            return (best * factor, best * factor**2)
        return ()

    @cached_property
    def optimum(self) -> Optimum | None:
        """The vertex through the best rate and its neighbours; the best rate itself where one of them diverged, with
        its whole step as resolution. None where the best rate is at an edge of the grid."""
        if not self.bracketed:
            return None
        rates = list(self.losses)
        at = rates.index(self.best)
        around = rates[at - 1 : at + 2]
        x = [math.log2(rate) for rate in around]
        step = max(after - before for before, after in pairwise(x))
        y = [self.mean[rate] for rate in around]
        if not math.isfinite(sum(y)):
            return Optimum(x[1], None, step)
        where, slopes = vertex(x, y)
        by_seed = zip(*(self.losses[rate] for rate in around), strict=True)
        moves = [sum(slope * loss for slope, loss in zip(slopes, losses, strict=True)) for losses in by_seed]
        stderr = statistics.stdev(moves) / math.sqrt(len(moves)) if len(moves) > 1 else None
        return Optimum(where, stderr, step / 2)


def vertex(x: Sequence[float], y: Sequence[float]) -> tuple[float, tuple[float, ...]]:
    """(where the parabola through three points is lowest, how far that moves per nat at each of them).

    With divided differences d01 and d12 and curvature c = (d12 - d01) / (x2 - x0), the derivative vanishes at
    (x0 + x1) / 2 - d01 / (2 c). Its derivatives by the y add up to 0: what all three have in common, such as an easy
    seed, does not move it.

    Args:
        x: ascending.
        y: the middle one not above the others, and not equal to both: else there is no minimum.

    Raises:
        ValueError: the points are not lowest in the middle.
    """
    (x0, x1, x2), (y0, y1, y2) = x, y
    if y1 > min(y0, y2) or y0 == y1 == y2:
        raise ValueError(f"losses {y0:g}, {y1:g}, {y2:g} have no minimum in the middle")
    d01, d12 = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    c = (d12 - d01) / (x2 - x0)
    c_by_y = (1 / ((x0 - x1) * (x0 - x2)), 1 / ((x1 - x0) * (x1 - x2)), 1 / ((x2 - x0) * (x2 - x1)))
    d_by_y = (-1 / (x1 - x0), 1 / (x1 - x0), 0.0)
    slopes = tuple((d01 * dc / c - dd) / (2 * c) for dc, dd in zip(c_by_y, d_by_y, strict=True))
    return (x0 + x1) / 2 - d01 / (2 * c), slopes


@dataclass(frozen=True)
class Choice:
    """The learning rate to train with.

    Attributes:
        learning_rate: the optimum of the widest proxy, which is nearest to the model that will be trained.
        low, high: that optimum's uncertainty, or what it moved from the narrowest proxy where that is more: over the
            further widths it may move as much again.
        width: the widest proxy's.
    """

    learning_rate: float
    low: float
    high: float
    width: int


def curves(points: Iterable[Point]) -> list[Curve]:
    """One curve per width, narrow to wide.

    Raises:
        ValueError: a trial given twice, or a rate without the seeds that the others of its width have.
    """
    table: dict[int, dict[float, dict[int, float]]] = {}
    for point in points:
        cell = table.setdefault(point.width, {}).setdefault(point.learning_rate, {})
        if point.seed in cell:
            raise ValueError(f"width {point.width}, {point.learning_rate:g}, seed {point.seed} is there twice")
        cell[point.seed] = point.loss
    found = []
    for width, rates in sorted(table.items()):
        seeds = sorted({seed for cell in rates.values() for seed in cell})
        if lacking := [rate for rate, cell in rates.items() if len(cell) < len(seeds)]:
            raise ValueError(f"width {width}: the rates {lacking} lack some of the seeds {seeds}")
        found.append(Curve(width, {rate: tuple(rates[rate][seed] for seed in seeds) for rate in sorted(rates)}))
    return found


def moved_log2(found: Sequence[Curve]) -> float:
    """How far the best rate of the grid moves from the narrowest to the widest, in factors of 2."""
    return math.log2(found[-1].best / found[0].best)


def vertex_moved_log2(found: Sequence[Curve]) -> float | None:
    """The same for the optima between the rates; None where one of the two is not bracketed."""
    first, last = found[0].optimum, found[-1].optimum
    return None if first is None or last is None else last.log2_rate - first.log2_rate


def regret(narrow: Curve, wide: Curve) -> float | None:
    """Nats lost at the wide one with the best rate of the narrow one; None where that was not tried there."""
    tried = wide.mean.get(narrow.best)
    return None if tried is None else tried - wide.mean[wide.best]


def choose(found: Sequence[Curve]) -> Choice | None:
    """The rate to train with; None unless every width is bracketed."""
    optima = [curve.optimum for curve in found]
    widest, moved = optima[-1], vertex_moved_log2(found)
    if widest is None or moved is None or None in optima:
        return None
    width = max(widest.uncertainty, abs(moved))
    low, high = (2.0 ** (widest.log2_rate + sign * width) for sign in (-1, 1))
    return Choice(widest.learning_rate, low, high, found[-1].width)
