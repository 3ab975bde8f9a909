"""Schedules against numbers worked out by hand and against transformers' own where the definitions meet."""

import ast
import math
from pathlib import Path

import pytest

from hfpretrain.errors import ConfigError
from hfpretrain.training import schedule as schedule_module
from hfpretrain.training.schedule import DECAY_SHAPES, SCHEDULES, lr_factor, resolve_steps


def curve(num_steps: int, **settings) -> list[float]:
    return [lr_factor(step, num_steps=num_steps, **settings) for step in range(num_steps)]


def test_wsd_by_hand():
    got = curve(
        10, schedule="warmup_stable_decay", warmup_steps=2, decay_steps=4, decay_shape="1-sqrt", min_lr_ratio=0.1
    )
    decay = [0.1 + 0.9 * (1 - math.sqrt(t)) for t in (0.25, 0.5, 0.75)]
    assert got == pytest.approx([0.5, 1, 1, 1, 1, 1, *decay, 0.1], abs=1e-15)


def test_linear_and_cosine_by_hand():
    assert curve(5, schedule="linear", warmup_steps=1) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert curve(5, schedule="linear", warmup_steps=0) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert curve(6, schedule="cosine", warmup_steps=2) == pytest.approx(
        [0.5, 1, 0.5 + math.sqrt(2) / 4, 0.5, 0.5 - math.sqrt(2) / 4, 0], abs=1e-15
    )
    assert curve(4, schedule="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("shape", DECAY_SHAPES)
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shared_rules(schedule, warmup_steps, shape):
    decay_steps = 20 if schedule == "warmup_stable_decay" else 0
    settings = {"schedule": schedule, "warmup_steps": warmup_steps, "decay_steps": decay_steps, "decay_shape": shape}
    got = curve(50, min_lr_ratio=0.05, **settings)
    assert got[0] > 0
    assert max(got) == 1.0
    assert got[-1] == (1.0 if schedule == "constant" else 0.05)
    peak = got.index(1.0)
    assert got[:peak] == sorted(got[:peak])
    assert got[peak:] == sorted(got[peak:], reverse=True)
    assert lr_factor(10_000, num_steps=50, min_lr_ratio=0.05, **settings) == got[-1]


def test_cosine_agrees_with_transformers_once_the_off_by_one_is_undone():
    """transformers' factor at its step s + 1 is ours at s: theirs starts at 0 and never reaches its last value."""
    torch = pytest.importorskip("torch")
    from transformers import get_cosine_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_cosine_schedule_with_warmup(optimizer, 5, 30).lr_lambdas[0]
    assert curve(30, schedule="cosine", warmup_steps=5) == pytest.approx([theirs(s + 1) for s in range(30)], abs=1e-12)


def test_a_longer_horizon_keeps_the_stable_part():
    """Branching: the stable phase of a short and of a long run is the same, so either can be resumed as the other."""
    short = curve(40, schedule="warmup_stable_decay", warmup_steps=5, decay_steps=10)
    long = curve(400, schedule="warmup_stable_decay", warmup_steps=5, decay_steps=10)
    assert short[:30] == long[:30]
    assert short[30] < 1.0


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "warmup_stable_decay", "num_steps": 10, "warmup_steps": 6, "decay_steps": 5},
        {"schedule": "warmup_stable_decay", "num_steps": 10, "warmup_steps": 6, "decay_steps": 0},
        {"schedule": "cosine", "num_steps": 10, "warmup_steps": 10},
        {"schedule": "cosine", "num_steps": 10, "warmup_steps": 2, "decay_steps": 3},
        {"schedule": "linear", "num_steps": 1, "warmup_steps": 0},
        {"schedule": "constant", "num_steps": 10, "warmup_steps": 11},
    ],
)
def test_lengths_that_do_not_fit_are_refused_with_all_numbers(settings):
    with pytest.raises(ConfigError) as error:
        lr_factor(0, **settings)
    for name in ("num_steps", "warmup_steps", "decay_steps"):
        assert f"{name}={settings.get(name, 0)}" in str(error.value)


def test_bad_values_are_refused():
    with pytest.raises(ConfigError, match="warmup_stable_decay, cosine, linear, constant"):
        lr_factor(0, schedule="polynomial", num_steps=10, warmup_steps=0)
    with pytest.raises(ConfigError, match="min_lr_ratio"):
        lr_factor(0, schedule="cosine", num_steps=10, warmup_steps=0, min_lr_ratio=1.5)
    with pytest.raises(ConfigError, match="1-sqrt"):
        lr_factor(0, schedule="warmup_stable_decay", num_steps=9, warmup_steps=0, decay_steps=1, decay_shape="exp")
    with pytest.raises(ValueError, match="negative"):
        lr_factor(-1, schedule="cosine", num_steps=10, warmup_steps=0)


def test_resolve_steps():
    assert resolve_steps(num_steps=100, warmup_fraction=0.05, decay_fraction=0.2) == (5, 20)
    assert resolve_steps(num_steps=10, warmup_fraction=0.25, decay_steps=3) == (3, 3)  # halves up
    assert resolve_steps(num_steps=10, warmup_fraction=0.001) == (1, 0)
    assert resolve_steps(num_steps=10, warmup_fraction=0.0, decay_fraction=0.0) == (0, 0)
    assert resolve_steps(num_steps=10, warmup_steps=0) == (0, 0)
    with pytest.raises(ConfigError) as error:
        resolve_steps(num_steps=10, warmup_steps=1, warmup_fraction=0.1, decay_fraction=1.2)
    assert len(error.value.problems) == 2


def test_schedule_is_pure():
    tree = ast.parse(Path(schedule_module.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "collections.abc", "math", "hfpretrain.errors"}
