"""The trainer on one process: what it logs, what stops it, what a new launch may change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, TrainerCallback, TrainingArguments

from hfpretrain.data.collator import PackedCollator
from hfpretrain.data.order import BlockOrder
from hfpretrain.data.steps import TrainingSteps
from hfpretrain.errors import ConfigError
from hfpretrain.loss import IGNORE_INDEX, count_targets, fuse
from hfpretrain.model import build_model
from hfpretrain.mup.apply import apply
from hfpretrain.mup.infer import infer
from hfpretrain.training.checkpoints import list_checkpoints
from hfpretrain.training.spikes import ConsecutiveSpikesError
from hfpretrain.training.step import NonFiniteLossError
from hfpretrain.training.trainer import PretrainTrainer
from tiny import SEQUENCE_LENGTH, TINY, RaggedBlocks, tiny_config

ROWS = 8


def _steps(num_steps: int, collator: Callable[[Any], dict] | None = None, rows_at_once: int = 4) -> TrainingSteps:
    return TrainingSteps(
        RaggedBlocks(),
        BlockOrder(len(RaggedBlocks()), 3),
        batch_tokens=ROWS * SEQUENCE_LENGTH,
        sequence_length=SEQUENCE_LENGTH,
        per_device_train_batch_size=rows_at_once,
        rank=0,
        world_size=1,
        collator=collator or PackedCollator(),
        num_steps=num_steps,
    )


def _trainer(folder: Path, steps: TrainingSteps, *, model: Any = None, **arguments: Any) -> PretrainTrainer:
    names = ("fingerprint", "z_loss_weight", "log_noise_scale", "skip_spikes", "mup")
    ours = {name: arguments.pop(name) for name in names if name in arguments}
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": len(steps),
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "ignore_data_skip": True,
        "use_cpu": True,
    }
    args = TrainingArguments(**(defaults | arguments))
    model = model if model is not None else build_model(tiny_config("llama"), seed=1)
    return PretrainTrainer(model, args, train_dataset=steps, lr_factor=lambda step: 1.0, **ours)


def _lines(trainer: PretrainTrainer) -> list[dict[str, Any]]:
    return [line for line in trainer.state.log_history if "loss" in line]


def test_logged_loss_is_weighted_by_tokens_over_the_window(tmp_path: Path) -> None:
    every = _trainer(tmp_path / "a", _steps(6))
    every.train()
    seldom = _trainer(tmp_path / "b", _steps(6), logging_steps=3)
    seldom.train()
    tokens = [sum(int(count_targets(micro["labels"])) for micro in _steps(6)[step]) for step in range(6)]
    losses = [line["loss"] for line in _lines(every)]
    expected = sum(n * loss for n, loss in zip(tokens[3:], losses[3:], strict=True)) / sum(tokens[3:])
    assert _lines(seldom)[1]["loss"] == pytest.approx(expected, rel=1e-12)
    assert abs(sum(losses[3:]) / 3 - expected) > 1e-4  # a mean of step means is another number here
    assert [line["target_tokens"] for line in _lines(every)] == [sum(tokens[: step + 1]) for step in range(6)]
    assert _lines(every)[-1]["input_tokens"] == 6 * ROWS * SEQUENCE_LENGTH
    assert _lines(every)[-1]["epoch"] == pytest.approx(6 * ROWS / len(RaggedBlocks()))


def test_both_paths_of_the_loss_train_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the head and from the logits, z-loss on: the same curve but for float32's rounding."""
    curves = []
    for path in ("fused", "logits"):
        if path == "logits":
            monkeypatch.setattr(fuse, "verify", lambda *_: fuse.Verdict("logits", "asked for by this test"))
        trainer = _trainer(tmp_path / path, _steps(6), z_loss_weight=1e-2)
        trainer.train()
        assert trainer.fused_loss.verdict.path == path
        names = ("loss", "z_loss", "log_z_mean", "logit_max", "grad_norm")
        curves.append([[line[name] for name in names] for line in _lines(trainer)])
    assert len(curves[0]) == 6
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-5)


def test_a_model_that_sees_what_follows_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("bert", vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    trainer = _trainer(tmp_path, _steps(1), model=build_model(config, seed=1))
    with pytest.raises(ConfigError, match=r"BertLMHeadModel[\s\S]*tokens that follow"):
        trainer.train()


def _without_targets(blocks: Any) -> dict[str, Any]:
    batch = PackedCollator()(blocks)
    batch["labels"] = torch.full_like(batch["labels"], IGNORE_INDEX)
    return batch


def test_a_step_without_targets_changes_nothing_and_is_no_nan(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, _steps(2, _without_targets))
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    assert [line["loss"] for line in _lines(trainer)] == [0.0, 0.0]
    assert [line["grad_norm"] for line in _lines(trainer)] == [0.0, 0.0]
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.named_parameters())


