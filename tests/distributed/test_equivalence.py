"""One batch is one update: the same at 1 process, 2 ranks, ZeRO 0-3, any micro-batch; equal to float64 by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from equivalence_worker import (
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MUP_BASE_WIDTH,
    NUM_STEPS,
    ROWS,
    SCHEDULE,
    SEED,
    WEIGHT_DECAY,
    Z_LOSS_WEIGHT,
)
from hfpretrain.data.order import BlockOrder
from hfpretrain.model import build_model
from hfpretrain.training.schedule import lr_factor
from launching import TOPOLOGIES, launch, remove_stale_build_locks
from tiny import NUM_BLOCKS, RaggedBlocks, tiny_config

pytestmark = pytest.mark.distributed
CASES = {"single": ("llama:1", "llama:2", "llama:4", "gpt2:2", "mup:4")} | dict.fromkeys(
    TOPOLOGIES[1:], ("llama:1", "llama:4", "gpt2:2", "mup:4")
)
WORKER = Path(__file__).with_name("equivalence_worker.py")


def mup_by_hand(name: str) -> dict[str, float]:
    """What each value is multiplied by at twice the base width (Tensor Programs V), the head's 1/2 in its weight."""
    hidden, head = "_proj" in name, name == "lm_head.weight"
    learns = {"lr": 0.5, "decay": 2.0} if hidden or head else {"lr": 1.0, "decay": 1.0}
    return {"init": 0.5**0.5 if hidden else 0.5 if head else 1.0, "eps": 1.0 if head else 0.5, **learns}


STANDARD = {"init": 1.0, "lr": 1.0, "decay": 1.0, "eps": 1.0}


