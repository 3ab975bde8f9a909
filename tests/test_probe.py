"""The pass before the first step: it leaves nothing behind, and says what would fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, TrainingArguments

from hfpretrain.data.collator import PackedCollator
from hfpretrain.data.isolation import Way
from hfpretrain.data.order import BlockOrder
from hfpretrain.data.steps import TrainingSteps
from hfpretrain.errors import ConfigError
from hfpretrain.model import build_model
from hfpretrain.training.memory import Memory, estimate_of_run
from hfpretrain.training.probe import lazy_state_bytes
from hfpretrain.training.trainer import PretrainTrainer
from hfpretrain.verdicts import Verdicts
from tiny import SEQUENCE_LENGTH, TINY, RaggedBlocks

# Dropout, so that a random state that moved would show.
GPT2 = TINY["gpt2"] | {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def _trainer(folder: Path, *, probe: bool, model: Any = None, rows: int = 4, **changes: Any) -> PretrainTrainer:
    steps = TrainingSteps(
        RaggedBlocks(),
        BlockOrder(len(RaggedBlocks()), 3),
        batch_tokens=8 * SEQUENCE_LENGTH,
        sequence_length=SEQUENCE_LENGTH,
        per_device_train_batch_size=rows,
        rank=0,
        world_size=1,
        collator=PackedCollator(),
        num_steps=3,
    )
    quiet: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(str(folder), max_steps=3, logging_steps=1, ignore_data_skip=True, **quiet)
    model = model or build_model(AutoConfig.for_model("gpt2", **GPT2), seed=1)
    verdicts = Verdicts(say=lambda _: None)
    more: dict[str, Any] = {"isolation": [Way("position_ids")], "probe": probe, "verdicts": verdicts} | changes
    return PretrainTrainer(model, args, train_dataset=steps, lr_factor=lambda step: 1.0, **more)


def test_a_probed_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """Log, weights, optimizer and random state; with the noise scale, which watches every gradient."""
    seen = []
    for probe in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)
        trainer = _trainer(tmp_path / str(probe), probe=probe, log_noise_scale=1)
        trainer.train()
        timed = ("second", "runtime", "peak_memory")
        log = [
            {k: v for k, v in line.items() if not any(word in k for word in timed)}
            for line in trainer.state.log_history
        ]
        tensors = [*trainer.causal_lm.state_dict().values()]
        tensors += [value for state in trainer.optimizer.state.values() for value in state.values()]
        seen.append((log, tensors, torch.get_rng_state(), np.random.get_state()[1].tolist()))
        (verdict,) = [verdict for verdict in trainer.verdicts.found if verdict.check == "probe"]
        assert ("4 full row(s) of 24" in verdict.why) == probe
    (log, tensors, state, numpy_state), (probed_log, probed, probed_state, probed_numpy_state) = seen
    assert probed_log == log
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tensors, probed, strict=True))
    assert torch.equal(state, probed_state)
    assert numpy_state == probed_numpy_state


def test_the_pass_is_a_whole_micro_batch_in_training_mode_and_leaves_no_gradient(tmp_path: Path) -> None:
    model = build_model(AutoConfig.for_model("gpt2", **GPT2), seed=1)
    trainer = _trainer(tmp_path, probe=True, model=model, rows=3)
    model.register_buffer("counted", torch.zeros(1))
    shapes: list[tuple[int, ...]] = []
    gradients: list[torch.Tensor] = []

    def watch(module: torch.nn.Module, _: Any, hidden: torch.Tensor) -> None:
        if module.training:
            shapes.append(tuple(hidden.shape))
            model.counted += 1

    model.transformer.ln_f.register_forward_hook(watch)
    hook = model.transformer.wte.weight.register_hook(gradients.append)
    trainer.check()
    hook.remove()
    assert shapes == [(3, SEQUENCE_LENGTH, 32)]
    assert [float(gradient.abs().max()) for gradient in gradients] == [0.0] * len(gradients) != []
    assert all(parameter.grad is None for parameter in model.parameters())
    assert float(model.counted) == 0.0
    assert not trainer.optimizer.state


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
            r"does not fit.*3 row.*9 GiB.*size of 2, which is predicted",
        ),
        (MemoryError(), r"does not fit.*3 row.*size of 2, which is predicted"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), r"full rows fails.*mat1 and mat2"),
    ],
)
def test_what_a_pass_raises_is_a_problem_of_the_list(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory: with the largest number of rows whose estimate is below what the device has."""
    model = build_model(AutoConfig.for_model("gpt2", **GPT2), seed=1)
    estimates = [
        estimate_of_run(
            model.config,
            TrainingArguments(str(tmp_path), use_cpu=True),
            rows=rows,
            sequence_length=SEQUENCE_LENGTH,
            attn_implementation="sdpa",
        ).peak_bytes
        for rows in (2, 3)
    ]
    between = Memory("cpu", sum(estimates) // 2, 0)
    monkeypatch.setattr(Memory, "of", lambda _: between)

    def fail(module: torch.nn.Module, *_: Any) -> None:
        if module.training:
            raise error

    model.transformer.ln_f.register_forward_hook(fail)
    trainer = _trainer(tmp_path, probe=True, model=model, rows=3)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        trainer.check()
    assert trainer.accelerator.gradient_state.sync_gradients


def test_states_that_the_first_update_will_make(tmp_path: Path) -> None:
    """Adam: two float32 numbers a parameter; nothing once they are there."""
    model = torch.nn.Linear(7, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    assert lazy_state_bytes(optimizer, model) == 2 * 4 * (7 * 5 + 5)
    model(torch.ones(1, 7)).sum().backward()
    optimizer.step()
    assert lazy_state_bytes(optimizer, model) == 0
