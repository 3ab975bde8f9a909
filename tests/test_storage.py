"""The worked numbers of the first source document about memory that does not depend on the batch, and about disk."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hfpretrain.planning.figures import figure_table
from hfpretrain.planning.storage import (
    checkpoint_count,
    full_checkpoint_bytes,
    kept_checkpoints,
    save_seconds,
    static_memory_bytes,
    storage_figures,
    weight_bytes,
    zero_checkpoint_bytes,
)


def test_static_memory() -> None:
    """7B: 14 + 14 + 28 + 28 + 28 = 112 GB; Adam's moments 56 GB, four times the weights; inference 14 GB, an eighth.

    The first document's last paragraph calls the 112 GB "optimizer state"; by its own table they are everything.
    """
    memory = static_memory_bytes(7e9)
    parts = (memory.weights, memory.gradients, memory.master_weights, memory.first_moment, memory.second_moment)
    assert [part / 1e9 for part in parts] == [14, 14, 28, 28, 28]
    assert memory.total == 112e9 == 16 * 7e9
    assert memory.moments == 56e9 == 4 * memory.weights
    assert weight_bytes(7e9) == 14e9 == memory.total / 8
    assert memory.total > 80e9  # not on one 80 GB device
    assert static_memory_bytes(7e9, float32_gradients=True).total - memory.total == 2 * 7e9


def test_checkpoints() -> None:
    """7B: 28 + 28 + 28 = 84 GB, 42 s at 2 GB/s; 119 of them 10 TB; 70B: 840 GB, 7 minutes."""
    full = full_checkpoint_bytes(7e9)
    assert full == 84e9
    assert weight_bytes(7e9, "float32") == 28e9
    assert full_checkpoint_bytes(7e9, compute_copy=True) == 98e9  # "close to 100 GB"
    assert save_seconds(full, storage_gbps=2) == 42
    assert checkpoint_count(119_210, 1000) == 119
    assert checkpoint_count(119_209, 1000, last_step=True) == 120
    assert checkpoint_count(119_000, 1000, last_step=True) == 119
    assert 119 * full == 9.996e12
    assert full_checkpoint_bytes(70e9) == 840e9
    assert save_seconds(840e9, storage_gbps=2) == 7 * 60
    assert save_seconds(full, storage_gbps=2, writers=64) == pytest.approx(42 / 64)  # the clock is divided by W


def test_rotation_keeps_one_more_while_it_saves() -> None:
    assert kept_checkpoints(119, None) == kept_checkpoints(119, 0) == 119
    assert kept_checkpoints(119, 3) == 4
    assert kept_checkpoints(2, 3) == 2


def test_zero_checkpoints() -> None:
    """Bytes of the files of one run at each stage, one rank, bf16, 2,756,864 parameters (see the docstring)."""
    parameters = 2_756_864
    weights = 5_515_848  # model.safetensors
    assert zero_checkpoint_bytes(parameters, zero_stage=2) == pytest.approx(33_079_495 + 5_524_593 + weights, rel=2e-3)
    assert zero_checkpoint_bytes(parameters, zero_stage=3) == pytest.approx(33_076_679 + 21_089 + weights, rel=2e-3)
    assert zero_checkpoint_bytes(parameters, zero_stage=1) == pytest.approx(33_079_495 + 5_524_465 + weights, rel=2e-3)
    assert zero_checkpoint_bytes(parameters, zero_stage=0) == pytest.approx(38_645_385 + weights, rel=2e-3)
    assert full_checkpoint_bytes(parameters) == pytest.approx(11_027_504 + 22_079_563, rel=2e-3)  # DDP
    with pytest.raises(ValueError, match="stage"):
        zero_checkpoint_bytes(parameters, zero_stage=4)


def test_table_shows_units_and_formulas() -> None:
    figures = storage_figures(
        parameters=7 * 10**9, num_steps=119_209, save_steps=1000, save_total_limit=3, storage_gbps=2, zero_stage=3
    )
    values = {figure.name: figure.value for figure in figures}
    assert values["zero_checkpoint_bytes"] == 98e9
    assert values["disk_with_rotation_bytes"] == 4 * 98e9
    plain, explained = figure_table(figures), figure_table(figures, explain=True)
    assert re.search(r"^static memory +112 GB$", plain, flags=re.MULTILINE)
    assert "12 N" not in plain
    assert "12 N" in explained


@pytest.mark.parametrize(
    "call",
    [
        lambda: save_seconds(1, storage_gbps=0),
        lambda: checkpoint_count(1, 0),
    ],
)
def test_counts_must_be_positive(call: Any) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        call()
