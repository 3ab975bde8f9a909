"""Weight-decay groups by hand for every family, and the optimizers built on them."""

import re

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, TrainingArguments

from hfpretrain.errors import ConfigError
from hfpretrain.mup.infer import infer
from hfpretrain.training.optimizer import GROUPS, build_optimizer, describe_groups, parameter_groups
from hfpretrain.training.resume import apply_asked, hyperparameters

LLAMA_LIKE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "head_dim": 4,
}
GPT_NEOX = {key: value for key, value in LLAMA_LIKE.items() if key not in ("num_key_value_heads", "head_dim")}
QKVO = "self_attn.(q|k|v|o)_proj.weight"
GATED = "mlp.(gate|up|down)_proj.weight"
# family: (config, matrices, embeddings, state); patterns over names without `model.layers.N.` and the like. All else is
# a vector, and every vector must be one-dimensional.
FAMILIES = {
    "llama": (LLAMA_LIKE, f"{QKVO}|{GATED}|lm_head.weight", "embed_tokens.weight", ""),
    "qwen3": ({**LLAMA_LIKE, "tie_word_embeddings": True}, f"{QKVO}|{GATED}", "embed_tokens.weight", ""),
    "gemma2": (LLAMA_LIKE, f"{QKVO}|{GATED}", "embed_tokens.weight", ""),
    "olmo2": (LLAMA_LIKE, f"{QKVO}|{GATED}|lm_head.weight", "embed_tokens.weight", ""),
    "phi3": (
        LLAMA_LIKE,
        r"self_attn.(qkv|o)_proj.weight|mlp.(gate_up|down)_proj.weight|lm_head.weight",
        "embed_tokens.weight",
        "",
    ),
    "mixtral": (
        {**LLAMA_LIKE, "num_local_experts": 4},
        f"{QKVO}|mlp.experts.(gate_up|down)_proj|mlp.gate.weight|lm_head.weight",
        "embed_tokens.weight",
        "",
    ),
    "gpt_oss": (
        {**LLAMA_LIKE, "num_local_experts": 4},
        f"{QKVO}|mlp.experts.(gate_up|down)_proj|mlp.router.weight|lm_head.weight",
        "embed_tokens.weight",
        "mlp.experts.(gate_up|down)_proj_bias",
    ),
    "gpt2": (
        {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8},
        "attn.(c_attn|c_proj).weight|mlp.(c_fc|c_proj).weight",
        "wte.weight|wpe.weight",
        "",
    ),
    "gpt_neox": (
        GPT_NEOX,
        "attention.(query_key_value|dense).weight|mlp.dense_(h_to_4h|4h_to_h).weight|lm_head.weight",
        "embed_in.weight",
        "",
    ),
    "bloom": (
        {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 4},
        "self_attention.(query_key_value|dense).weight|mlp.dense_(h_to_4h|4h_to_h).weight",
        "word_embeddings.weight",
        "",
    ),
    "falcon": (
        {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
        "self_attention.(query_key_value|dense).weight|mlp.dense_(h_to_4h|4h_to_h).weight",
        "word_embeddings.weight",
        "",
    ),
    "opt": (
        {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 24}
        | {"word_embed_proj_dim": 16, "max_position_embeddings": 8},
        "self_attn.(q|k|v|out)_proj.weight|fc[12].weight",
        "embed_tokens.weight|embed_positions.weight",
        "",
    ),
    "mamba": (
        {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        "mixer.(in|x|dt|out)_proj.weight",
        "embeddings.weight",
        "mixer.A_log|mixer.conv1d.weight",
    ),
}


def tiny(family: str) -> PreTrainedModel:
    config = CONFIG_MAPPING[family](bos_token_id=1, eos_token_id=2, pad_token_id=None, **FAMILIES[family][0])
    return AutoModelForCausalLM.from_config(config)


def names_by_group(model: nn.Module) -> dict[str, set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, weight_decay=0.1)
    return {group["name"]: {names[id(parameter)] for parameter in group["params"]} for group in groups}


def key_of(name: str) -> str:
    """A name without the layer it is in, or without the model it is in."""
    return re.sub(r"^.*?(layers|h)\.\d+\.|^(model\.decoder|model|transformer|gpt_neox|backbone)\.", "", name)


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_by_hand(family):
    _, matrices, embeddings, state = FAMILIES[family]
    model = tiny(family)
    groups = names_by_group(model)
    expected: dict[str, set[str]] = {group: set() for group in GROUPS}
    for name, parameter in model.named_parameters():
        key = key_of(name)
        patterns = {"matrices": matrices, "embeddings": embeddings, "state": state}
        found = [group for group, pattern in patterns.items() if pattern and re.fullmatch(pattern, key)]
        assert len(found) <= 1, name
        if not found:
            assert parameter.ndim == 1, f"{name} is in no list of this test"
        expected[found[0] if found else "vectors"].add(name)
    assert groups == {group: names for group, names in expected.items() if names}


def test_only_matrices_decay_and_no_group_is_empty():
    groups = parameter_groups(tiny("mamba"), weight_decay=0.3)
    assert [(group["name"], group["weight_decay"]) for group in groups] == [
        ("matrices", 0.3),
        ("embeddings", 0.0),
        ("vectors", 0.0),
        ("state", 0.0),
    ]
    assert "state" not in {group["name"] for group in parameter_groups(tiny("llama"), weight_decay=0.1)}
    assert all(group["params"] for group in groups)


def test_frozen_parameters_are_left_out():
    model = tiny("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    assert "embeddings" not in {group["name"] for group in parameter_groups(model, weight_decay=0.1)}


def test_the_true_shape_decides_under_zero3():
    """What zero.Init leaves: one dimension of size 0, the whole shape in `ds_shape`."""
    model = tiny("mixtral")
    expected = names_by_group(model)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert names_by_group(model) == expected
    table = describe_groups(parameter_groups(model, weight_decay=0.1), model)
    total = sum(torch.Size(parameter.ds_shape).numel() for parameter in model.parameters())
    counts = [int(line.split()[2].replace(",", "")) for line in table.splitlines()[1:4]]
    assert sum(counts) == total


class Oddities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_conv = nn.Conv1d(4, 8, 3)
        self.depthwise_conv = nn.Conv1d(4, 4, 3, groups=4)
        self.head_gains = HeadNorm()
        self.mix = nn.Parameter(torch.ones(1, 1, 4))
        self.marked = nn.Parameter(torch.ones(4, 4))
        self.marked._no_weight_decay = True
        self.gate = nn.Linear(4, 1)


class HeadNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))


def test_corner_cases():
    assert names_by_group(Oddities()) == {
        "matrices": {"dense_conv.weight", "gate.weight"},
        "vectors": {"dense_conv.bias", "depthwise_conv.bias", "head_gains.weight", "mix", "gate.bias"},
        "state": {"depthwise_conv.weight", "marked"},
    }


def test_the_table_shows_what_was_decided_by_rule_of_thumb():
    model = tiny("mamba")
    table = describe_groups(parameter_groups(model, weight_decay=0.1), model)
    assert "backbone.layers.*.mixer.A_log [32, 4] -> state" in table
    header, matrices = table.splitlines()[:2]
    assert 2 * (16 * 64 + 32 * (1 + 2 * 4) + 1 * 32 + 32 * 16) == 3712  # layers * (in, x, dt, out)
    assert header.split()[:3] == ["group", "tensors", "parameters"]
    assert matrices.split()[:4] == ["matrices", "8", "3,712", "0.1"]


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "rmsprop"])
def test_any_optimizer_keeps_groups_and_the_default_rate(optim, tmp_path):
    model = tiny("llama")
    args = TrainingArguments(tmp_path, optim=optim, learning_rate=3e-4, adam_beta2=0.95, use_cpu=True, report_to=[])
    groups = parameter_groups(model, weight_decay=0.1)
    optimizer = build_optimizer(model, args, groups)
    assert optimizer.defaults["lr"] == 3e-4
    assert [(g["name"], g["weight_decay"], g["lr"]) for g in optimizer.param_groups] == [
        (g["name"], g["weight_decay"], 3e-4) for g in groups
    ]
    if optim.startswith("adamw"):
        assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.9, 0.95), 1e-8)


