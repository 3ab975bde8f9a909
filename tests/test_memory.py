"""Memory of a rank: sums that can be done by hand, states of real optimizers, and peaks of real training steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Adafactor

from hfpretrain.activation_memory import NotMeasurableError, pass_memory, without_memory
from hfpretrain.errors import ConfigError
from hfpretrain.memory_estimate import estimate_memory, model_shapes
from hfpretrain.model import build_model, load_config
from hfpretrain.planning.memory import Activations, MemoryEstimate, device_bytes, largest_on_line, optimizer_figures
from hfpretrain.planning.optimizer_state import Tensor, optimizer_kind, state_bytes
from hfpretrain.planning.placement import Model, Parameter, Placement, held
from hfpretrain.training.optimizer import parameter_groups
from memory import predict, run_cases
from memory_case import Case

GIB = 2**30
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(**overrides: Any) -> Any:
    return load_config(model_type="llama", vocab_size=97, config_overrides=TINY | overrides)


# Two groups: 7 + 10 values, and 5.
BY_HAND = Model((Parameter((7,), 0, "a"), Parameter((2, 5), 0, "b"), Parameter((5,), 1, "c")), buffer_bytes=12)


def test_zero_2_pads_each_group_to_twice_the_ranks() -> None:
    found = held(BY_HAND, Placement(2, 2, "bfloat16", reduce_bucket_values=100), micro_batches=1)
    # 17 -> 20 values and 5 -> 8: multiples of 2 * 2. A rank has 10 and 4 of them.
    assert found.device == {
        "weights": 2 * 28,
        "master_weights": 4 * 14,
        "optimizer_state": 8 * 14 + 2 * 4,  # two moments, and a step count for each of the two partitions
        "buffers": 12,
    }
    # Rank 0's partition, values 0 to 9, touches both parameters of the first group, and 4 of the 5 of the second.
    assert found.gradients_kept == 2 * (7 + 10 + 5)
    assert found.communication == 2 * 100 + 2 * 22  # the bucket, and what fits into it once more to be reduced
    assert found.update == 2 * 22 + (4 + 2) * 10  # and the largest partition flat, in both types


def test_zero_3_rounds_each_parameter_up() -> None:
    placement = Placement(2, 3, "bfloat16", reduce_bucket_values=100, persistence_threshold_values=6)
    found = held(BY_HAND, placement, micro_batches=1)
    own = 4 + 5 + 3
    assert found.device == {
        "weights": 2 * own,
        "gathered": 2 * 6,  # the parameter of 5 values is never let go of, and has 2 * 3 with its padding
        "master_weights": 4 * own,
        "optimizer_state": 8 * own + 2 * 4,
        "gradients": 2 * own,
        "communication": 2 * 100,
        "buffers": 12,
    }
    assert found.gathered == 2 * (10 + 7)  # one module's weights, and the others ahead of their time


def test_replicated_placements() -> None:
    alone, ddp = (held(BY_HAND, Placement(w, None), micro_batches=1) for w in (1, 2))
    assert alone.device["weights"] == ddp.device["weights"] == 4 * 22  # float32 under autocast
    assert (alone.device["communication"], ddp.device["communication"]) == (0, 4 * 22)
    zero0 = held(BY_HAND, Placement(2, 0, "bfloat16"), micro_batches=2)
    assert (zero0.device["weights"], zero0.device["master_weights"]) == (2 * 22, 4 * 22)
    assert (zero0.gradients_before, zero0.gradient_bytes) == (2 * 22, 0)
    assert zero0.update == 2 * 22 + 4 * 22  # float32 gradients, while the half ones are still there


def test_seven_billion_take_the_published_112_gb() -> None:
    n = 7_000_000_000
    estimate = estimate_memory(parameters=n, placement=Placement(1, 0, "bfloat16"))
    parts = estimate.held
    assert sum(parts.device.values()) + parts.gradients_before == 16 * n + 4 == 112_000_000_004
    sharded = estimate_memory(parameters=n, placement=Placement(64, 3, "bfloat16"))
    assert sharded.static_bytes == pytest.approx(16 * n / 64 + 2 * 5e8, rel=1e-6)  # and the bucket of 5e8 values
    assert any("activations" in line for line in sharded.left_out)


def test_offload_moves_state_to_the_host() -> None:
    here, there = (Placement(2, 2, "bfloat16", offload_optimizer=o, reduce_bucket_values=100) for o in (False, True))
    device, offloaded = held(BY_HAND, here, micro_batches=1), held(BY_HAND, there, micro_batches=1)
    for part in ("master_weights", "optimizer_state"):
        assert offloaded.host[part] == device.device[part]
        assert part not in offloaded.device
    assert offloaded.host["gradients"] == 4 * 14


def test_what_contradicts_is_said_at_once() -> None:
    bad = Placement(0, 1, "int8", offload_params=True, gradient_dtype="fp8")
    with pytest.raises(ConfigError) as error:
        estimate_memory(parameters=10, placement=bad)
    assert len(error.value.problems) == 4
    assert "zero_stage 3" in str(error.value)


def test_deepspeed_configurations_are_read() -> None:
    zero = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "none"},
    }
    config = {"zero_optimization": zero, "data_types": {"grad_accum_dtype": "fp32"}}
    placement = Placement.from_deepspeed(config, world_size=8, dtype="bfloat16", hidden_size=64)
    # transformers: width^2, 0.9 width^2, 10 width
    assert placement == Placement(
        8, 3, "bfloat16", True, False, "float32", 4096, 3686, 640, overlap_comm=placement.overlap_comm
    )
    assert Placement.from_deepspeed(None, world_size=2, dtype="float32").zero_stage is None
    plain = Placement.from_deepspeed({"zero_optimization": {"stage": 2}}, world_size=2, dtype="float32")
    assert plain.reduce_bucket_values == 500_000_000


# --- optimizers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adafactor", "muon"])
def test_state_is_that_of_the_real_optimizer(kind: str) -> None:
    shapes = [(6, 10), (12, 4)] + ([(3, 4, 5), (7,)] if kind != "muon" else [])
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer: torch.optim.Optimizer = {
        "adamw": lambda: torch.optim.AdamW(parameters, fused=True),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1),
        "adafactor": lambda: Adafactor(parameters, lr=0.1, scale_parameter=False, relative_step=False),
        "muon": lambda: torch.optim.Muon(parameters),
    }[kind]()
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    values = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    # Adafactor's "RMS" is a tensor of one value for each parameter, of the work rather than of the state.
    found = sum(v.numel() * v.element_size() for v in values if kind != "adafactor" or v.dim())
    assert found == state_bytes(kind, [Tensor(shape, hidden=True) for shape in shapes])


def test_published_state_sizes() -> None:
    matrix = Tensor((4096, 4096), hidden=True)
    n = 4096 * 4096
    assert state_bytes("lion", [matrix]) == 4 * n
    assert state_bytes("adam_8bit", [matrix]) == 2 * n + 2 * 4 * n // 256
    assert state_bytes("adam_8bit", [Tensor((64, 63))]) == 8 * 64 * 63  # below 4,096 values it stays float32
    assert state_bytes("adam_8bit", [replace(matrix, embedding=True)]) == 8 * n
    assert state_bytes("adafactor", [matrix]) == 4 * 2 * 4096
    names = ("adamw_torch_fused", "adamw_bnb_8bit", "lion_32bit", "adafactor", "sgd")
    assert [optimizer_kind(name).name for name in names] == ["adamw", "adam_8bit", "lion", "adafactor", "sgd"]  # type: ignore[union-attr]
    assert optimizer_kind("galore_adamw") is None


def test_zero_leaves_adafactor_nothing_to_factor() -> None:
    model = Model((Parameter((64, 64), 0, "a", hidden=True),))
    sizes = {w: {f.name: f.value for f in optimizer_figures(model, Placement(2, w))} for w in (None, 2)}
    assert sizes[None]["optimizer_state_adafactor"] == 4 * 128
    assert sizes[2]["optimizer_state_adafactor"] == 4 * 64 * 64 / 2
    assert sizes[2]["optimizer_state_muon"] == sizes[2]["optimizer_state_lion"] == 4 * 64 * 64 / 2


# --- activations -----------------------------------------------------------------------------------------------------


def test_a_pass_by_hand() -> None:
    n, d, h = 5, 3, 7
    with without_memory():
        model = nn.Sequential(nn.Linear(d, h, bias=False), nn.ReLU(), nn.Linear(h, 1, bias=False))
        found = pass_memory(model, lambda: model(torch.zeros(n, d)).sum())
    # Kept for the backward pass: the input of each product (ReLU's output is the second's); and the loss itself.
    assert found.saved == 4 * (n * d + n * h + 1)
    # Most at the backward of ReLU: its result, the gradients after and before it, the first input; the gradient of the
    # second product, h values, is finished by then. The loss and its gradient are a value each.
    assert max(live for live, _, _ in found.points) == 4 * (n * d + 3 * n * h + 2)
    assert found.points[-1][1] <= d * h + h


def test_checkpointing_keeps_the_inputs_of_layers_only() -> None:
    common: dict[str, Any] = {"placement": Placement(1, None, "float32"), "sequence_length": 16, "rows": 2}
    plain, less = (estimate_memory(llama(), **common, gradient_checkpointing=c).activations for c in (False, True))
    assert plain is not None
    assert less is not None
    hidden = 2 * 16 * 32 * 4
    assert less.layers["model.layers.0"] == hidden  # what the next layer starts from
    assert plain.layers["model.layers.0"] == plain.layers["model.layers.1"] > 10 * hidden


@pytest.mark.parametrize("checkpointing", [False, True])
def test_repeated_layers_are_measured_once(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without most of its layers a model has the same peak, for gradients that grow and for some from before."""
    common: dict[str, Any] = {"placement": Placement(1, None, "float32"), "sequence_length": 16, "device": "cpu"}
    whole = load_config(model_type="llama", vocab_size=97, config_overrides=TINY | {"num_hidden_layers": 9})
    short = estimate_memory(whole, **common, micro_batches=1, gradient_checkpointing=checkpointing)
    monkeypatch.setattr("hfpretrain.memory_estimate.shorten", lambda *_: None)
    full = estimate_memory(whole, **common, micro_batches=1, gradient_checkpointing=checkpointing)
    assert short.activations is not None
    assert full.activations is not None
    assert short.activations.saved == full.activations.saved
    assert short.activations.layers == full.activations.layers
    assert short.peak_bytes == full.peak_bytes
    assert replace(short, micro_batches=2).peak_bytes == replace(full, micro_batches=2).peak_bytes


