"""When a batch grows by measurement: decided from logged numbers alone, so a list of numbers is the whole test."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from hfpretrain.training.adaptive_ramp import AdaptiveRamp, saved_batch
from hfpretrain.training.batch_ramp import plan_ramp, stages_from

LENGTH = 4
ABOVE = (100.0, 10.0)


def adaptive(*, total_rows: int = 200, largest: int = 10, steps: int = 3, lead: int = 1) -> AdaptiveRamp:
    """2 rows (8 tokens) at first; grows above 2 batches for 3 steps."""
    ramp = plan_ramp(((0, 2 * LENGTH),), sequence_length=LENGTH, total_tokens=total_rows * LENGTH)
    return AdaptiveRamp(ramp, largest_rows=largest, total_rows=total_rows, factor=2, steps=steps, lead_steps=lead)


def show(ramp: AdaptiveRamp, lines: Sequence[tuple[float | None, float | None]], *, first: int = 1) -> list[str]:
    told = [ramp.observe(first + index, *line) for index, line in enumerate(lines)]
    return [reason for reason in told if reason is not None]


def stages(ramp: AdaptiveRamp) -> list[tuple[int, int]]:
    return [(stage.first_step, stage.rows) for stage in ramp.ramp.stages]


def test_doubles_up_to_the_largest_and_says_why() -> None:
    ramp = adaptive()
    told = show(ramp, [ABOVE] * 40)
    # Above since step 1, so for 3 steps at 4: from step 5 on. The next are seen from the stage's own first step on.
    assert stages(ramp) == [(0, 2), (5, 4), (10, 8), (15, 10)]
    assert told[0] == (
        "the batch grows from 8 to 16 tokens at step 5: the noise scale less its standard error, 90 tokens now, has "
        "been above 2 batches (16 tokens) since step 1; 52 steps in all"
    )
    assert ramp.ramp.num_steps == 15 + (200 - 70) // 10
    assert [ramp.rows_of(step) for step in (4, 5, 10, 15)] == [(8, 2), (10, 4), (30, 8), (70, 10)]


@pytest.mark.parametrize(
    ("lines", "grown"),
    [
        ([(26.1, 10.0)] * 4, True),  # 16.1 > 2 * 8
        ([(26.0, 10.0)] * 9, False),  # 16 is not above
        ([(20.0, 0.0), (20.0, 0.0), (10.0, 0.0), (20.0, 0.0), (20.0, 0.0), (20.0, 0.0)], False),  # a dip begins anew
        ([(20.0, 0.0), (20.0, 0.0), (10.0, 0.0), (20.0, 0.0), (20.0, 0.0), (20.0, 0.0), (20.0, 0.0)], True),
        ([ABOVE, ABOVE, (None, None), ABOVE, ABOVE, ABOVE], False),  # undefined begins anew
        ([(100.0, None)] * 9, False),
        ([(float("nan"), 1.0)] * 9, False),
        ([(100.0, 90.0)] * 9, False),
    ],
)
def test_only_while_it_stays_above(lines: list[tuple[float | None, float | None]], grown: bool) -> None:
    assert bool(show(adaptive(), lines)) is grown


def test_never_shrinks() -> None:
    ramp = adaptive()
    show(ramp, [ABOVE] * 10)
    before = stages(ramp)
    assert show(ramp, [(0.1, 0.0)] * 30, first=11) == []
    assert stages(ramp) == before


def test_a_decision_takes_effect_after_what_is_already_handed_out() -> None:
    ramp = adaptive(lead=5)
    show(ramp, [ABOVE] * 9)
    assert stages(ramp) == [(0, 2), (9, 4)]  # decided after step 4
    assert ramp.above_since is None  # nothing is concluded from steps of the old batch


def test_no_growth_where_no_whole_step_would_be_left() -> None:
    ramp = adaptive(total_rows=13)  # 5 steps of 2, and 3 rows are left: no step of 4
    assert show(ramp, [ABOVE] * 6) == []
    ramp = adaptive(total_rows=14)
    assert len(show(ramp, [ABOVE] * 6)) == 1
    assert (stages(ramp), ramp.ramp.num_steps, ramp.ramp.total_rows) == ([(0, 2), (5, 4)], 6, 14)


@pytest.mark.parametrize("stop", range(1, 20))
def test_interrupted_anywhere_it_decides_the_same(stop: int) -> None:
    lines = [ABOVE] * 7 + [(1.0, 0.0)] + [ABOVE] * 12
    straight = adaptive(lead=2)
    show(straight, lines)
    assert len(straight.ramp.stages) > 2
    first = adaptive(lead=2)
    show(first, lines[:stop])
    saved = json.loads(json.dumps(saved_batch(first)))
    second = adaptive(lead=2)
    assert second.resume(stages_from(saved["stages"]), above_since=saved["adaptive"]["above_since"]) == []
    show(second, lines[stop:], first=stop + 1)
    assert (second.ramp, second.above_since) == (straight.ramp, straight.above_since)


def test_what_a_resume_cannot_be() -> None:
    ramp = adaptive(largest=4)
    problems = ramp.resume(stages_from([[0, 3], [4, 6]]), above_since=None)
    assert [(problem.source, problem.given) for problem in problems] == [
        ("batch_ramp", "noise_scale:8"),
        ("batch_tokens", "16"),
    ]
    assert "noise_scale:12" in problems[0].remedy