def test_decay_reaches_the_matrices_only(tmp_path):
    """With zero gradients AdamW multiplies a decayed weight by 1 - lr * wd and leaves the others alone."""
    model = tiny("mamba")
    args = TrainingArguments(tmp_path, optim="adamw_torch", learning_rate=0.5, use_cpu=True, report_to=[])
    groups = parameter_groups(model, weight_decay=0.1)
    optimizer = build_optimizer(model, args, groups)
    before = [[parameter.detach().clone() for parameter in group["params"]] for group in groups]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, old in zip(groups, before, strict=True):
        factor = 0.95 if group["name"] == "matrices" else 1.0
        for parameter, value in zip(group["params"], old, strict=True):
            torch.testing.assert_close(parameter.detach(), value * factor)


def test_optimizers_that_drop_the_groups_are_refused(tmp_path, monkeypatch):
    from transformers import Trainer

    args = TrainingArguments(tmp_path, use_cpu=True, report_to=[])
    model = tiny("llama")
    groups = parameter_groups(model, weight_decay=0.1)
    for answer in ((torch.optim.AdamW, {"lr": 1.0, "params": []}), (lambda: None, {"lr": 1.0})):
        monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(lambda *_, answer=answer: answer))
        with pytest.raises(ConfigError, match="groups would be dropped"):
            build_optimizer(model, args, groups)


