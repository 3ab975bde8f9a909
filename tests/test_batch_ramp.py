"""Ramps against a loop that walks through the tokens, learning rates against numbers worked out by hand."""

from __future__ import annotations

import math
import random

import pytest

from hfpretrain.arguments.types import NoiseScaleRamp, batch_ramp
from hfpretrain.errors import ConfigError
from hfpretrain.training.batch_ramp import (
    BatchRamp,
    Stage,
    batch_lr_factor,
    changed_past,
    plan_ramp,
    ramp_lr_factor,
    stages_from,
    steps_within,
)
from hfpretrain.training.schedule import SCHEDULES, lr_factor

LENGTH = 4
# 1, 2, 3 and 8 times 2 rows of 4 tokens: 3 steps to token 24, 2 to 56, 2 to 104, then 64 a step.
RAMP = plan_ramp(((0, 8), (20, 16), (56, 24), (100, 64)), sequence_length=LENGTH, num_steps=10)


def walk(marks: list[tuple[int, int]], num_steps: int) -> list[tuple[int, int]]:
    """(first token, batch tokens) of each step: the last batch whose mark has been reached."""
    taken, tokens = [], 0
    for _ in range(num_steps):
        batch = [batch for mark, batch in marks if mark <= tokens][-1]
        taken.append((tokens, batch))
        tokens += batch
    return taken


def test_by_hand() -> None:
    assert RAMP.stages == (Stage(0, 0, 2), Stage(3, 6, 4), Stage(5, 14, 6), Stage(7, 26, 16))
    assert [RAMP.rows_of(step) for step in (0, 2, 3, 4, 5, 7, 9)] == [
        *((0, 2), (4, 2), (6, 4), (10, 4), (14, 6), (26, 16), (58, 16)),
    ]
    assert (RAMP.total_rows, RAMP.total_tokens, RAMP.batch_tokens(9)) == (74, 296, 64)
    assert str(RAMP) == "0:8,24:16,56:24,104:64"  # where the stages really begin


