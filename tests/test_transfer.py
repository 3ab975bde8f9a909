"""The analysis of a sweep gives back parabolas, edges, divergences and spreads that can be worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from hfpretrain.mup.transfer import Curve, Point, Transfer, vertex

INF = math.inf


def curve(width: int, losses: dict[float, float | tuple[float, ...]]) -> Curve:
    """Learning rates given as log2."""
    return Curve(width, {2.0**x: y if isinstance(y, tuple) else (y,) for x, y in losses.items()})


def test_a_parabola_is_recovered_exactly() -> None:
    """3 (x + 6.3)^2 + 2 on a grid of any steps has its minimum at -6.3."""
    for grid in ([-8, -7, -6, -5, -4], [-9, -7, -6.5, -6, -3], [-10, -6, -5]):
        found = curve(32, {x: 3 * (x + 6.3) ** 2 + 2 for x in grid})
        assert found.best == 2.0 ** min(grid, key=lambda x: abs(x + 6.3))
        assert found.optimum is not None
        assert found.optimum.log2_rate == pytest.approx(-6.3, abs=1e-12)
        assert found.optimum.learning_rate == pytest.approx(2**-6.3)
        assert found.optimum.stderr is None


def test_the_vertex_moves_by_its_slopes() -> None:
    """Against finite differences; and what all losses have in common moves nothing."""
    x, y = (-7.0, -6.0, -4.5), (2.4, 2.1, 2.3)
    where, slopes = vertex(x, y)
    for index in range(3):
        moved = [value + 1e-6 * (index == at) for at, value in enumerate(y)]
        assert (vertex(x, moved)[0] - where) / 1e-6 == pytest.approx(slopes[index], rel=1e-4)
    assert sum(slopes) == pytest.approx(0, abs=1e-12)
    assert vertex((0, 1, 2), (1.0, 1.0, 2.0))[0] == 0.5  # two equal: between them
    for flat in ((1.0, 1.0, 1.0), (1.0, 2.0, 3.0), (3.0, 2.0, 1.0)):
        with pytest.raises(ValueError, match="no minimum in the middle"):
            vertex((0, 1, 2), flat)


def test_resolution_and_the_spread_of_seeds() -> None:
    """Losses 1, 0, 1 in steps of 1: the vertex moves by -1/4 of what is added on the left, +1/4 on the right."""
    even = curve(8, {0: (1.0, 1.5), 1: (0.0, 0.5), 2: (1.0, 1.5)})
    assert even.optimum is not None
    assert (even.optimum.log2_rate, even.optimum.stderr, even.optimum.uncertainty) == (1.0, 0.0, 0.5)
    assert even.spread(1.0) == pytest.approx(0.5 / math.sqrt(2))
    # Seeds differ by 8 nats between the sides: vertices at 1 +- (4 + 4) / 4, so +- 2; mean curve as before.
    noisy = curve(8, {0: (5.0, -3.0), 1: (0.0, 0.0), 2: (-3.0, 5.0)})
    assert noisy.optimum is not None
    assert noisy.optimum.log2_rate == pytest.approx(1.0)
    assert noisy.optimum.stderr == pytest.approx(2.0)  # half the distance of two values is their standard error
    assert noisy.optimum.uncertainty == noisy.optimum.stderr
    wide = curve(8, {0: 1.0, 1: 0.0, 4: 1.0})
    assert wide.optimum is not None
    assert wide.optimum.uncertainty == 1.5  # half the larger step


def test_edges_say_what_to_add() -> None:
    falling, rising = curve(8, {-4: 3.0, -3: 2.0, -2: 1.0}), curve(8, {-4: 1.0, -2: 2.0, -1: 3.0})
    assert (falling.bracketed, falling.missing(), falling.optimum) == (False, (0.5, 1.0), None)
    assert (rising.bracketed, rising.missing()) == (False, (2.0**-8, 2.0**-6))
    assert curve(8, {-4: 1.0, -3: 1.0, -2: 2.0}).missing() == (2.0**-6, 2.0**-5)  # a tie: the lower one
    assert curve(8, {-3: 1.0}).missing() == (2.0**-5, 2.0**-4)
    transfer = Transfer((falling, curve(16, {-4: 3.0, -3: 2.0, -2: 2.5})))
    assert transfer.choice is None
    assert transfer.missing == [0.5, 1.0]
    assert transfer.optimum_moved_log2 is None
    assert transfer.best_moved_log2 == -1


def test_divergence_bounds_from_above() -> None:
    lost = curve(8, {-4: 3.0, -3: 2.0, -2: INF})
    assert lost.optimum is not None
    assert (lost.optimum.log2_rate, lost.optimum.uncertainty) == (-3.0, 1.0)
    # With one seed gone the rate is gone, and its neighbour is best.
    half = curve(8, {-4: (3.0, 3.0), -3: (2.0, 2.2), -2: (1.0, INF)})
    assert half.best == 2.0**-3
    assert half.spread(0.25) is None
    gone = curve(8, {-4: INF, -3: INF, -2: INF})
    assert gone.missing() == (2.0**-6, 2.0**-5)  # only lower rates can help
    transfer = Transfer.of([Point(8, 2.0**x, 0, INF) for x in (-4, -3, -2)])
    assert json.loads(json.dumps(transfer.as_dict(), allow_nan=False))["widths"][0]["losses"][0]["by_seed"] == [None]
    assert "best\n" not in str(transfer)


def test_transfer_of_two_widths() -> None:
    """Optima at -6 and -5.5: the best rate of the grid moves by one step, or by none where both see the same."""
    points = [
        Point(width, 2.0**x, seed, (x - at) ** 2 + seed / 8)
        for width, at in ((32, -6.1), (64, -5.4))
        for x in (-8, -7, -6, -5, -4)
        for seed in (1, 0)
    ]
    transfer = Transfer.of(reversed(points))
    narrow, wide = transfer.curves
    assert (narrow.width, list(wide.losses)) == (32, [2.0**x for x in (-8, -7, -6, -5, -4)])
    assert narrow.losses[2.0**-7] == pytest.approx((0.81, 0.81 + 1 / 8))
    assert transfer.best_moved_log2 == 1
    assert transfer.optimum_moved_log2 == pytest.approx(0.7)
    assert transfer.regret(narrow) == pytest.approx(0.6**2 - 0.4**2)
    assert transfer.regret(wide) == 0
    choice = transfer.choice
    assert choice is not None
    assert choice.learning_rate == pytest.approx(2**-5.4)
    assert (choice.low, choice.high) == pytest.approx((2**-6.1, 2**-4.7))  # what it moved, more than half a step
    assert choice.width == 64
    told = str(transfer)
    assert "moves by +1.00 factors of 2, the optimum between the rates by +0.70" in told
    assert "the best rate of width 32 costs 0.2000 nats at width 64" in told
    untried = Transfer((curve(8, {-7: 2.0, -6.5: 1.0, -6: 2.0}), wide))
    assert untried.regret(untried.curves[0]) is None


def test_trials_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="is there twice"):
        Transfer.of([Point(8, 0.1, 0, 1.0), Point(8, 0.1, 0, 1.0)])
    with pytest.raises(ValueError, match=r"rates \[0.2\] lack some of the seeds \[0, 1\]"):
        Transfer.of([Point(8, 0.1, 0, 1.0), Point(8, 0.1, 1, 1.0), Point(8, 0.2, 1, 1.0)])
