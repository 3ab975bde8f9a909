"""The hooks: what they see, what they leave out, and how they work alone."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

from hfpretrain.data.collator import PackedCollator
from hfpretrain.loss import count_targets, token_mean_loss
from hfpretrain.model import build_model
from hfpretrain.training.noise_estimate import Estimate, estimate
from hfpretrain.training.noise_scale import NoiseScale, NoiseScaleCallback
from tiny import RaggedBlocks, tiny_config

MEAN = torch.tensor([0.5, -1.0, 0.25, 2.0])
DEVIATIONS = torch.tensor([3.0, 1.0, 2.0, 4.0])


class Tied(nn.Module):
    """A weight that is used twice, as embedding and as head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.reentrant: bool | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        def block(hidden: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.middle(torch.tanh(self.middle(hidden))))

        hidden = self.embed(ids)
        if self.reentrant is None:
            hidden = block(block(hidden))
        else:
            hidden = checkpoint(
                block, checkpoint(block, hidden, use_reentrant=self.reentrant), use_reentrant=self.reentrant
            )
        return hidden @ self.embed.weight.T


def micro_batches(seed: int, sizes: tuple[int, ...] = (3, 17, 8, 30)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, 11, (2, n), generator=generator)) for n in sizes]


def loss_sum(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="sum")


def one_step(noise: NoiseScale, model: nn.Module, batches: list[Any], max_norm: float = 1e-3) -> Estimate | None:
    """Accumulated, clipped; with equal weights the mean of the batches' means."""
    model.zero_grad()
    total = sum(len(targets) for _, targets in batches)
    for batch in batches:
        divisor = len(batches) * len(batch[1]) if noise.equal_weights else total
        (loss_sum(model, batch) / divisor).backward()
        noise.end_micro_batch(len(batch[1]))
    return noise.end_step(nn.utils.clip_grad_norm_(model.parameters(), max_norm))


def by_hand(model: nn.Module, batches: list[Any], *, equal_weights: bool = False) -> Estimate:
    """From each micro-batch's gradient in float64, by itself."""
    copy = type(model)().double()
    copy.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    sizes = [len(targets) for _, targets in batches]
    means = []
    for batch, size in zip(batches, sizes, strict=True):
        gradients = torch.autograd.grad(loss_sum(copy, batch) / size, list(copy.parameters()))
        means.append(torch.cat([gradient.flatten() for gradient in gradients]))
    weights = [1 / len(sizes) if equal_weights else n / sum(sizes) for n in sizes]
    total = sum(w * m for w, m in zip(weights, means, strict=True))
    found = estimate(sizes, [float(m @ m) for m in means], float(total @ total), weights=weights)
    assert found is not None
    return found


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.mark.parametrize("equal_weights", [False, True])
def test_micro_batches_against_float64_by_hand(model: Tied, equal_weights: bool) -> None:
    noise = NoiseScale(model, equal_weights=equal_weights).attach()
    found, expected = (
        one_step(noise, model, micro_batches(1)),
        by_hand(model, micro_batches(1), equal_weights=equal_weights),
    )
    assert found is not None
    assert found.grad_trace == pytest.approx(expected.grad_trace, rel=1e-5)
    assert found.grad_sq == pytest.approx(expected.grad_sq, rel=1e-5, abs=1e-6)
    other = by_hand(model, micro_batches(1), equal_weights=not equal_weights)
    assert abs(found.grad_trace / other.grad_trace - 1) > 0.01


def test_a_model_whose_answer_is_known() -> None:
    """Loss of one token |theta - x|^2 / 2: its gradient is theta - x, so G = theta - E x and Sigma = Cov x."""
    theta = nn.Parameter(torch.zeros(4))
    holder = nn.ParameterList([theta])
    noise = NoiseScale(holder).attach()
    generator = torch.Generator().manual_seed(3)
    sizes = (2, 30, 9, 5)
    for _ in range(600):
        theta.grad = None
        for n in sizes:
            x = MEAN + DEVIATIONS * torch.randn(n, 4, generator=generator)
            (((theta - x) ** 2).sum() / 2 / sum(sizes)).backward()
            noise.end_micro_batch(n)
        assert theta.grad is not None
        noise.end_step(theta.grad.norm())
    metrics = noise.metrics()
    truth = float(DEVIATIONS.square().sum() / MEAN.square().sum())
    assert abs(metrics["noise_scale_tokens"] - truth) < 3 * metrics["noise_scale_stderr_tokens"]
    assert metrics["noise_scale_stderr_tokens"] < 0.1 * truth
    assert metrics["critical_batch_steps_factor"] == pytest.approx(1 + metrics["noise_scale_tokens"] / 46)
    assert metrics["critical_batch_tokens_factor"] == pytest.approx(1 + 46 / metrics["noise_scale_tokens"])


def test_only_every_nth_step_is_measured_and_training_is_what_it_was(model: Tied) -> None:
    noise = NoiseScale(model, every=3).attach()
    measured = [one_step(noise, model, micro_batches(step)) is not None for step in range(7)]
    assert measured == [True, False, False, True, False, False, True]
    assert noise.average.measured == 3
    gradient = model.middle.weight.grad.clone()
    noise.remove()
    assert not model.middle.weight._backward_hooks
    one_step(NoiseScale(model), model, micro_batches(6))  # never attached
    assert torch.equal(model.middle.weight.grad, gradient)