def reference(model_type: str, *, mean_of_means: bool = False) -> dict:
    """The training in float64, document by document, with AdamW written out (seed document, section 2.3.8).

    Cross-entropy plus z-loss, both from the logits of one document at a time.
    """
    config = tiny_config("llama" if model_type == "mup" else model_type)
    model = build_model(config, seed=SEED).double().train()
    scale = {n: mup_by_hand(n) if model_type == "mup" else STANDARD for n, _ in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p *= scale[name]["init"]
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    second = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    order, blocks, losses, norms = BlockOrder(NUM_BLOCKS, SEED), RaggedBlocks(), [], []
    logged: dict[str, list[float]] = {"z_loss": [], "log_z_mean": [], "logit_max": []}
    for step in range(NUM_STEPS):
        model.zero_grad()
        rows = [blocks[order.block_at(step * ROWS + row)] for row in range(ROWS)]
        pieces = [
            np.split(row["input_ids"][: row["piece_lengths"].sum()], np.cumsum(row["piece_lengths"])[:-1])
            for row in rows
        ]
        total = sum(len(piece) - 1 for row in pieces for piece in row)
        summed, squares, log_zs, largest = 0.0, 0.0, 0.0, 0.0
        for row in pieces:
            row_tokens = sum(len(piece) - 1 for piece in row)
            for piece in row:
                if len(piece) < 2:
                    continue
                ids = torch.from_numpy(piece)[None]
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
                log_z = logits.logsumexp(-1)
                nats = (log_z - logits[torch.arange(len(piece) - 1), ids[0, 1:]]).sum()
                objective = nats + Z_LOSS_WEIGHT * log_z.square().sum()
                (objective / (row_tokens * ROWS if mean_of_means else total)).backward()
                squares, log_zs = squares + log_z.square().sum().item(), log_zs + log_z.sum().item()
                largest = max(largest, logits.abs().max().item())
                summed += nats.item() / (row_tokens * ROWS) * total if mean_of_means else nats.item()
        norm = math.sqrt(sum(p.grad.pow(2).sum().item() for p in model.parameters()))
        losses.append(summed / total)
        logged["z_loss"].append(Z_LOSS_WEIGHT * squares / total)
        logged["log_z_mean"].append(log_zs / total)
        logged["logit_max"].append(largest)
        norms.append(norm)
        rate = LEARNING_RATE * lr_factor(step, **SCHEDULE)
        for name, p in model.named_parameters():
            grad = p.grad * min(1.0, MAX_GRAD_NORM / (norm + 1e-6))
            first[name] = 0.9 * first[name] + 0.1 * grad
            second[name] = 0.95 * second[name] + 0.05 * grad**2
            m_hat, v_hat = first[name] / (1 - 0.9 ** (step + 1)), second[name] / (1 - 0.95 ** (step + 1))
            decayed = p.ndim == 2 and not any(word in name for word in ("embed_tokens", "wte", "wpe"))
            with torch.no_grad():
                own = scale[name]
                decay = WEIGHT_DECAY * own["decay"] if decayed else 0.0
                p -= rate * own["lr"] * (m_hat / (v_hat.sqrt() + EPSILON * own["eps"]) + decay * p)
    return logged | {"loss": losses, "grad_norm": norms, "initial": initial, "final": dict(model.named_parameters())}


@pytest.fixture(scope="module")
def references() -> dict[str, dict]:
    return {name: reference(name) for name in ("llama", "gpt2", "mup")}


@pytest.fixture(scope="module")
def build_locks() -> None:
    remove_stale_build_locks()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_same_training_everywhere(topology: str, references: dict, tmp_path: Path, build_locks: None) -> None:
    launch(topology, WORKER, str(tmp_path), *CASES[topology])
    for case in CASES[topology]:
        model_type, rows = case.split(":")
        expected = references[model_type]
        got = json.loads((tmp_path / f"{model_type}-{rows}.json").read_text())
        assert got["world_size"] == (1 if topology == "single" else 2)
        assert got["stage"] == (int(topology[-1]) if topology.startswith("zero") else None)
        assert got["path"] == "fused"
        np.testing.assert_allclose(got["loss"], expected["loss"], atol=1e-5, err_msg=case)
        for name in ("z_loss", "log_z_mean", "logit_max"):
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=f"{case} {name}")
        np.testing.assert_allclose(got["grad_norm"], expected["grad_norm"], rtol=1e-4, err_msg=case)
        np.testing.assert_allclose(
            got["clip_fraction"], [float(norm > MAX_GRAD_NORM) for norm in expected["grad_norm"]]
        )
        rates = [LEARNING_RATE * lr_factor(step, **SCHEDULE) for step in range(NUM_STEPS)]
        np.testing.assert_allclose(got["learning_rate"], rates, rtol=1e-9)
        assert update_error(torch.load(tmp_path / f"{model_type}-{rows}.pt"), expected) < 1e-4, case
        # What the engine itself says: the schedule's last value, and its half for the groups that muP slows down.
        expected_rates = {LEARNING_RATE * SCHEDULE["min_lr_ratio"]}
        if model_type == "mup":
            expected_rates |= {0.5 * rate for rate in expected_rates}
            assert tiny_config("llama").hidden_size == 2 * MUP_BASE_WIDTH
        assert {round(rate, 12) for rate in got["group_rates"]} == {round(rate, 12) for rate in expected_rates}, case


def update_error(weights: dict[str, torch.Tensor], expected: dict) -> float:
    """|got - expected| / |expected - initial| over all parameters after all steps."""
    missed = sum((weights[name].double() - final).pow(2).sum().item() for name, final in expected["final"].items())
    moved = sum((final - expected["initial"][name]).pow(2).sum().item() for name, final in expected["final"].items())
    return math.sqrt(missed / moved)


def test_mean_of_means_is_caught(references: dict) -> None:
    """Negative control: the habit of averaging per row first misses every tolerance above, and clipping does occur."""
    wrong, right = reference("llama", mean_of_means=True), references["llama"]
    assert abs(np.array(wrong["loss"]) - np.array(right["loss"])).max() > 1e-3
    assert abs(np.array(wrong["grad_norm"]) / np.array(right["grad_norm"]) - 1).max() > 1e-2
    assert update_error(wrong["final"], right) > 1e-2
    clipped = [norm > MAX_GRAD_NORM for norm in right["grad_norm"]]
    assert any(clipped)
    assert not all(clipped)
