"""A batch that grows, on one process: what may change at a resume, and a ramp that is decided while it runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hfpretrain.errors import ConfigError
from hfpretrain.training.adaptive_ramp import AdaptiveRamp
from hfpretrain.training.batch_ramp import BatchRamp, plan_ramp, ramp_lr_factor
from hfpretrain.training.trainer import PretrainTrainer
from ramp_runs import RAMP, ROWS, factor, ramp_trainer, trained
from tiny import SEQUENCE_LENGTH


def ramp(*marks: tuple[int, int], num_steps: int) -> BatchRamp:
    """From (first step, rows)."""
    tokens = [(sum(_rows(marks)[:step]) * SEQUENCE_LENGTH, rows * SEQUENCE_LENGTH) for step, rows in marks]
    return plan_ramp(tokens, sequence_length=SEQUENCE_LENGTH, num_steps=num_steps)


def _rows(marks: tuple[tuple[int, int], ...]) -> list[int]:
    return [[rows for first, rows in marks if first <= step][-1] for step in range(50)]


def run(folder: Path, plan: Any, num_steps: int, resume: Path | None = None) -> dict[str, Any]:
    return trained(ramp_trainer(folder, plan, num_steps, lr_factor=lambda step: 1.0), resume)


def test_a_constant_ramp_is_a_constant_batch(tmp_path: Path) -> None:
    plain = run(tmp_path / "a", 4 * SEQUENCE_LENGTH, 3)
    same = run(tmp_path / "b", ramp((0, 4), num_steps=3), 3)
    assert plain["lines"] == same["lines"]
    assert all(torch.equal(value, same["weights"][name]) for name, value in plain["weights"].items())
    assert plain["flos"] == same["flos"]


def test_only_the_future_of_a_ramp_may_change(tmp_path: Path) -> None:
    run(tmp_path, ramp((0, 2), (2, 4), num_steps=5), 5)
    later = ramp((0, 2), (2, 4), (3, 8), num_steps=4)
    for plan, step, expected in ((later, 3, [2, 2, 4, 8]), (2 * SEQUENCE_LENGTH, 2, [2, 2, 2])):
        got = run(tmp_path / str(step), plan, len(expected), tmp_path / f"checkpoint-{step}")["lines"]
        assert [line["batch_tokens"] // SEQUENCE_LENGTH for line in got] == expected
        assert got[-1]["input_tokens"] == sum(expected) * SEQUENCE_LENGTH
    with pytest.raises(ValueError, match=r"step 2 took 4 rows then and would take 2 now[\s\S]*after step 3 may change"):
        run(tmp_path / "a", 2 * SEQUENCE_LENGTH, 5, tmp_path / "checkpoint-3")
    with pytest.raises(ValueError, match="step 0 took 2 rows then and would take 4 now"):
        run(tmp_path / "b", 4 * SEQUENCE_LENGTH, 5, tmp_path / "checkpoint-1")


class Growing:
    """Rows that no checkpoint could describe."""

    def rows_of(self, step: int) -> tuple[int, int]:
        return step, 1


def test_a_batch_without_stages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Growing; expected a number, a BatchRamp or an AdaptiveRamp"):
        ramp_trainer(tmp_path, Growing(), 3)


def test_flops_and_progress_follow_the_batch(tmp_path: Path) -> None:
    from hfpretrain.training.throughput import TokenFlops

    trainer = ramp_trainer(tmp_path, RAMP, len(ROWS), save_strategy="no")
    trainer.flops = TokenFlops(full=3.0, causal=2.0)
    trained(trainer)
    assert trainer.state.total_flos == 2.0 * sum(ROWS) * SEQUENCE_LENGTH
    assert trainer.state.num_input_tokens_seen == sum(ROWS) * SEQUENCE_LENGTH
    end = trainer.state.log_history[-1]
    assert end["train_samples_per_second"] * end["train_runtime"] == pytest.approx(sum(ROWS), rel=0.01)


class WithNoiseScale(PretrainTrainer):
    """A noise scale made up for the test: high from step 2 on, undefined at step 7."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.state.global_step != 7:
            high = self.state.global_step >= 2
            logs |= {"noise_scale_tokens": 1e6 if high else 1.0, "noise_scale_stderr_tokens": 1.0}
        super().log(logs, start_time)