def test_fewer_than_two_micro_batches_are_absent_and_fillers_no_micro_batch(model: Tied) -> None:
    noise = NoiseScale(model).attach()
    assert one_step(noise, model, micro_batches(1, (9,))) is None
    assert noise.metrics() == {}
    expected = by_hand(model, micro_batches(1))
    model.zero_grad()
    for batch in micro_batches(1):
        (loss_sum(model, batch) / 58).backward()
        noise.end_micro_batch(len(batch[1]))
        (loss_sum(model, batch) * 0).backward()
        noise.end_micro_batch(torch.tensor(0))
    found = noise.end_step(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert found is not None
    assert found.grad_trace == pytest.approx(expected.grad_trace, rel=1e-5)


def test_reentrant_checkpointing_of_shared_weights_is_seen(
    model: Tied, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts of a gradient arrive one by one, and the sum of their squares is no norm."""
    noise = NoiseScale(model).attach()
    expected = by_hand(model, micro_batches(1))
    model.reentrant = False
    found = one_step(noise, model, micro_batches(1))
    assert found is not None
    assert found.grad_trace == pytest.approx(expected.grad_trace, rel=1e-5)
    model.reentrant = True
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert [one_step(noise, model, micro_batches(1)) for _ in range(2)] == [None, None]
    assert noise.average.measured == 1
    assert [record.message.count("2 gradients in one backward") for record in caplog.records] == [1]


def test_steps_without_a_usable_norm_are_left_out(
    model: Tied, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = NoiseScale(model).attach()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for norm in (None, math.inf, math.nan, None):
        for batch in micro_batches(1):
            loss_sum(model, batch).backward()
            noise.end_micro_batch(len(batch[1]))
        assert noise.end_step(norm) is None
    assert noise.metrics() == {}
    assert len(caplog.records) == 3


def test_misuse_says_what_to_do(model: Tied) -> None:
    with pytest.raises(ValueError, match="every=0"):
        NoiseScale(model, every=0)
    with pytest.raises(ValueError, match="no parameter"):
        NoiseScale(model.requires_grad_(False))
    noise = NoiseScale(model.requires_grad_(True)).attach()
    with pytest.raises(RuntimeError, match=r"attach\(\) must come after"):
        noise.end_micro_batch(4)
    with pytest.raises(RuntimeError, match="without end_micro_batch"):
        noise.end_step(1.0)


def test_state_goes_through_json_to_the_bit(model: Tied) -> None:
    straight = NoiseScale(model, every=2).attach()
    broken = NoiseScale(model, every=2).attach()
    for step in range(50):
        if step == 23:
            state = json.loads(json.dumps(broken.state_dict()))
            broken.remove()
            broken = NoiseScale(model, every=2).attach()
            broken.load_state_dict(state)
        model.zero_grad()
        for batch in micro_batches(step):
            (loss_sum(model, batch) / 58).backward()
            for noise in (straight, broken):
                noise.end_micro_batch(len(batch[1]))
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        for noise in (straight, broken):
            noise.end_step(norm)
    assert "grad_trace" in straight.metrics()
    assert straight.metrics() == broken.metrics()
    assert straight.state_dict() == broken.state_dict()


def test_a_stock_trainer(tmp_path: Path) -> None:
    """Accumulation of 3, clipping active: the first logged step against float64 by hand."""
    args = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_grad_norm=0.1,
        logging_steps=1,
        remove_unused_columns=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        train_sampling_strategy="sequential",
    )
    llama = build_model(tiny_config("llama"), seed=1)
    exact = build_model(tiny_config("llama"), seed=1).double()
    tokens, means = [], []
    for index in range(3):
        batch = PackedCollator()([RaggedBlocks()[2 * index], RaggedBlocks()[2 * index + 1]])
        tokens.append(int(count_targets(batch["labels"])))
        exact.zero_grad()
        labels = batch.pop("labels")
        token_mean_loss(exact(**batch, use_cache=False), labels).backward()
        means.append(torch.cat([p.grad.flatten() for p in exact.parameters()]))
    total = sum(n * m for n, m in zip(tokens, means, strict=True)) / sum(tokens)
    expected = estimate(tokens, [float(m @ m) for m in means], float(total @ total))
    noise = NoiseScaleCallback(llama, token_mean_loss)
    trainer = Trainer(
        llama, args, train_dataset=RaggedBlocks(), data_collator=PackedCollator(),
        compute_loss_func=noise.loss, callbacks=[noise],
    )  # fmt: skip
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert expected is not None
    assert lines[0]["grad_trace"] == pytest.approx(expected.grad_trace, rel=1e-4)
    assert lines[0]["grad_sq"] == pytest.approx(expected.grad_sq, rel=1e-3)
    assert noise.noise.average.measured == 2
    without = NoiseScaleCallback(llama, token_mean_loss)
    trainer = Trainer(llama, args, train_dataset=RaggedBlocks(), data_collator=PackedCollator(), callbacks=[without])
    with pytest.raises(RuntimeError, match="compute_loss_func"):
        trainer.train()
