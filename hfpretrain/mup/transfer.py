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
from typing import Any


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

    def __str__(self) -> str:
        lines = [f"width {self.width}"]
        for rate, losses in self.losses.items():
            spread = self.spread(rate)
            error = "" if spread is None else f" +- {spread:.4f}"
            mark = "  best" if rate == self.best and math.isfinite(self.mean[rate]) else ""
            each = "".join(f"{loss:9.4f}" for loss in losses)
            lines.append(f"{rate:12.4g}{each}   mean {self.mean[rate]:.4f}{error}{mark}")
        if self.optimum is None:
            rates = " ".join(f"{rate:.4g}" for rate in self.missing())
            lines.append(f"    not bracketed, the best rate is at an edge: extend by {rates}")
        else:
            noise = "" if self.optimum.stderr is None else f"; seeds alone: 2^{self.optimum.stderr:.2f}"
            around = f"{self.optimum.learning_rate:.4g}, uncertain by 2^{self.optimum.uncertainty:.2f}{noise}"
            lines.append(f"    optimum {around}")
        return "\n".join(lines) + "\n"


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


@dataclass(frozen=True)
class Transfer:
    """The curves of a sweep, narrow to wide."""

    curves: tuple[Curve, ...]

    @classmethod
    def of(cls, points: Iterable[Point]) -> Transfer:
        """Sort trials into curves.

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
        return cls(tuple(found))

    @property
    def best_moved_log2(self) -> float:
        """How far the best rate of the grid moves from the narrowest to the widest, in factors of 2."""
        return math.log2(self.curves[-1].best / self.curves[0].best)

    @property
    def optimum_moved_log2(self) -> float | None:
        """The same for the optima between the rates; None where one of the two is not bracketed."""
        first, last = self.curves[0].optimum, self.curves[-1].optimum
        return None if first is None or last is None else last.log2_rate - first.log2_rate

    def regret(self, curve: Curve) -> float | None:
        """Nats lost at the widest with the best rate of this one; None where that was not tried there."""
        widest = self.curves[-1]
        tried = widest.mean.get(curve.best)
        return None if tried is None else tried - widest.mean[widest.best]

    @property
    def missing(self) -> list[float]:
        """Rates to add until every width is bracketed."""
        return sorted({rate for curve in self.curves for rate in curve.missing()})

    @property
    def choice(self) -> Choice | None:
        """None unless every width is bracketed."""
        widest, moved = self.curves[-1].optimum, self.optimum_moved_log2
        if widest is None or moved is None or self.missing:
            return None
        around = max(widest.uncertainty, abs(moved))
        low, high = (2.0 ** (widest.log2_rate + sign * around) for sign in (-1, 1))
        return Choice(widest.learning_rate, low, high, self.curves[-1].width)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; a loss or regret is None where a trial diverged."""
        widths = [
            {
                "width": curve.width,
                "losses": [
                    {"learning_rate": rate, "by_seed": [_finite(loss) for loss in row], "spread": curve.spread(rate)}
                    for rate, row in curve.losses.items()
                ],
                "best": curve.best,
                "missing": list(curve.missing()),
                "optimum": None
                if curve.optimum is None
                else {"learning_rate": curve.optimum.learning_rate, **vars(curve.optimum)},
                "regret_at_widest": _finite(self.regret(curve)),
            }
            for curve in self.curves
        ]
        return {
            "widths": widths,
            "best_moved_log2": self.best_moved_log2,
            "optimum_moved_log2": self.optimum_moved_log2,
            "choice": None if self.choice is None else vars(self.choice),
        }

    def __str__(self) -> str:
        lines = [str(curve) for curve in self.curves]
        narrow, wide = self.curves[0], self.curves[-1]
        if narrow is not wide:
            moved = self.optimum_moved_log2
            between = "" if moved is None else f", the optimum between the rates by {moved:+.2f}"
            lines.append(
                f"from width {narrow.width} to {wide.width} the best rate moves by {self.best_moved_log2:+.2f} factors "
                f"of 2{between}"
            )
        for curve in self.curves[:-1]:
            if (lost := self.regret(curve)) is not None:
                lines.append(f"the best rate of width {curve.width} costs {lost:.4f} nats at width {wide.width}")
        return "\n".join(lines)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
