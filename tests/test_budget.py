"""The worked numbers of the two source documents about steps, compute, memory and disk, by the functions for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hfpretrain.planning import budget
from hfpretrain.planning.budget import (
    accumulation_steps,
    checkpoint_count,
    contradictions,
    cost,
    device_hours,
    figure_table,
    full_checkpoint_bytes,
    kept_checkpoints,
    layer_matrix_parameters,
    optimizer_steps,
    over_training,
    padding_waste,
    rows_per_step,
    save_seconds,
    static_memory_bytes,
    storage_figures,
    tokens_per_parameter,
    tokens_per_step,
    training_flops,
    unused_tokens,
    warmup_share,
    weight_bytes,
    zero_checkpoint_bytes,
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


def test_training_flops_are_two_and_two_and_two() -> None:
    flops = training_flops(7e9, 1e12)
    assert flops.forward == flops.backward_activations == flops.backward_weights == 2 * 7e9 * 1e12
    assert flops.backward_activations + flops.backward_weights == 4 * 7e9 * 1e12
    assert flops.total == 6 * 7e9 * 1e12 == 4.2e22


def test_twelve_d_squared_are_parameters() -> None:
    """The second document says "about 12 d^2 FLOPs" a token; a weight is a multiplication and an addition: 24 d^2."""
    d = 3072
    assert layer_matrix_parameters(d) == 12 * d**2  # q, k, v, o: 4; gate, up, down at 8/3 d: 8
    assert layer_matrix_parameters(d, ffn_width=4 * d, ffn_matrices=2) == 12 * d**2
    assert layer_matrix_parameters(d, ffn_width=4 * d) == 16 * d**2
    tokens = 1000
    products = [(d, d)] * 4 + [(d, 8 * d // 3)] * 2 + [(8 * d // 3, d)]
    assert sum(2 * tokens * d1 * d2 for d1, d2 in products) == 24 * d**2 * tokens  # Y = X W: 2 T d1 d2
    assert training_flops(layer_matrix_parameters(d), tokens).forward == 24 * d**2 * tokens
    # LLaMA-2 7B, d = 4096, f = 11008, 32 layers of 12.06 d^2: 6.5 of its 6.7 billion parameters.
    layer = layer_matrix_parameters(4096, ffn_width=11008)
    assert layer / 4096**2 == pytest.approx(12.06, abs=0.005)
    assert 32 * layer == 6_476_005_376


def test_over_training() -> None:
    """LLaMA-2 7B/2T and LLaMA-3 8B/15T, "14 to 100 times": 14.3 and 94 by the rule of 20."""
    assert over_training(7e9, 2e12) == pytest.approx(14.29, abs=0.005)
    assert over_training(8e9, 15e12) == pytest.approx(93.75)
    assert tokens_per_parameter(8e9, 15e12) == 1875


def test_hours_and_money() -> None:
    """4.2e22 FLOPs at 400 TFLOP/s: 105 million seconds = 29,167 hours."""
    hours = device_hours(4.2e22, peak_flops=1e15, mfu=0.4)
    assert hours == pytest.approx(29_166.67, abs=0.01)
    assert cost(hours, 2.5) == pytest.approx(72_916.67, abs=0.01)


def test_contradictions_come_together() -> None:
    problems = contradictions(
        total_tokens=10_000, batch_tokens=1000, sequence_length=300, world_size=4, warmup_steps=11
    )
    text = "\n".join(map(str, problems))
    assert len(problems) == 3
    assert "900, 1_200" in text
    assert "3 rows, 4 devices" in text
    assert "10 steps" in text
    assert not contradictions(total_tokens=10_000, batch_tokens=1200, sequence_length=300, world_size=4)


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
        lambda: optimizer_steps(0, 1),
        lambda: warmup_share(1, 0),
        lambda: device_hours(1.0, peak_flops=1.0, mfu=0.0),
        lambda: padding_waste(0, 1),
        lambda: save_seconds(1, storage_gbps=0),
        lambda: checkpoint_count(1, 0),
        lambda: over_training(0, 1),
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
