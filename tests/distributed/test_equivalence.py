"""One batch is one update: the same at 1 process, 2 ranks, ZeRO 0-3, any micro-batch; equal to float64 by hand.

So is the noise estimate of each step, where the same rows meet in a micro-batch; and a poisoned one is left out alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from equivalence_worker import (
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MUP,
    MUP_BASE_DEPTH,
    MUP_BASE_WIDTH,
    NUM_STEPS,
    RESUME_AT,
    ROWS,
    SCHEDULE,
    SEED,
    WEIGHT_DECAY,
    Z_LOSS_WEIGHT,
)
from hfpretrain.data.order import BlockOrder
from hfpretrain.model import build_model
from hfpretrain.training.noise_estimate import Estimate, NoiseAverage, estimate
from hfpretrain.training.schedule import lr_factor
from launching import TOPOLOGIES, launch, remove_stale_build_locks
from signal_cases import BF16_LEARNING_RATE, BF16_WEIGHT_DECAY, POISONED, SPIKE_STEPS, bf16_batches, bf16_model
from tiny import NUM_BLOCKS, RaggedBlocks, tiny_config

pytestmark = pytest.mark.distributed
CASES = {"single": ("llama:1", "llama:3", "llama:4", "gpt2:2", "mup:4")} | dict.fromkeys(
    TOPOLOGIES[1:], ("llama:1", "llama:4", "gpt2:2", "mup:4")
)
CASES["zero3"] += ("mup_tied:4", "mup_moe:4")  # where parameters are partitioned, groups and initial values are hardest
WORKER = Path(__file__).with_name("equivalence_worker.py")


def mup_by_hand(model_type: str, name: str) -> dict[str, float]:
    """What each value is multiplied by at twice the base width (Tensor Programs V), the readout's 1/2 in its weight.

    All but the case "mup" are also twice as deep (CompleteP), a branch's 1/2 being in its last weight and bias; GPT-2
    has 1/sqrt(2) of that in its own initialisation.
    """
    inside = ".layers." in name or ".h." in name
    readout = name in ("lm_head.weight", "transformer.ln_f.weight", "transformer.ln_f.bias") or ".gate." in name
    hidden = inside and not readout and any(part in name for part in ("_proj", "c_attn.w", "c_fc.w", "c_proj.w"))
    hidden &= not name.endswith("bias")
    own = {"init": 1.0, "lr": 1.0, "eps": 1.0 if readout else 0.5}
    if hidden or readout:
        own |= {"init": 0.5**0.5 if hidden else 0.5, "lr": 0.5}
    if inside and model_type != "mup":
        if any(part in name for part in ("o_proj", "down_proj", "c_proj")):
            own |= {"init": own["init"] / (2**0.5 if name.endswith("c_proj.weight") else 2), "lr": own["lr"] / 2}
        else:
            own["eps"] /= 2
    return own | {"decay": 1 / own["lr"]}


STANDARD = {"init": 1.0, "lr": 1.0, "decay": 1.0, "eps": 1.0}


def reference(
    model_type: str,
    *,
    mean_of_means: bool = False,
    step_rows: Sequence[int] = (ROWS,) * NUM_STEPS,
    factor: Callable[[int], float] | None = None,
) -> dict:
    """The training in float64, document by document, with AdamW written out (seed document, section 2.3.8).

    Cross-entropy plus z-loss, both from the logits of one document at a time. `rows`: of each step and row
    its targets, its length and the gradient of its summed loss.
    """
    factor = factor or partial(lr_factor, **SCHEDULE)
    model = build_model(tiny_config(MUP.get(model_type, model_type)), seed=SEED).double().train()
    model.set_experts_implementation("eager")  # the grouped product takes no float64
    names = [name for name, _ in model.named_parameters()]
    scale = {name: mup_by_hand(model_type, name) if model_type in MUP else STANDARD for name in names}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p *= scale[name]["init"]
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    second = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    order, blocks, losses, norms = BlockOrder(NUM_BLOCKS, SEED), RaggedBlocks(), [], []
    logged: dict[str, list] = {"z_loss": [], "log_z_mean": [], "logit_max": [], "rows": []}
    for step, num_rows in enumerate(step_rows):
        model.zero_grad()
        rows = [blocks[order.block_at(sum(step_rows[:step]) + row)] for row in range(num_rows)]
        pieces = [
            np.split(row["input_ids"][: row["piece_lengths"].sum()], np.cumsum(row["piece_lengths"])[:-1])
            for row in rows
        ]
        total = sum(len(piece) - 1 for row in pieces for piece in row)
        summed, squares, log_zs, largest = 0.0, 0.0, 0.0, 0.0
        row_sums = []
        for row in pieces:
            before = flat_gradient(model)
            row_tokens = sum(len(piece) - 1 for piece in row)
            for piece in row:
                if len(piece) < 2:
                    continue
                ids = torch.from_numpy(piece)[None]
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
                log_z = logits.logsumexp(-1)
                nats = (log_z - logits[torch.arange(len(piece) - 1), ids[0, 1:]]).sum()
                objective = nats + Z_LOSS_WEIGHT * log_z.square().sum()
                (objective / (row_tokens * num_rows if mean_of_means else total)).backward()
                squares, log_zs = squares + log_z.square().sum().item(), log_zs + log_z.sum().item()
                largest = max(largest, logits.abs().max().item())
                summed += nats.item() / (row_tokens * num_rows) * total if mean_of_means else nats.item()
            gradient = (flat_gradient(model) - before) * total
            row_sums.append({"tokens": row_tokens, "length": sum(map(len, row)), "gradient": gradient})
        logged["rows"].append(row_sums)
        norm = math.sqrt(sum(p.grad.pow(2).sum().item() for p in model.parameters()))
        losses.append(summed / total)
        logged["z_loss"].append(Z_LOSS_WEIGHT * squares / total)
        logged["log_z_mean"].append(log_zs / total)
        logged["logit_max"].append(largest)
        norms.append(norm)
        rate = LEARNING_RATE * factor(step)
        for name, p in model.named_parameters():
            grad = p.grad * min(1.0, MAX_GRAD_NORM / (norm + 1e-6))
            first[name] = 0.9 * first[name] + 0.1 * grad
            second[name] = 0.95 * second[name] + 0.05 * grad**2
            m_hat, v_hat = first[name] / (1 - 0.9 ** (step + 1)), second[name] / (1 - 0.95 ** (step + 1))
            decayed = p.ndim >= 2 and not any(word in name for word in ("embed_tokens", "wte", "wpe"))
            with torch.no_grad():
                own = scale[name]
                decay = WEIGHT_DECAY * own["decay"] if decayed else 0.0
                p -= rate * own["lr"] * (m_hat / (v_hat.sqrt() + EPSILON * own["eps"]) + decay * p)
    return logged | {"loss": losses, "grad_norm": norms, "initial": initial, "final": dict(model.named_parameters())}


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def noise_of(rows: list[dict], per_device_rows: int, world_size: int) -> Estimate:
    """Of one step, its rows dealt as `TrainingSteps` deals them: to ranks in order, there the longest first."""
    micro_batches = []
    for rank in range(world_size):
        mine = rows[rank * ROWS // world_size : (rank + 1) * ROWS // world_size]
        mine = sorted(mine, key=lambda row: -row["length"])
        micro_batches += [mine[low : low + per_device_rows] for low in range(0, len(mine), per_device_rows)]
    tokens = [sum(row["tokens"] for row in micro) for micro in micro_batches]
    sums = [torch.stack([row["gradient"] for row in micro]).sum(dim=0) for micro in micro_batches]
    squares = [float((g / n).square().sum()) for g, n in zip(sums, tokens, strict=True)]
    found = estimate(tokens, squares, float((torch.stack(sums).sum(dim=0) / sum(tokens)).square().sum()))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def references() -> dict[str, dict]:
    return {name: reference(name) for name in ("llama", "gpt2", *MUP)}


@pytest.fixture(scope="module", params=TOPOLOGIES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(topology, what it wrote): one launch for all that is looked at below."""
    remove_stale_build_locks()
    folder, topology = tmp_path_factory.mktemp(request.param), request.param
    extra = ("resume", "spike", *(["bf16"] if topology.startswith("zero") else []))
    launch(topology, WORKER, str(folder), *CASES[topology], *extra)
    return topology, folder