def test_nothing_is_allocated_for_a_large_model() -> None:
    config = llama(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_hidden_layers=2)
    placement = Placement(8, 3, "bfloat16")
    estimate = estimate_memory(config, placement=placement, sequence_length=4096, rows=1)
    assert estimate.activations is not None
    assert estimate.activations.saved > 2 * GIB


def test_a_pass_that_depends_on_values_is_left_out_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_memory(), pytest.raises(NotMeasurableError, match="DataDependent"):
        pass_memory(nn.Linear(2, 2), lambda: torch.zeros(3) * torch.ones(1).item())

    def fails(*_: Any, **__: Any) -> None:
        raise NotMeasurableError("DynamicOutputShape: nonzero")

    monkeypatch.setattr("hfpretrain.memory_estimate.pass_memory", fails)
    estimate = estimate_memory(llama(), placement=Placement(1, None))
    assert estimate.activations is None
    assert estimate.fits(GIB).largest_micro_batch is None
    assert any("nonzero" in line for line in estimate.left_out)


def test_shapes_are_those_of_the_run() -> None:
    config = llama(tie_word_embeddings=True)
    model = build_model(config, seed=1)
    shapes = model_shapes(config)
    groups = parameter_groups(model, weight_decay=0.1)
    assert [[p.shape for p in group] for group in shapes.groups] == [
        [tuple(p.shape) for p in g["params"]] for g in groups
    ]
    assert shapes.values == sum(p.numel() for p in model.parameters())
    assert shapes.buffer_bytes == sum(b.numel() * b.element_size() for b in model.buffers())
    assert not any(p.hidden for p in shapes.parameters if p.embedding)