def test_a_non_finite_loss_stops_before_the_update_and_says_where(tmp_path: Path) -> None:
    poisoned = build_model(tiny_config("llama"), seed=1)
    trainer = _trainer(tmp_path, _steps(4), model=poisoned)
    calls: list[Any] = []

    def poison(module: torch.nn.Module, _: Any, hidden: torch.Tensor) -> torch.Tensor | None:
        if not module.training:  # the checks before the first step
            return None
        calls.append(1)
        if len(calls) < 6:  # the last micro-batch of the third step
            return None
        calls.append({name: value.detach().clone() for name, value in poisoned.named_parameters()})
        return hidden * float("nan")

    poisoned.model.norm.register_forward_hook(poison)
    with pytest.raises(NonFiniteLossError, match=r"step 2 on rank\(s\) \[0\].*'first_position': 16"):
        trainer.train()
    weights_before = calls[-1]
    assert all(torch.equal(value, weights_before[name]) for name, value in poisoned.named_parameters())


def test_a_step_that_fails_half_way_leaves_no_accumulation_behind(tmp_path: Path) -> None:
    """accelerate's state is one for the process: left off, the optimizers of a later run would make no steps."""
    model = build_model(tiny_config("llama"), seed=1)

    def fail(module: torch.nn.Module, _: Any, hidden: torch.Tensor) -> None:
        if module.training:  # in the first of two micro-batches
            raise MemoryError("out of memory")

    model.model.norm.register_forward_hook(fail)
    trainer = _trainer(tmp_path, _steps(2), model=model)
    with pytest.raises(MemoryError):
        trainer.train()
    assert trainer.accelerator.gradient_state.sync_gradients


def test_router_loss_is_weighted_by_tokens_not_by_micro_batches(tmp_path: Path) -> None:
    """Left to the model, the balancing loss would count once per micro-batch: twice as much with two of them."""
    router = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    config = AutoConfig.for_model("mixtral", **(TINY["llama"] | router))
    micro_batches = _steps(1)[0]
    model = build_model(config, seed=1)
    expected, tokens = 0.0, 0
    with torch.no_grad():
        for micro in micro_batches:
            inputs = {key: value for key, value in micro.items() if key != "labels"}
            count = int(count_targets(micro["labels"]))
            expected += 0.5 * float(model(**inputs, use_cache=False).aux_loss) * count
            tokens += count
    trainer = _trainer(tmp_path, _steps(1), model=model)
    trainer.train()
    assert len(micro_batches) == 2
    assert _lines(trainer)[0]["router_loss"] == pytest.approx(expected / tokens, rel=1e-5)