def test_same_training_everywhere(trained: tuple[str, Path], references: dict) -> None:
    topology, folder = trained
    for case in CASES[topology]:
        model_type, rows = case.split(":")
        expected = references[model_type]
        got = json.loads((folder / f"{model_type}-{rows}.json").read_text())
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
        assert update_error(torch.load(folder / f"{model_type}-{rows}.pt"), expected) < 1e-4, case
        # What the engine itself says: the schedule's last value, and its half for the groups that muP slows down.
        final = LEARNING_RATE * SCHEDULE["min_lr_ratio"]
        factors = {mup_by_hand(model_type, name)["lr"] for name in expected["initial"]} if model_type in MUP else {1.0}
        assert {round(rate, 12) for rate in got["group_rates"]} == {round(final * f, 12) for f in factors}, case


def test_muPs_groups_after_a_resume(trained: tuple[str, Path]) -> None:  # noqa: N802
    """Read back from the engine, of a run and of one that went on from its checkpoint: the hand's, all of them."""
    _, folder = trained
    got = json.loads((folder / "resume.json").read_text())
    final = LEARNING_RATE * SCHEDULE["min_lr_ratio"]
    names = [name for name, _ in build_model(tiny_config(MUP["mup_tied"]), seed=SEED).named_parameters()]
    by_hand = [mup_by_hand("mup_tied", name) for name in names]
    decayed = [any(part in name for part in ("attn.c", "mlp.c")) and name.endswith("weight") for name in names]
    expected = {
        (own["lr"], own["eps"], WEIGHT_DECAY * own["decay"] if decays else 0.0)
        for own, decays in zip(by_hand, decayed, strict=True)
    }
    for run in got.values():
        groups = run["groups"]
        assert len(groups) == len(run["group_rates"]) >= 5
        found = {(g["lr_multiplier"], g["eps_multiplier"], round(g["weight_decay"], 12)) for g in groups}
        assert found == {(lr, eps, round(decay, 12)) for lr, eps, decay in expected}
        for group, rate in zip(groups, run["group_rates"], strict=True):
            assert rate == pytest.approx(final * group["lr_multiplier"], rel=1e-9)
            assert group["lr"] == pytest.approx(rate, rel=1e-9)
            assert group["eps"] == pytest.approx(EPSILON * group["eps_multiplier"], rel=1e-9)
    assert len(got["straight"]["loss"]) == NUM_STEPS
    np.testing.assert_allclose(got["resumed"]["loss"][-RESUME_AT:], got["straight"]["loss"][-RESUME_AT:], rtol=1e-6)