# --- does it fit -----------------------------------------------------------------------------------------------------


def test_the_largest_micro_batch_is_that_of_the_line() -> None:
    static, per_row = 1_000, 30
    model = Model((Parameter((1,)),))

    def measure(rows: int) -> Activations:
        return Activations(rows, ((static + per_row * rows, 0, 0),))

    estimate = MemoryEstimate(model, Placement(1, None, "float32"), "sgd", 1, measure(2), measure)
    fixed = 4 * 1
    for most in (1, 2, 3, 17, 1_000):
        room = fixed + static + per_row * most
        assert estimate.largest_micro_batch(room) == estimate.largest_micro_batch(room + per_row - 1) == most
    assert estimate.largest_micro_batch(fixed + static + per_row - 1) == 0
    assert largest_on_line([(1, 1_030), (3, 1_090)], 1_600, default=0) == 20


def test_the_largest_micro_batch_of_a_model_fits_and_one_more_does_not() -> None:
    estimate = estimate_memory(llama(), placement=Placement(1, None, "float32"), sequence_length=32, device="cpu")
    room = estimate.with_rows(11).peak_bytes + 1
    assert estimate.largest_micro_batch(room) == 11
    assert estimate.with_rows(12).peak_bytes > room


def test_the_verdict_and_its_remedy() -> None:
    estimate = estimate_memory(
        llama(), placement=Placement(4, None, "float32"), sequence_length=32, rows=8, device="cpu"
    )
    peak = estimate.peak_bytes
    assert estimate.fits(2 * peak).verdict == "fits"
    assert estimate.fits(int(1.05 * peak)).verdict == "tight"
    small = estimate.fits(estimate.with_rows(3).peak_bytes + 1)
    assert (small.verdict, small.largest_micro_batch) == ("too large", 3)
    problem = small.problem("per_device_train_batch_size")
    assert "at most 3" in problem.remedy
    assert "per_device_train_batch_size=8" in problem.given
    assert {f.name for f in small.figures()} == {"memory_margin", "largest_micro_batch"}
    total = sum(f.value for f in estimate.figures() if f.name.startswith("memory_") and f.name != "memory_peak")
    assert total == peak == next(f.value for f in estimate.figures() if f.name == "memory_peak")