def test_changed_flags_hold_after_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    _trainer(tmp_path, _steps(2), **saving).train()
    resumed = _trainer(
        tmp_path, _steps(6), **saving, learning_rate=3e-3, weight_decay=0.2, adam_beta2=0.9, logging_steps=2
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [(line["step"], line["learning_rate"]) for line in _lines(resumed)[2:]] == [(4, 3e-3), (6, 3e-3)]
    assert {group["betas"] for group in resumed.optimizer.param_groups} == {(0.9, 0.9)}
    assert sorted(group["weight_decay"] for group in resumed.optimizer.param_groups) == [0.0, 0.0, 0.2]


def test_another_run_is_not_resumed(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    _trainer(tmp_path, _steps(2), **saving, fingerprint={"data": "a", "batch_tokens": 192}).train()
    other = _trainer(tmp_path, _steps(4), **saving, fingerprint={"data": "b", "batch_tokens": 192})
    with pytest.raises(ValueError, match="data: a then, b now"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    before = _trainer(tmp_path, _steps(4), **saving, fingerprint={"data": "b", "batch_tokens": 96})
    before.check_resume(tmp_path / "checkpoint-2")  # each setting is a problem, beside those of the model
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*data: a then, b now.*batch_tokens: 192 then, 96 now"):
        before.check()
    (tmp_path / "checkpoint-2" / "pretrain_state.json").unlink()
    with pytest.raises(ValueError, match=r"no pretrain_state\.json"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_checkpoints_are_rotated_whole_and_say_where_they_are(tmp_path: Path) -> None:
    _trainer(tmp_path, _steps(6), save_strategy="steps", save_steps=2, save_total_limit=2).train()
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-6"]
    state = json.loads((tmp_path / "checkpoint-4" / "pretrain_state.json").read_text())
    assert state["data_position"] == {"step": 4, "epoch": 4 * ROWS / len(RaggedBlocks()), "first_position": 4 * ROWS}


def test_a_request_to_stop_saves_and_ends(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, _steps(6))
    trainer.stop_after_step()
    trainer.train()
    assert trainer.state.global_step == 1
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["checkpoint-1"]


def test_loader_processes_change_nothing(tmp_path: Path) -> None:
    """Also after a resume: the sampler starts at the checkpoint's step."""
    alone = _trainer(tmp_path / "a", _steps(4))
    alone.train()
    saving = {"save_strategy": "steps", "save_steps": 2, "dataloader_num_workers": 2}
    _trainer(tmp_path / "b", _steps(4), **saving).train()
    resumed = _trainer(tmp_path / "b", _steps(4), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert [line["loss"] for line in _lines(resumed)] == [line["loss"] for line in _lines(alone)]


def _poison(trainer: PretrainTrainer, *steps: int) -> PretrainTrainer:
    """30 times the hidden states, in training at these 0-based steps."""

    def enlarge(module: torch.nn.Module, _: Any, hidden: torch.Tensor) -> torch.Tensor | None:
        return hidden * 30 if module.training and trainer.state.global_step in steps else None

    trainer.causal_lm.model.norm.register_forward_hook(enlarge)
    return trainer


def _without_clock(trainer: PretrainTrainer) -> list[dict[str, Any]]:
    timed = ("second", "runtime", "peak_memory")
    lines = [line for line in trainer.state.log_history if "train_runtime" not in line]
    return [{key: value for key, value in line.items() if not any(word in key for word in timed)} for line in lines]


def test_noise_scale_and_skipped_updates_survive_a_resume_to_the_bit(tmp_path: Path) -> None:
    """Interrupted with a spike behind it, before the noise scale is resolved, at a step that is not measured."""
    settings: dict[str, Any] = {"log_noise_scale": 2, "skip_spikes": 8.0, "save_strategy": "steps", "save_steps": 27}
    straight = _poison(_trainer(tmp_path / "a", _steps(48, rows_at_once=2), **settings), 25, 40, 41)
    straight.train()
    _poison(_trainer(tmp_path / "b", _steps(27, rows_at_once=2), **settings), 25).train()
    resumed = _poison(_trainer(tmp_path / "b", _steps(48, rows_at_once=2), **settings), 40, 41)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-27"))
    assert _without_clock(resumed) == _without_clock(straight)
    lines = _lines(resumed)
    assert [line["skipped_updates"] for line in (lines[24], lines[25], lines[39], lines[40], lines[41])] == [
        0,
        1,
        1,
        2,
        3,
    ]
    assert [line["spike_step"] for line in resumed.state.log_history if "spike_step" in line] == [25, 40, 41]
    assert lines[0]["grad_trace"] == lines[1]["grad_trace"] != lines[2]["grad_trace"]  # steps 0, 2, 4 are measured
    assert "noise_scale_tokens" not in lines[20]
    assert lines[-1]["noise_scale_tokens"] > lines[-1]["noise_scale_stderr_tokens"] > 0
    batch = lines[46]["target_tokens"] - lines[45]["target_tokens"]  # step 46, the last that was measured
    assert lines[-1]["critical_batch_steps_factor"] == 1 + lines[-1]["noise_scale_tokens"] / batch


def test_measuring_changes_nothing(tmp_path: Path) -> None:
    plain, measured = _trainer(tmp_path / "a", _steps(4)), _trainer(tmp_path / "b", _steps(4), log_noise_scale=1)
    plain.train()
    measured.train()
    for ours, theirs in zip(plain.causal_lm.parameters(), measured.causal_lm.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert not theirs._backward_hooks  # and taken off at the end
    assert "grad_trace" not in _lines(plain)[0]
    assert "grad_trace" in _lines(measured)[0]


def test_spike_after_spike_stops_with_the_places_of_the_data(tmp_path: Path) -> None:
    trainer = _poison(_trainer(tmp_path, _steps(40), skip_spikes=8.0), *range(22, 40))
    with pytest.raises(ConsecutiveSpikesError) as caught:
        trainer.train()
    assert trainer.state.global_step == 32
    assert all(f"'first_position': {ROWS * step}" in str(caught.value) for step in range(22, 32))


class _OneRateForAll(TrainerCallback):
    """What some schedulers do."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            for group in kwargs["optimizer"].param_groups:
                group["lr"] = 1e-2


def test_rates_that_leave_the_ratios_of_mup_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = infer(tiny_config("llama"), base_width=16)
    model = build_model(tiny_config("llama"), seed=1)
    with pytest.raises(ValueError, match="muP spec that is not on the model"):
        _trainer(tmp_path, _steps(4), model=model, mup=spec)
    apply(model, spec)
    trainer = _trainer(tmp_path, _steps(4), model=model, mup=spec)
    trainer.add_callback(_OneRateForAll())
    with pytest.raises(ConfigError, match="something has set it for all alike"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert [line["learning_rate"] for line in _lines(trainer)] == [1e-2]  # the base rate is the one that is logged
    assert "0.005      0.5  5e-09" in capsys.readouterr().out


def test_accumulation_by_the_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 1"):
        _trainer(tmp_path, _steps(2), gradient_accumulation_steps=2)
