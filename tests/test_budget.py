"""The worked numbers of the first source document about batch and steps, by the functions for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hfpretrain.planning import budget
from hfpretrain.planning.budget import (
    accumulation_steps,
    optimizer_steps,
    padding_waste,
    rows_per_step,
    stage_figures,
    tokens_per_step,
    unused_tokens,
    warmup_share,
)

TRILLION = 10**12
SEED: dict[str, Any] = {"per_device_train_batch_size": 4, "accumulation_steps": 8, "world_size": 64}
SEED_BATCH = 8_388_608


def test_first_document_batch() -> None:
    """b = 4, K = 8, W = 64, L = 4096; and b = 2, K = 16 is the same step."""
    assert rows_per_step(**SEED) == 4 * 8 * 64 == 2048
    assert tokens_per_step(**SEED, sequence_length=4096) == 2048 * 4096 == SEED_BATCH
    assert rows_per_step(per_device_train_batch_size=2, accumulation_steps=16, world_size=64) == 2048
    for per_device, expected in ((4, 8), (2, 16)):
        accumulation = accumulation_steps(
            batch_tokens=SEED_BATCH, sequence_length=4096, per_device_train_batch_size=per_device, world_size=64
        )
        assert accumulation == expected


def test_first_document_steps() -> None:
    """10^12 / 8,388,608 = 119,209.29: the document rounds up to 119,210, a run has 119,209 whole steps."""
    assert pytest.approx(119_209.29, abs=0.005) == TRILLION / SEED_BATCH
    assert -(-TRILLION // SEED_BATCH) == 119_210
    assert optimizer_steps(TRILLION, SEED_BATCH) == 119_209
    assert unused_tokens(TRILLION, SEED_BATCH) == 2_428_928 == TRILLION - 119_209 * SEED_BATCH
    assert optimizer_steps(TRILLION, SEED_BATCH // 2) == 238_418  # "about 238k", at 4.2M tokens
    assert warmup_share(2000, 119_209) == pytest.approx(0.017, abs=0.0005)
    assert 0.005 < warmup_share(2000, 119_000) < 0.04  # the document's code has total=119_000


def test_a_run_shorter_than_a_step_is_one_step() -> None:
    assert optimizer_steps(100, 256) == 1
    assert unused_tokens(100, 256) == -156


@pytest.mark.parametrize(("rows", "per_device", "devices", "expected"), [(2048, 4, 64, 8), (10, 4, 2, 2), (7, 2, 3, 2)])
def test_accumulation_is_that_of_the_recipe(rows: int, per_device: int, devices: int, expected: int) -> None:
    given = {"sequence_length": 16, "per_device_train_batch_size": per_device, "world_size": devices}
    assert accumulation_steps(batch_tokens=rows * 16, **given) == expected


def test_accumulation_of_an_impossible_batch() -> None:
    for batch, devices in ((100, 1), (16, 2)):
        with pytest.raises(ValueError, match="whole number of rows"):
            accumulation_steps(
                batch_tokens=batch, sequence_length=16, per_device_train_batch_size=1, world_size=devices
            )


def test_padding_waste() -> None:
    """A mean document of 820 tokens in rows of 4096: 80 % padding, a fifth of the throughput."""
    assert padding_waste(820, 4096) == pytest.approx(0.80, abs=0.0005)
    assert 1 - padding_waste(820, 4096) == pytest.approx(1 / 5, abs=0.0005)
    assert padding_waste(0.2 * 4096, 4096) == pytest.approx(0.8)
    assert 4096 / 512 == 8  # documents of 512 tokens in a packed row
    assert padding_waste(5000, 4096) == 0.0


def test_stages_are_numbered_from_one() -> None:
    values = {figure.name: figure.value for figure in stage_figures([(0, 1024, 5, 0.5), (5120, 4096, 7, 1.0)])}
    assert values["stage_1_learning_rate"] == 0.5
    assert (values["stage_2_first_token"], values["stage_2_batch_tokens"], values["stage_2_steps"]) == (5120, 4096, 7)
    assert len(values) == 8


@pytest.mark.parametrize(
    "call",
    [
        lambda: optimizer_steps(0, 1),
        lambda: warmup_share(1, 0),
        lambda: padding_waste(0, 1),
    ],
)
def test_counts_must_be_positive(call: Any) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        call()


def test_the_whole_room_is_pure() -> None:
    for path in Path(budget.__file__).parent.glob("*.py"):
        assert not re.search(r"^\s*(import|from) (torch|transformers|deepspeed|accelerate)", path.read_text(), re.M), (
            path
        )
