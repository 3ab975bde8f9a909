"""muP without multipliers is muP: equal to the textbook form in float64, and nothing at the base width."""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from hfpretrain.errors import ConfigError
from hfpretrain.model import build_model
from hfpretrain.mup.apply import apply, is_applied, verify_groups
from hfpretrain.mup.infer import infer
from hfpretrain.mup.spec import MupSpec
from hfpretrain.training.optimizer import parameter_groups

BASE = 16
SMALL = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.1,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def config_of(model_type: str = "llama", ratio: int = 1, **changes: Any) -> Any:
    """SMALL at `ratio` times its width."""
    widths = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    wide = {name: SMALL[name] * ratio for name in widths}
    return CONFIG_MAPPING[model_type](**(SMALL | wide | changes))


def tokens(rows: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(5))


def losses(model: nn.Module, groups: list[dict[str, Any]], steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    ids, found = tokens(), []
    for _ in range(steps):
        logits = model(input_ids=ids).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


RATIO, LR, DECAY, EPS = 4, 1e-2, 0.3, 1e-4  # an epsilon as large as the gradients, so that its exponents matter


def textbook(model: PreTrainedModel, *, eps_ratio: float = RATIO) -> list[dict[str, Any]]:
    """Tensor Programs V, tables 3 and 8, with multipliers: what goes into the head is divided by the width ratio."""
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] / RATIO,))
    hidden = [p for name, p in model.named_parameters() if "_proj" in name]
    with torch.no_grad():
        for parameter in hidden:
            parameter.div_(math.sqrt(RATIO))
    head = [p for name, p in model.named_parameters() if name == "lm_head.weight"]
    others = [p for name, p in model.named_parameters() if "_proj" not in name and name != "lm_head.weight"]
    shared = {"eps": EPS / eps_ratio}
    return [
        {"params": hidden, "lr": LR / RATIO, "weight_decay": DECAY * RATIO, **shared},
        {"params": head, "lr": LR, "weight_decay": DECAY, **shared},
        {"params": others, "lr": LR, "weight_decay": 0.0, **shared},
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_equal_to_the_textbook_form(tied: bool) -> None:
    config = config_of(ratio=RATIO, tie_word_embeddings=tied)
    spec = infer(config, base_width=BASE)
    ours, theirs, wrong = (build_model(config, seed=3).double() for _ in range(3))
    apply(ours, spec)
    groups = parameter_groups(ours, weight_decay=DECAY, lr=LR, eps=EPS, mup=spec)
    mine = losses(ours, groups, 25)
    reference = losses(theirs, [g for g in textbook(theirs) if g["params"]], 25)
    assert max(abs(a - b) for a, b in zip(mine, reference, strict=True)) < 1e-9
    assert reference[0] - reference[-1] > 0.5  # it did learn
    # An epsilon that does not follow the width is another training: the comparison would see it.
    other = losses(wrong, [g for g in textbook(wrong, eps_ratio=1.0) if g["params"]], 5)
    assert max(abs(a - b) for a, b in zip(mine, other, strict=False)) > 1e-4


@pytest.mark.parametrize(("model_type", "tied"), [("llama", True), ("gemma", True), ("mixtral", False)])
def test_at_its_own_width_it_is_the_standard_run_bitwise(model_type: str, tied: bool) -> None:
    config = config_of(model_type, tie_word_embeddings=tied)
    spec = infer(config, base_width=BASE)
    assert all(set(vars(s.multipliers).values()) == {1.0} for s in spec.parameters.values())
    ours, standard = build_model(config, seed=1), build_model(config, seed=1)
    apply(ours, spec)
    with_mup = parameter_groups(ours, weight_decay=0.1, lr=1e-2, mup=spec)
    without = parameter_groups(standard, weight_decay=0.1, lr=1e-2)
    assert [(g["name"], len(g["params"]), g["lr"]) for g in with_mup] == [
        (g["name"], len(g["params"]), g["lr"]) for g in without
    ]
    assert losses(ours, with_mup, 5) == losses(standard, without, 5)
    for mine, theirs in zip(ours.parameters(), standard.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_initial_values_by_hand() -> None:
    """Width ratio 4, llama untied: hidden / 2, head / 4, everything else as it was."""
    config = config_of(ratio=4, tie_word_embeddings=False)
    model, plain = build_model(config, seed=0), build_model(config, seed=0)
    apply(model, infer(config, base_width=BASE))
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        factor = 0.5 if "_proj" in name else 0.25 if name == "lm_head.weight" else 1.0
        assert torch.equal(mine, theirs * factor), name


def test_a_gain_of_one_plus_weight_holds_the_readout() -> None:
    """Gemma's embeddings are multiplied by sqrt(width): they take 4 ** -1/2 of 1/4, the final gain the rest."""
    config = config_of("gemma", ratio=4)
    model, plain = build_model(config, seed=0), build_model(config, seed=0)
    spec = infer(config, base_width=BASE)
    apply(model, spec)
    assert spec.of("model.norm.weight").one_plus
    torch.testing.assert_close(1 + model.model.norm.weight, (1 + plain.model.norm.weight) / 2)
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight / 2)
    half = build_model(config, seed=0, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="1 \\+ weight: half precision"):
        apply(half, spec)


def test_applying_it_twice_is_applying_it_once() -> None:
    config = config_of(ratio=2, tie_word_embeddings=True)
    model, spec = build_model(config, seed=0), infer(config, base_width=BASE)
    assert not is_applied(model, spec)
    apply(model, spec)
    once = {name: value.clone() for name, value in model.state_dict().items()}
    apply(model, spec)
    assert all(torch.equal(once[name], value) for name, value in model.state_dict().items())
    assert is_applied(model, spec)
    with pytest.raises(ConfigError, match="already has another muP applied"):
        apply(model, infer(config, base_width=8))


def test_scaled_or_trained_weights_are_refused() -> None:
    config = config_of(ratio=2)
    model, spec = build_model(config, seed=0), infer(config, base_width=BASE)
    apply(model, spec)
    copied = build_model(config, seed=0)
    copied.load_state_dict(model.state_dict())  # the marker is not in the weights, their size is
    with pytest.raises(ConfigError) as refused:
        apply(copied, spec)
    assert "q_proj.weight has standard deviation" in str(refused.value)
    assert re.search(r"deviation 0\.0[67]\d*, expected 0\.(1|09)", str(refused.value))
    before = {name: value.clone() for name, value in copied.state_dict().items()}
    with pytest.raises(ConfigError):
        apply(copied, spec)
    assert all(torch.equal(before[name], value) for name, value in copied.state_dict().items())


def test_a_readout_of_zeros() -> None:
    config = config_of(ratio=2, tie_word_embeddings=False)
    model = build_model(config, seed=0)
    apply(model, infer(config, base_width=BASE), zero_readout=True)
    assert not model.lm_head.weight.any()
    assert not model(input_ids=tokens()).logits.any()
    tied = config_of(ratio=2, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="an embedding of zeros"):
        apply(build_model(tied, seed=0), infer(tied, base_width=BASE), zero_readout=True)


def test_a_spec_of_another_model_or_width() -> None:
    spec = infer(config_of(ratio=2), base_width=BASE)
    with pytest.raises(ConfigError, match="the muP spec is of another width"):
        apply(build_model(config_of(ratio=4), seed=0), spec)
    with pytest.raises(ConfigError, match="the muP spec is of another model"):
        apply(build_model(config_of("mixtral", ratio=2), seed=0), spec)


@pytest.fixture(scope="module")
def spec() -> MupSpec:
    return infer(config_of(ratio=2, tie_word_embeddings=False), base_width=BASE)


def test_json_there_and_back(spec: MupSpec) -> None:
    again = MupSpec.from_json(spec.to_json())
    assert again == spec
    assert again.fingerprint == spec.fingerprint == spec.as_dict()["fingerprint"]
    other = infer(config_of(ratio=2, tie_word_embeddings=False), base_width=BASE, weight_decay_mode="coupled")
    assert other.fingerprint != spec.fingerprint


def test_groups_are_verified(spec: MupSpec) -> None:
    model = build_model(config_of(ratio=2, tie_word_embeddings=False), seed=0)
    groups = parameter_groups(model, weight_decay=0.1, lr=1e-2, eps=1e-8, mup=spec)
    optimizer = torch.optim.AdamW(groups)
    assert verify_groups(optimizer, spec) == []
    assert verify_groups(optimizer, spec, lrs=[group["lr"] * 0.1 for group in groups]) == []
    assert "in muP's ratios" in str(verify_groups(optimizer, spec, lrs=[1e-2] * len(groups))[0])
    optimizer.param_groups[-1]["eps"] *= 2
    assert "eps is not" in str(verify_groups(optimizer, spec)[0])
    assert "no muP multipliers" in str(verify_groups(torch.optim.AdamW(model.parameters()), spec)[0])
    other = infer(config_of(ratio=2, tie_word_embeddings=False), base_width=8)
    problems = verify_groups(torch.optim.AdamW(parameter_groups(model, weight_decay=0, lr=1, mup=other)), spec)
    assert "made for another muP spec" in str(problems[0])


LOADS = """
import sys, torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = torch.load(folder + "/expected.pt")
    with torch.no_grad():
        assert torch.equal(model(input_ids=expected["ids"]).logits, expected["logits"]), folder
    assert "hfpretrain" not in sys.modules
"""


def test_the_checkpoint_is_plain_in_a_fresh_process(tmp_path: Path) -> None:
    folders = []
    for name, changes in {
        "untied": {"tie_word_embeddings": False},
        "tied": {"tie_word_embeddings": True},
        "moe": {"model_type": "mixtral", "num_local_experts": 4, "tie_word_embeddings": False},
    }.items():
        config = config_of(changes.pop("model_type", "llama"), ratio=2, **changes)
        model = build_model(config, seed=0).eval()
        spec = infer(config, base_width=BASE, base_depth=1)
        apply(model, spec)
        losses(model, parameter_groups(model, weight_decay=0.1, lr=1e-2, mup=spec), 2)
        for size in (96, 128):  # as it is, and after its vocabulary has grown
            before = model(input_ids=tokens()).logits.detach()
            model.resize_token_embeddings(size)
            logits = model(input_ids=tokens()).logits.detach()
            assert torch.equal(logits[..., :96], before), name
            assert logits.shape[-1] == size
            folder = tmp_path / f"{name}-{size}"
            model.save_pretrained(folder)
            torch.save({"ids": tokens(), "logits": logits}, folder / "expected.pt")
            folders.append(str(folder))
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "tied")
        assert MupSpec.from_dict(copy.deepcopy(model.config.mup)) == spec
    done = subprocess.run([sys.executable, "-c", LOADS, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