WIDE_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4, "tie_word_embeddings": False}


def test_groups_of_mup_by_hand():
    """Width ratio 4: hidden and head learn at a quarter, decay 4 times as much; base-rate groups come first."""
    config = CONFIG_MAPPING["llama"](**(LLAMA_LIKE | {"hidden_size": 64, "intermediate_size": 96} | WIDE_HEADS))
    model = AutoModelForCausalLM.from_config(config)
    spec = infer(config, base_width=16)
    with pytest.raises(ValueError, match="no lr: give the learning rate of the base width"):
        parameter_groups(model, weight_decay=0.1, mup=spec)
    groups = parameter_groups(model, weight_decay=0.1, lr=1e-2, eps=1e-8, mup=spec)
    rows = [(g["name"], len(g["params"]), g["lr"], g["weight_decay"], g["eps"]) for g in groups]
    assert rows == [
        ("embeddings", 1, 1e-2, 0.0, 2.5e-9),
        ("vectors", 5, 1e-2, 0.0, 2.5e-9),
        ("matrices", 14, 2.5e-3, 0.4, 2.5e-9),
        ("matrices", 1, 2.5e-3, 0.4, 1e-8),
    ]
    assert groups[3]["params"][0] is model.lm_head.weight
    header, _, _, hidden, _ = describe_groups(groups, model).splitlines()
    assert header.split()[4:9] == ["decay", "lr", "of", "base", "eps"]
    assert hidden.split()[3:7] == ["0.4", "0.0025", "0.25", "2.5e-09"]
    coupled = infer(config, base_width=16, weight_decay_mode="coupled")
    decays = [g["weight_decay"] for g in parameter_groups(model, weight_decay=0.1, lr=1e-2, mup=coupled)]
    assert decays == [0.0, 0.0, 0.1, 0.1]


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "rmsprop", "lion_32bit", "ademamix", "stable_adamw"])
def test_optimizers_for_which_mup_does_not_hold_are_refused(optim, tmp_path):
    args = TrainingArguments(tmp_path, optim=optim, use_cpu=True, report_to=[])
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr_multiplier": 0.5, "name": "matrices"}]
    with pytest.raises(ConfigError, match=f"those of AdamW, and {optim} is none: ") as refused:
        build_optimizer(nn.Linear(1, 1), args, groups)
    assert "nobody has derived" not in str(refused.value)  # each has a reason of its own


def test_a_resume_keeps_the_rate_of_each_group():
    """The checkpoint's rates come back, then those asked for now, in their ratios, at the schedule's present step."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": [w], "lr": lr, "name": name} for w, lr, name in zip(weights, (4.0, 1.0), "ab", strict=True)]
    optimizer = torch.optim.AdamW(groups)
    asked = hyperparameters(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for group in optimizer.param_groups:  # what a checkpoint of a run with half the rate brings back
        group["lr"], group["initial_lr"] = group["lr"] / 2, group["initial_lr"] / 2
    apply_asked(optimizer, scheduler, asked=asked, lr_factor=lambda step: 0.25, step=7, say=lambda _: None)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.25]
    assert scheduler.base_lrs == [4.0, 1.0]
