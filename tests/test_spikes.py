"""What is a spike, and that nothing of it reaches weights or moments."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from hfpretrain.training.spikes import (
    LEAST_STEPS,
    MOST_CONSECUTIVE,
    WINDOW_STEPS,
    ConsecutiveSpikesError,
    SpikeGuard,
    SpikeHistory,
    limit,
)


def judge(history: SpikeHistory, loss: float, norm: float = 1.0, step: int = 0) -> bool:
    return history.judge(loss, norm, deviations=8.0, step=step, where="here") is not None


def filled(steps: int = LEAST_STEPS) -> SpikeHistory:
    """Losses 3.9, 4.0, 4.1 in turn: median 4, deviations 0 and 0.1."""
    history = SpikeHistory()
    assert not any(judge(history, 3.9 + 0.1 * (step % 3), 1.0 + 0.1 * (step % 3)) for step in range(steps))
    return history


def test_the_threshold_by_hand() -> None:
    """Median 4, absolute deviations 1, 0, 1, 2, 96: their median 1, 1.4826 standard deviations of a normal."""
    assert limit([3.0, 4.0, 5.0, 2.0, 100.0], 8.0) == (4.0, pytest.approx(4 + 8 * 1.4826))
    assert limit([2.0] * 9, 8.0) == (2.0, pytest.approx(2.0 + 8 * 0.02))  # at least 1 % of the median


def test_either_number_decides_and_small_ones_do_not() -> None:
    history = filled(30)
    threshold = limit(history.losses, 8.0)[1]
    assert threshold == pytest.approx(4 + 8 * 0.14826)
    assert not judge(filled(30), threshold * 0.9999)
    assert judge(filled(30), threshold * 1.0001)
    spike = filled(30).judge(4.0, 50.0, deviations=8.0, step=7, where="there")
    assert spike is not None
    assert (spike.exceeded, spike.step, spike.consecutive) == ("grad_norm", 7, 1)
    assert not judge(history, 0.01, 0.001)


def test_nothing_is_judged_before_there_is_a_history() -> None:
    history = filled(LEAST_STEPS - 1)
    assert not judge(history, 1000.0)
    assert judge(history, 1000.0)


def test_a_spike_makes_no_room_for_the_next() -> None:
    history = filled(30)
    before = list(history.losses)
    assert [judge(history, 50.0 * 10**power) for power in range(5)] == [True] * 5
    assert history.losses == before
    assert (history.skipped_updates, len(history.in_a_row)) == (5, 5)
    assert not judge(history, 4.0)
    assert (history.skipped_updates, len(history.in_a_row)) == (5, 0)


def test_old_steps_leave_the_window() -> None:
    """A level that rises slowly is followed; the same level all at once is a spike."""
    history = filled(30)
    assert judge(filled(30), 8.0)
    for step in range(4 * WINDOW_STEPS):
        assert not judge(history, 4.0 + step / WINDOW_STEPS, 1.0)
    assert len(history.losses) == len(history.grad_norms) == WINDOW_STEPS
    assert not judge(history, 8.0)


class Loop:
    """A plain loop with AdamW in two groups, clipped; `spikes` are steps whose inputs are 1000 times too large."""

    def __init__(self, *, guarded: bool = True, prepare: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        groups: list[Any] = [{"params": [p for p in self.model.parameters() if p.ndim == n]} for n in (1, 2)]
        self.optimizer: Any = torch.optim.AdamW(groups, lr=1e-2, fused=True)
        if prepare:
            accelerator = Accelerator(cpu=True)
            # One state for the process, which a stock Trainer with accumulation leaves off; no step would be made.
            accelerator.gradient_state._set_sync_gradients(True)
            self.optimizer = accelerator.prepare(self.optimizer)
        self.guard = SpikeGuard(8.0).attach(self.optimizer) if guarded else None
        self.generator = torch.Generator().manual_seed(1)

    def step(self, number: int, *, factor: float = 1.0, update: bool = True) -> Any:
        inputs = torch.randn(16, 4, generator=self.generator)
        loss = (self.model(inputs) - factor).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.guard is not None:
            self.guard.begin(number, float(loss.detach()), norm, where=f"row {16 * number}")
        if update:
            self.optimizer.step()
        spike = self.guard.end() if self.guard is not None else None
        self.gradients = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        self.optimizer.zero_grad()
        return spike

    def state(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [value.detach().clone() for value in (*self.model.parameters(), *moments)]


@pytest.mark.parametrize("prepare", [False, True])
def test_the_run_goes_on_as_if_the_batch_had_not_been(prepare: bool) -> None:
    guarded, never = Loop(prepare=prepare), Loop(guarded=False)
    for number in range(40):
        bad = number in (25, 30, 31)
        before = guarded.state()
        spike = guarded.step(number, factor=1000.0 if bad else 1.0)
        never.step(number, update=not bad)
        assert (spike is not None) == bad
        assert all(map(torch.equal, before, guarded.state())) == bad
        assert all(gradient is not None for gradient in guarded.gradients)  # given back
        assert all(map(torch.equal, guarded.state(), never.state()))
    assert guarded.guard is not None
    assert guarded.guard.history.skipped_updates == 3
    guarded.guard.remove()
    before = guarded.state()
    guarded.guard = None
    guarded.step(41, factor=1000.0)
    assert not any(map(torch.equal, before, guarded.state()))


def test_too_many_in_a_row_stop_with_the_places_of_the_data() -> None:
    loop = Loop()
    for number in range(30):
        loop.step(number)
    before, last = loop.state(), 30 + MOST_CONSECUTIVE - 1
    for number in range(30, last):
        assert loop.step(number, factor=1000.0).consecutive == number - 29
    with pytest.raises(ConsecutiveSpikesError) as caught:
        loop.step(last, factor=1000.0)
    assert all(f"row {16 * step}" in str(caught.value) for step in range(30, last + 1))
    assert all(map(torch.equal, before, loop.state()))


def test_what_is_not_finite_is_not_made_and_not_remembered() -> None:
    loop = Loop()
    for number in range(30):
        loop.step(number)
    before, history = loop.state(), loop.guard.state_dict()  # type: ignore[union-attr]
    with pytest.raises(FloatingPointError, match="row 480"):
        loop.step(30, factor=math.inf)
    assert all(map(torch.equal, before, loop.state()))
    assert loop.guard.state_dict() == history  # type: ignore[union-attr]


def test_state_goes_through_json(tmp_path: Path) -> None:
    guard = SpikeGuard(8.0)
    guard.history = filled(30)
    judge(guard.history, 99.0)
    (tmp_path / "state.json").write_text(json.dumps(guard.state_dict()))
    loaded = SpikeGuard(8.0)
    loaded.load_state_dict(json.loads((tmp_path / "state.json").read_text()))
    assert loaded.history == guard.history


def test_a_norm_that_only_the_step_knows() -> None:
    """As under DeepSpeed: asked for once, when the optimizer's step begins, however many calls make the step."""
    loop, asked = Loop(), []
    for number in range(30):
        loop.step(number)
    assert loop.guard is not None
    loop.step(30, update=True)
    loop.guard.begin(31, 1.0, lambda: asked.append(1) or 1e6)  # type: ignore[func-returns-value]
    assert asked == []
    loop.optimizer.step()
    loop.optimizer.step()
    spike = loop.guard.end()
    assert spike is not None
    assert (spike.grad_norm, asked) == (1e6, [1])


def test_misuse_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="deviations is 0"):
        SpikeGuard(0)
    with pytest.raises(TypeError, match="holds no torch optimizer"):
        SpikeGuard(8.0).attach(SimpleNamespace())
    loop = Loop()
    assert loop.guard is not None
    loop.guard.remove()
    with pytest.raises(RuntimeError, match=r"attach\(\) must come after"):
        loop.step(0)