@pytest.mark.parametrize("seed", range(40))
def test_against_a_walk_through_the_tokens(seed: int) -> None:
    draw = random.Random(seed)
    rows = sorted(draw.sample(range(1, 40), 4))
    marks = [(0, rows[0] * LENGTH)]
    for wider in rows[1:]:
        marks.append((marks[-1][0] + marks[-1][1] * draw.randint(1, 4) + draw.randint(0, 30), wider * LENGTH))
    ramp = plan_ramp(marks, sequence_length=LENGTH, num_steps=60)
    expected = walk(marks, 60)
    assert [(LENGTH * first, LENGTH * count) for first, count in map(ramp.rows_of, range(60))] == expected
    for step, (first, count) in enumerate(map(ramp.rows_of, range(60))):
        assert {ramp.step_of(row) for row in range(first, first + count)} == {step}
        assert ramp.rows_before(step + 1) == first + count
        asked = LENGTH * (first + count) + draw.randint(0, LENGTH - 1)  # not enough for one more step
        assert steps_within(ramp.stages, asked // LENGTH) == step + 1
    again = plan_ramp(batch_ramp(str(ramp)), sequence_length=LENGTH, num_steps=60)
    assert again == ramp
    assert stages_from([[stage.first_step, stage.rows] for stage in ramp.stages]) == ramp.stages
    for share in (0.01, 0.3, 0.77, 1.0):  # a share of the tokens, in steps: the whole ones, and the part of the next
        whole = int(ramp.first_steps(share))
        part = ramp.first_steps(share) - whole
        tokens = ramp.rows_before(whole) + part * ramp.rows_of(whole)[1]
        assert tokens == pytest.approx(share * ramp.total_rows)
        assert ramp.first_steps(1 - share) + ramp.last_steps(share) == pytest.approx(60)


def test_far_out() -> None:
    ramp = plan_ramp(((0, 8), (10**15, 800)), sequence_length=LENGTH, num_steps=10**15)
    step = 10**15 // 8 + 10**12
    assert ramp.rows_of(step) == (10**15 // LENGTH + 10**12 * 200, 200)
    assert ramp.step_of(ramp.rows_of(step)[0] + 199) == step
    with pytest.raises(ValueError, match="cannot be negative; got -1"):
        ramp.rows_of(-1)
    with pytest.raises(ValueError, match="rows begin at 0; got -2"):
        ramp.step_of(-2)


def test_length_from_tokens() -> None:
    marks = ((0, 8), (20, 16))
    for total, steps in ((8, 1), (24, 3), (39, 3), (40, 4), (55, 4), (56, 5), (57, 5)):
        if total < 40:
            with pytest.raises(ConfigError, match="stage 2 of the ramp never has a step"):
                plan_ramp(marks, sequence_length=LENGTH, total_tokens=total)
        else:
            assert plan_ramp(marks, sequence_length=LENGTH, total_tokens=total).num_steps == steps
    assert plan_ramp(((0, 8),), sequence_length=LENGTH, total_tokens=3).num_steps == 1
    with pytest.raises(ValueError, match="give total_tokens or num_steps"):
        plan_ramp(marks, sequence_length=LENGTH)
    with pytest.raises(ConfigError, match="40 tokens are 4 steps of this ramp"):
        plan_ramp(marks, sequence_length=LENGTH, total_tokens=40, num_steps=5)


def test_everything_wrong_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_ramp(((5, 8), (5, 6), (30, 4), (40, 64)), sequence_length=LENGTH, world_size=2, num_steps=9)
    told = [str(problem) for problem in caught.value.problems]
    expected = (
        ("does not begin at token 0", "5:8", "0:8 as the first stage"),
        ("stage 2 of the ramp does not begin after the one before it, at 5 tokens", "5:6", "increase"),
        ("the batch of stage 2 is no larger than the one before it, 8", "5:6", "grow"),
        ("the batch of stage 2 is no whole number of rows of 4 tokens", "5:6", "4 or 8 in its place"),
        ("the batch of stage 3 is no larger than the one before it, 6", "30:4", "grow"),
        ("a step has fewer rows than there are processes", "stage 3: 4 / 4 = 1 rows, 2 processes", "at least 8"),
    )
    assert len(told) == len(expected)
    for text, words in zip(told, expected, strict=True):
        assert all(word in text for word in words), text


def test_stages_that_never_come() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_ramp(((0, 16), (2, 32), (9, 64), (1000, 128)), sequence_length=LENGTH, num_steps=4)
    assert [problem.given for problem in caught.value.problems] == ["2:32", "1_000:128"]
    assert "the next begins at the same step" in caught.value.problems[0].what
    assert "the run ends after 208 tokens" in caught.value.problems[1].what


def rates(ramp: BatchRamp, rule: str = "sqrt", **settings: object) -> list[float]:
    values = {"schedule": "constant", "warmup_rows": 0, "decay_rows": 0, "decay_shape": "linear", "min_lr_ratio": 0.0}
    largest = ramp.stages[-1].rows
    return [
        ramp_lr_factor(step, ramp=ramp, largest_rows=largest, lr_rule=rule, **(values | settings))  # type: ignore[arg-type]
        for step in range(ramp.num_steps)
    ]


def test_learning_rate_follows_the_batch() -> None:
    assert rates(RAMP, "none") == [1.0] * 10
    assert rates(RAMP, "linear") == [1 / 8] * 3 + [1 / 4] * 2 + [3 / 8] * 2 + [1.0] * 3
    assert rates(RAMP) == pytest.approx([math.sqrt(x) for x in rates(RAMP, "linear")], rel=1e-15)
    assert batch_lr_factor(7, 7, "sqrt") == 1.0


def test_the_schedule_is_over_tokens() -> None:
    """74 rows end at 2 4 6 | 10 14 | 20 26 | 42 58 74: warm-up over 10 of them, linear decay over the last 48."""
    got = rates(RAMP, "none", schedule="warmup_stable_decay", warmup_rows=10, decay_rows=48, min_lr_ratio=0.1)
    decay = [0.1 + 0.9 * (1 - done / 48) for done in (16, 32)]
    assert got == pytest.approx([0.2, 0.4, 0.6, 1, 1, 1, 1, *decay, 0.1], rel=1e-15)
    assert got[-1] == 0.1  # exactly, and the last batch has the factor 1
    both = rates(RAMP, schedule="warmup_stable_decay", warmup_rows=10, decay_rows=48, min_lr_ratio=0.1)
    assert both == pytest.approx([x * y for x, y in zip(got, rates(RAMP), strict=True)], rel=1e-15)
    assert both[0] > 0
    assert both[-1] == 0.1
    cosine = rates(RAMP, "none", schedule="cosine")
    peak = [(done - 2) / 72 for done in (2, 4, 6, 10, 14, 20, 26, 42, 58, 74)]  # from the end of the first step
    assert cosine == pytest.approx([0.5 * (1 + math.cos(math.pi * share)) for share in peak], abs=1e-15)
    assert cosine[-1] == 0.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_stage_is_no_ramp_to_the_last_bit(schedule: str) -> None:
    ends = {"min_lr_ratio": 0.0 if schedule == "constant" else 0.07, "decay_shape": "1-sqrt"}
    for num_steps, rows in ((7, 3), (61, 7), (997, 1000)):
        warmup, decay = num_steps // 3, num_steps // 4 if schedule == "warmup_stable_decay" else 0
        ramp = plan_ramp(((0, rows * LENGTH),), sequence_length=LENGTH, num_steps=num_steps)
        got = rates(ramp, schedule=schedule, warmup_rows=warmup * rows, decay_rows=decay * rows, **ends)
        steps = {"num_steps": num_steps, "warmup_steps": warmup, "decay_steps": decay}
        assert got == [lr_factor(step, schedule=schedule, **steps, **ends) for step in range(num_steps)]  # type: ignore[arg-type]
        assert [ramp.first_steps(share) for share in (0.02, 0.1, 0.145)] == [s * num_steps for s in (0.02, 0.1, 0.145)]


def test_only_the_past_binds() -> None:
    then = stages_from([[0, 2], [3, 4], [9, 8]])
    assert changed_past(then, then, step=100) is None
    assert changed_past(then, stages_from([[0, 2], [3, 4]]), step=9) is None
    assert changed_past(then, stages_from([[0, 2], [3, 4], [20, 64]]), step=9) is None
    assert changed_past(then, stages_from([[0, 8]]), step=0) is None
    assert changed_past(then, stages_from([[0, 2], [3, 4]]), step=10) == "step 9 took 8 rows then and would take 4 now"
    assert changed_past(then, stages_from([[0, 2], [4, 4]]), step=4) == "step 3 took 4 rows then and would take 2 now"
    assert changed_past(then, stages_from([[0, 3], [3, 4]]), step=5) == "step 0 took 2 rows then and would take 3 now"


def test_grammar() -> None:
    assert batch_ramp("0:0.25M, 200M:0.5M,1B:1M") == ((0, 250_000), (200 * 10**6, 500_000), (10**9, 10**6))
    assert batch_ramp("noise_scale:0.25M") == NoiseScaleRamp(250_000, 2.0, 200)
    assert batch_ramp("noise_scale:8Ki,steps:50,factor:1.5") == NoiseScaleRamp(8192, 1.5, 50)
    for text in ("0.25M", "0:1M,2M", "noise_scale", "noise_scale:1M,k:2", "noise_scale:1M,steps:2,steps:3"):
        with pytest.raises(ValueError, match=r"tokens seen:batch tokens.*or noise_scale:0\.25M"):
            batch_ramp(text)
    for text in ("noise_scale:1M,factor:0", "noise_scale:1M,steps:0", "noise_scale:0", "noise_scale:1M,factor:inf"):
        with pytest.raises(ValueError, match="at least 1 and a factor above 0"):
            batch_ramp(text)
    with pytest.raises(ValueError, match="number of tokens"):
        batch_ramp("0:lots")