def adaptive_run(
    folder: Path, *, total_rows: int = 90, lead: int = 1, resume: Path | None = None, workers: int = 0
) -> tuple[PretrainTrainer, dict[str, Any]]:
    start = plan_ramp(((0, 2 * SEQUENCE_LENGTH),), sequence_length=SEQUENCE_LENGTH, num_steps=total_rows // 2)
    plan = AdaptiveRamp(start, largest_rows=10, total_rows=total_rows, factor=2, steps=2, lead_steps=lead)
    rates = partial(ramp_lr_factor, schedule="warmup_stable_decay", warmup_rows=4, decay_rows=20, decay_shape="linear")
    rates = partial(rates, min_lr_ratio=0.1, largest_rows=10, lr_rule="sqrt")
    trainer = ramp_trainer(
        folder,
        plan,
        start.num_steps,
        lr_factor=lambda step: rates(step, ramp=plan.ramp),
        dataloader_num_workers=workers,
    )
    trainer.__class__ = WithNoiseScale
    return trainer, trained(trainer, resume)


@pytest.mark.parametrize(("lead", "workers"), [(1, 0), (5, 2)])  # 2 processes that take 2 steps ahead each
def test_a_ramp_that_is_decided_while_it_runs(lead: int, workers: int, tmp_path: Path) -> None:
    trainer, straight = adaptive_run(tmp_path / "a", lead=lead, workers=workers)
    rows = [line["batch_tokens"] // SEQUENCE_LENGTH for line in straight["lines"]]
    # Above since step 2, for 2 steps at 4; then since the stage's first step, but for step 7.
    changes = {1: [(5, 4), (11, 8), (15, 10)], 5: [(9, 4), (17, 8)]}[lead]
    expected = [[2, *[wide for first, wide in changes if first <= step]][-1] for step in range(len(rows))]
    assert rows == expected
    assert 90 - expected[-1] < sum(rows) <= 90  # it ends on tokens
    assert straight["lines"][-1]["input_tokens"] == sum(rows) * SEQUENCE_LENGTH
    assert trainer.state.global_step == trainer.state.max_steps == len(trainer.steps) == len(rows)
    decided = [(line["step"], line["next_batch_tokens"]) for line in straight["lines"] if "next_batch_tokens" in line]
    assert decided == [(first - lead, wide * SEQUENCE_LENGTH) for first, wide in changes]
    # The last learning rate is the schedule's minimum, for the batch that there is.
    assert straight["lines"][-1]["learning_rate"] == pytest.approx(1e-2 * 0.1 * (rows[-1] / 10) ** 0.5, rel=1e-12)
    # Stopped right after a decision, before it takes effect, later, and at the end: nothing changes.
    for step in (changes[0][0] - lead, changes[0][0] - lead + 1, changes[1][0] + 1, len(rows))[:: 1 + (workers > 0)]:
        again = adaptive_run(tmp_path / "b", lead=lead, resume=tmp_path / "a" / f"checkpoint-{step}", workers=workers)[
            1
        ]
        assert again["lines"] == straight["lines"]
        assert all(torch.equal(value, straight["weights"][name]) for name, value in again["weights"].items())


def test_an_adaptive_ramp_goes_on_from_a_given_past(tmp_path: Path) -> None:
    """The stages that were done bind; a stage that was only written down does not."""
    run(tmp_path, ramp((0, 2), (1, 4), (3, 16), num_steps=4), 4)
    checkpoint = tmp_path / "checkpoint-2"
    _, got = adaptive_run(tmp_path / "b", resume=checkpoint)
    rows = [line["batch_tokens"] // SEQUENCE_LENGTH for line in got["lines"]]
    assert rows[:5] == [2, 4, 4, 4, 4]
    assert max(rows) == 10
    with pytest.raises(ConfigError, match="the batch has already grown to 384 tokens"):
        adaptive_run(tmp_path / "c", resume=tmp_path / "checkpoint-4")


def test_the_learning_rate_that_is_asked_for_holds(tmp_path: Path) -> None:
    """A new last stage changes what learning_rate means, and so every rate that follows."""
    short, long = ramp((0, 2), (2, 4), num_steps=4), ramp((0, 2), (2, 4), (3, 16), num_steps=4)
    trained(ramp_trainer(tmp_path, short, 4, lr_factor=factor(short)))
    got = trained(ramp_trainer(tmp_path, long, 4, lr_factor=factor(long)), tmp_path / "checkpoint-3")
    assert got["lines"][2]["learning_rate"] == pytest.approx(1e-2 * factor(short)(2), rel=1e-12)
    assert got["lines"][3]["learning_rate"] == pytest.approx(1e-2 * factor(long)(3), rel=1e-12)
