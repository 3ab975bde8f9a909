"""Ways in which muP fails in the field, each as a test that it does not here.

1. a multiplier that is lost outside of training; 2. attributes on parameters that are lost; 3. partitioned shapes
(here and on real ranks in tests/distributed); 4. a scheduler that sets all groups alike; 5. an optimizer that is not
ours; 6. a rescaled tied embedding; 7. scaling twice; 8. names and depth; 9. fan-in taken from the wrong dimension; 10.
weight decay; 11. a check that passes what is wrong (tests/test_coord_check.py); 12. a resized vocabulary. Kinds of
tensors that name or type would misplace are in tests/test_mup_roles.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_mup_apply import BASE, config_of, tokens
from torch import nn
from transformers import PreTrainedModel, get_scheduler

from hfpretrain.arguments import parse
from hfpretrain.errors import ConfigError
from hfpretrain.model import build_model
from hfpretrain.mup.apply import apply, verify_groups
from hfpretrain.mup.infer import infer
from hfpretrain.mup.spec import MupSpec
from hfpretrain.training.adaptive_ramp import saved_batch
from hfpretrain.training.batch_ramp import BatchRamp, Stage
from hfpretrain.training.optimizer import parameter_groups
from hfpretrain.training.resume import PretrainState, read_state
from hfpretrain.training.trainer import PretrainTrainer

CONFIG = {"ratio": 4, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def spec() -> MupSpec:
    return infer(config_of(**CONFIG), base_width=BASE)


def scaled(spec: MupSpec) -> PreTrainedModel:
    model = build_model(config_of(**CONFIG), seed=0)
    apply(model, spec)
    return model


def multipliers(model: nn.Module, spec: MupSpec) -> list[tuple[str, float, float]]:
    groups = parameter_groups(model, weight_decay=0.1, lr=1.0, mup=spec)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return sorted((names[id(p)], group["lr"], group["eps"]) for group in groups for p in group["params"])


def test_1_nothing_in_the_forward_pass_can_be_lost(spec: MupSpec) -> None:
    """No module has another class, a hook or a changed scale: the state dict is the whole model."""
    model, plain = scaled(spec), build_model(config_of(**CONFIG), seed=1)
    for module, stock in zip(model.modules(), plain.modules(), strict=True):
        assert type(module) is type(stock)
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "forward" not in vars(module)
        assert getattr(module, "scaling", None) == getattr(stock, "scaling", None)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


def test_2_no_state_is_kept_on_parameters(spec: MupSpec) -> None:
    """Copies, assigned state dicts and wrappers' names have the same groups: they follow from names alone."""
    model = scaled(spec)
    expected = multipliers(model, spec)
    assert all(not vars(parameter) for parameter in model.parameters())
    copied = copy.deepcopy(model)
    copied.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert multipliers(copied, spec) == expected
    for wrapped in ("module.model", "_orig_mod.module.model", "_fsdp_wrapped_module.model._checkpoint_wrapped_module"):
        assert spec.of(f"{wrapped}.layers.0.mlp.up_proj.weight").multipliers.lr == 0.25


def test_3_partitioned_shapes(spec: MupSpec) -> None:
    """What ZeRO-3 leaves of a parameter has one dimension of size 0; groups come out the same."""
    model = scaled(spec)
    expected = multipliers(model, spec)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert multipliers(model, spec) == expected


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant_with_warmup", "cosine_with_min_lr", "inverse_sqrt"])
def test_4_ratios_survive_every_schedule(kind: str, spec: MupSpec) -> None:
    model = scaled(spec)
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1, lr=1e-2, mup=spec), lr=1e-2)
    kwargs = {"min_lr_rate": 0.1} if "min_lr" in kind else {}
    schedule = get_scheduler(kind, optimizer, 2, 10, scheduler_specific_kwargs=kwargs)
    for _ in range(9):
        assert verify_groups(optimizer, spec) == []
        optimizer.step()
        schedule.step()
    for group in optimizer.param_groups:  # what some schedulers do: one rate for all, or only the first group moves
        group["lr"] = 1e-3
    assert "something has set it for all alike" in str(verify_groups(optimizer, spec)[0])


