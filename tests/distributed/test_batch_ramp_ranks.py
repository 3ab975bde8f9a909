"""A batch that grows on real ranks: interrupted in every stage it is bitwise the same; each update is the exact one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from equivalence_worker import LEARNING_RATE
from launching import launch, remove_stale_build_locks
from ramp_runs import MIDDLES, RAMP, ROWS, factor, ramp_trainer, trained
from test_equivalence import reference, update_error
from tiny import NUM_BLOCKS, SEQUENCE_LENGTH

WORKER = Path(__file__).with_name("ramp_runs.py")


@pytest.fixture(scope="module")
def expected() -> dict:
    return reference("llama", step_rows=ROWS, factor=factor())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("straight")
    return folder, trained(ramp_trainer(folder, RAMP, len(ROWS)))


def agrees(lines: list[dict], weights: dict[str, torch.Tensor], expected: dict) -> None:
    """With float64 by hand: every loss, norm and rate, and the whole update."""
    np.testing.assert_allclose([line["loss"] for line in lines], expected["loss"], atol=1e-5)
    np.testing.assert_allclose([line["grad_norm"] for line in lines], expected["grad_norm"], rtol=1e-4)
    rates = [LEARNING_RATE * factor()(step) for step in range(len(ROWS))]
    np.testing.assert_allclose([line["learning_rate"] for line in lines], rates, rtol=1e-9)
    assert update_error(weights, expected) < 1e-4


def test_one_process_against_float64(straight: tuple[Path, dict], expected: dict) -> None:
    _, got = straight
    agrees(got["lines"], got["weights"], expected)
    tokens = np.array(ROWS) * SEQUENCE_LENGTH
    assert [line["batch_tokens"] for line in got["lines"]] == tokens.tolist()
    assert [line["input_tokens"] for line in got["lines"]] == tokens.cumsum().tolist()
    epochs = np.array(ROWS).cumsum() / NUM_BLOCKS
    np.testing.assert_allclose([line["epoch"] for line in got["lines"]], epochs, rtol=1e-12)
    assert epochs[-1] > 1  # the ramp goes on over the border of an epoch
    # Negative control: one step with the rows of the stage before it is another training.
    late = reference("llama", step_rows=[2, 2, 2, 2, 4, 4, 6, 6, 6, 16, 16], factor=factor())
    assert update_error(got["weights"], late) > 1e-2


@pytest.mark.parametrize("step", MIDDLES)
def test_resumed_in_the_middle_of_a_stage(step: int, straight: tuple[Path, dict], tmp_path: Path) -> None:
    folder, whole = straight
    again = trained(ramp_trainer(tmp_path, RAMP, len(ROWS)), folder / f"checkpoint-{step}")
    assert again["lines"] == whole["lines"]
    assert all(torch.equal(value, whole["weights"][name]) for name, value in again["weights"].items())


@pytest.mark.distributed
def test_zero3_two_ranks(expected: dict, tmp_path: Path) -> None:
    remove_stale_build_locks()
    launch("zero3", WORKER, str(tmp_path))
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["differing"] == []
    agrees(record["lines"], torch.load(tmp_path / "weights.pt"), expected)


@pytest.mark.distributed
def test_two_ranks_go_on_from_one_process(straight: tuple[Path, dict], expected: dict, tmp_path: Path) -> None:
    """In the middle of the second stage: the same rows, so the same training as by hand."""
    folder, whole = straight
    launch("cpu_ddp", WORKER, str(tmp_path), str(folder / "checkpoint-4"))
    record = json.loads((tmp_path / "record.json").read_text())
    agrees(record["lines"], torch.load(tmp_path / "weights.pt"), expected)
    for name in ("target_tokens", "input_tokens", "batch_tokens", "epoch", "learning_rate"):
        assert [line[name] for line in record["lines"]] == [line[name] for line in whole["lines"]]