def test_the_cases_of_mup_are_what_they_say() -> None:
    """Twice the base width and depth; the hand's rates are 1, 1/2, and 1/4 where a matrix writes into the stream."""
    for model_type, architecture in MUP.items():
        config = tiny_config(architecture)
        assert (config.hidden_size, config.num_hidden_layers) == (2 * MUP_BASE_WIDTH, 2 * MUP_BASE_DEPTH)
        assert config.tie_word_embeddings == (model_type == "mup_tied")
        model = build_model(config, seed=SEED)
        rates = {mup_by_hand(model_type, name)["lr"] for name, _ in model.named_parameters()}
        assert rates == ({1.0, 0.5} if model_type == "mup" else {1.0, 0.5, 0.25})


def test_noise_estimates_of_each_step(trained: tuple[str, Path], references: dict) -> None:
    """8 micro-batches of one row are the same ones in all topologies, so their estimates are one number; clipping is
    active and the embeddings of gpt2 are tied."""
    topology, folder = trained
    for case in CASES[topology]:
        model_type, rows = case.split(":")
        got = json.loads((folder / f"{model_type}-{rows}.json").read_text())
        expected = [noise_of(step, int(rows), got["world_size"]) for step in references[model_type]["rows"]]
        average = NoiseAverage()
        for step in expected:
            average.add(step)
        for name in ("grad_sq", "grad_trace"):
            theirs = [getattr(step, name) for step in expected]
            np.testing.assert_allclose(
                [step[name] for step in got["estimates"]], theirs, rtol=1e-4, atol=1e-4 * max(theirs), err_msg=case
            )
            np.testing.assert_allclose(
                got["noise"][name], getattr(average, name), rtol=1e-4, atol=1e-4 * max(theirs), err_msg=case
            )