def test_5_an_optimizer_that_is_not_ours_is_refused(spec: MupSpec) -> None:
    """By the trainer, before the first step: its own groups are asked for the multipliers."""
    model = scaled(spec)
    trainer = SimpleNamespace(mup=spec, is_deepspeed_enabled=False, optimizer=torch.optim.AdamW(model.parameters()))
    assert "no muP multipliers" in str(PretrainTrainer._mup_problems(trainer)[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="muP spec that is not on the model"):
        PretrainTrainer(build_model(config_of(**CONFIG), seed=0), None, train_dataset=None, lr_factor=None, mup=spec)  # type: ignore[arg-type]


def test_6_a_tied_embedding_is_left_alone() -> None:
    config = config_of(ratio=4, tie_word_embeddings=True)
    model, plain = build_model(config, seed=0), build_model(config, seed=0)
    apply(model, infer(config, base_width=BASE))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    torch.testing.assert_close(model(input_ids=tokens()).logits.std(), _logits_by_hand(plain).std())


def _logits_by_hand(plain: PreTrainedModel) -> torch.Tensor:
    """Hidden weights / sqrt(4), and 1/4 of what goes into the head."""
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "_proj" in name:
                parameter.div_(2)
    plain.lm_head.register_forward_pre_hook(lambda _, args: (args[0] / 4,))
    return plain(input_ids=tokens()).logits


def test_7_the_second_scaling_is_refused_also_after_saving(spec: MupSpec, tmp_path: Path) -> None:
    model = scaled(spec)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.mup["fingerprint"] == spec.fingerprint
    with pytest.raises(ConfigError, match="apply muP once, to a model with fresh weights"):
        apply(loaded, spec)
    with pytest.raises(ConfigError, match="weights that are loaded have been initialised and trained otherwise"):
        parse(["--model_name_or_path", str(tmp_path), "--mup_base_width", "16", *NEEDED])


NEEDED = ["--dataset", "stdlib", "--output_dir", "x", "--max_steps", "1"]


def test_8_all_layers_of_any_depth_and_another_muP_is_no_resume(spec: MupSpec, tmp_path: Path) -> None:  # noqa: N802
    deep = infer(config_of(num_hidden_layers=12, **CONFIG), base_width=BASE)
    assert list(deep.parameters) == list(spec.parameters)  # by kind of layer
    assert deep.of("model.layers.11.mlp.up_proj.weight") == deep.of("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(KeyError, match="no such parameter in this muP spec"):
        spec.of("model.layers.0.mlp.other.weight")
    plan = BatchRamp((Stage(0, 0, 8),), sequence_length=16, num_steps=10)
    PretrainState(10, 0, {"step": 5}, {"mup": spec.fingerprint}, 1, saved_batch(plan)).write(tmp_path)
    assert read_state(tmp_path, fingerprint={"mup": spec.fingerprint}, plan=plan).num_steps == 10
    for now in (None, infer(config_of(**CONFIG), base_width=BASE, weight_decay_mode="coupled").fingerprint):
        with pytest.raises(ValueError, match=f"(?s)another muP.*mup: {spec.fingerprint} then, {now} now"):
            read_state(tmp_path, fingerprint={"mup": now}, plan=plan)


def test_9_each_tensor_has_its_own_fan_in() -> None:
    """A feed-forward width that grows 8 times where all else grows 4 times: only down_proj sums over it."""
    base = config_of(tie_word_embeddings=False)
    wide = config_of(**CONFIG, intermediate_size=8 * base.intermediate_size)
    spec = infer(wide, base_config=base)
    ratios = {name: spec.of(f"model.layers.0.mlp.{name}.weight").fan_in_ratio for name in ("up_proj", "down_proj")}
    assert ratios == {"up_proj": 4.0, "down_proj": 8.0}
    assert spec.of("model.layers.0.mlp.down_proj.weight").multipliers.lr == 1 / 8
    assert spec.of("model.layers.0.mlp.down_proj.weight").multipliers.init == 8**-0.5


def decayed(spec: MupSpec) -> dict[str, float]:
    """By what a step without gradients multiplies each kind of parameter."""
    model = scaled(spec) if spec.weight_decay_mode == "independent" else build_model(config_of(**CONFIG), seed=0)
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.5, lr=0.1, mup=spec))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {name: float((p.detach() / before[name]).mean()) for name, p in model.named_parameters()}


def test_10_weight_decay_takes_the_same_share_at_every_width(spec: MupSpec) -> None:
    coupled = infer(config_of(**CONFIG), base_width=BASE, weight_decay_mode="coupled")
    for name, factor in decayed(spec).items():
        matrix = "_proj" in name or name == "lm_head.weight"
        assert factor == pytest.approx(1 - 0.1 * 0.5 if matrix else 1.0), name
    for name, factor in decayed(coupled).items():
        matrix = "_proj" in name or name == "lm_head.weight"
        assert factor == pytest.approx(1 - 0.1 / 4 * 0.5 if matrix else 1.0), name


def test_12_a_resized_vocabulary_keeps_logits_and_groups(spec: MupSpec) -> None:
    model = scaled(spec).eval()
    before, groups = model(input_ids=tokens()).logits, multipliers(model, spec)
    model.resize_token_embeddings(128)
    assert torch.equal(model(input_ids=tokens()).logits[..., :96], before)
    assert multipliers(model, spec) == groups


def test_flags_about_mup_that_contradict() -> None:
    def problems(*flags: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            parse(["--model_type", "llama", "--tokenizer_name", "bytes", *NEEDED, *map(str, flags)])
        return str(refused.value)

    assert "the muP base model is given twice" in problems(
        "--mup_base_width", 64, "--mup_base_config", "hidden_size=64"
    )
    text = problems("--mup_weight_decay", "coupled", "--mup_overrides", r"x\.weight=hidden")
    assert text.startswith("2 problems")
    assert text.count("no base model is given") == 2
    assert "mup_base_width is out of range" in problems("--mup_base_width", 0)