def test_devices() -> None:
    assert device_bytes("h100") == 80_000_000_000
    assert device_bytes("abacus") is None


def test_peaks_of_real_steps() -> None:
    """One process without DeepSpeed: no collective blurs the count, so all but a few small tensors must be there."""
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    dense = {"model_type": "llama", "vocab_size": 501, "config_overrides": small}
    experts = {
        "model_type": "mixtral",
        "vocab_size": 301,
        "config_overrides": small | {"num_local_experts": 4, "num_key_value_heads": 2},
    }
    capped = {
        "model_type": "gemma2",
        "vocab_size": 701,
        "config_overrides": small | {"head_dim": 16, "num_key_value_heads": 2},
    }
    gpt2 = {
        "model_type": "gpt2",
        "vocab_size": 401,
        "config_overrides": {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    }
    cases = [
        Case(dense, rows=3, sequence_length=48),
        Case(dense, rows=3, sequence_length=48, fused_loss=False, micro_batches=2),
        Case(dense, rows=3, sequence_length=48, gradient_checkpointing=True),
        Case(dense, rows=3, sequence_length=48, dtype="bfloat16"),
        Case(gpt2, rows=2, sequence_length=48),
        Case(experts, rows=2, sequence_length=48),
        Case(capped, rows=2, sequence_length=48),
    ]
    for case, (found,) in zip(cases, run_cases(cases, 1), strict=True):
        predicted = predict(case, 1)
        assert predicted.peak_bytes == pytest.approx(max(found["backward"], found["step"]), rel=0.02), case
        assert (
            predicted.static_bytes
            == sum(found["owners"]["after_step"].values()) - found["owners"]["after_step"]["batch"]
        )