def test_a_poisoned_batch_of_one_rank_is_left_out(trained: tuple[str, Path]) -> None:
    topology, folder = trained
    alone, protected = (json.loads((folder / f"spike-{name}.json").read_text()) for name in ("alone", "protected"))
    lines = {name: [line for line in run["log"] if "loss" in line] for name, run in (("a", alone), ("p", protected))}
    for name in ("loss", "grad_norm", "learning_rate"):  # the same run, until the update is made or left out
        values = {run: [line[name] for line in lines[run]] for run in "ap"}
        assert values["a"][: POISONED + 1] == values["p"][: POISONED + 1]
        assert len(values["a"]) == len(values["p"]) == SPIKE_STEPS
        if name != "learning_rate":  # unprotected, the log shows it
            assert values["a"][POISONED] > 1.5 * max(values["a"][:POISONED])
            assert values["a"][POISONED + 1 :] != values["p"][POISONED + 1 :]
        else:
            assert values["a"] == values["p"]
    assert [line["skipped_updates"] for line in lines["p"]] == [0] * POISONED + [1] * (SPIKE_STEPS - POISONED)
    assert "skipped_updates" not in lines["a"][0]
    (spike,) = [line for line in protected["log"] if "spike_step" in line]
    assert spike["spike_step"] == POISONED
    assert (spike["spike_loss"], spike["spike_grad_norm"]) == tuple(
        lines["p"][POISONED][name] for name in ("loss", "grad_norm")
    )
    assert spike["spike_loss"] > spike["spike_threshold"] > spike["spike_median"]
    assert len(protected["ranks"]) == (1 if topology == "single" else 2)
    for run, left_out in ((alone, []), (protected, [POISONED])):
        for rank in run["ranks"]:
            assert [step for step, untouched in enumerate(rank["untouched"]) if untouched] == left_out
            assert rank["cleared"] == [True] * SPIKE_STEPS
        assert run["engine_steps"] in (None, SPIKE_STEPS)
    trace = [line["grad_trace"] for line in lines["p"]]  # and the spike is no part of the noise scale either
    assert trace[POISONED] == trace[POISONED - 1]
    assert lines["a"][POISONED]["grad_trace"] > 10 * trace[POISONED]


def test_noise_estimate_in_bfloat16(trained: tuple[str, Path]) -> None:
    """Weights and gradients in bfloat16, in a plain DeepSpeed loop, against float64: within 1 %."""
    topology, folder = trained
    if not topology.startswith("zero"):
        return
    model = bf16_model().bfloat16().double()
    tokens, squares, total = [], [], torch.zeros(())
    for x, y in bf16_batches(world_size=2):
        model.zero_grad()
        (model(x.bfloat16().double()) - y.double()).square().sum().backward()
        gradient = flat_gradient(model)
        tokens.append(len(x))
        squares.append(float((gradient / len(x)).square().sum()))
        total = total + gradient
    expected = estimate(tokens, squares, float((total / sum(tokens)).square().sum()))
    got = json.loads((folder / "bf16.json").read_text())
    assert expected is not None
    assert got["grad_trace"] == pytest.approx(expected.grad_trace, rel=0.01)
    assert got["grad_sq"] == pytest.approx(expected.grad_sq, rel=0.01)


def test_adamw_in_bfloat16(trained: tuple[str, Path]) -> None:
    """Weights in bfloat16, masters in float32, by hand; at ZeRO 0 without DeepSpeed's step with zero gradients."""
    topology, folder = trained
    if not topology.startswith("zero"):
        return
    model = bf16_model().bfloat16()
    masters = [p.detach().float().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=BF16_LEARNING_RATE, weight_decay=BF16_WEIGHT_DECAY)
    x, y = bf16_batches(1)[0]
    got = json.loads((folder / "bf16.json").read_text())["adamw_norms"]
    for norm in got:
        model.zero_grad()
        (model(x.bfloat16()).float() - y).square().sum().backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = parameter.grad.float()
        expected = torch.nn.utils.get_total_norm([master.grad for master in masters]).item()
        assert norm == pytest.approx(expected, rel=3e-3)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
    assert len(got) == 4


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
