"""Counts by role and products on tiny models of many architectures, against torch's operation counter and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from hfpretrain.model_counts import ROLES, ModelCounts, NotCountable, count_model
from hfpretrain.planning.compute import over_training
from hfpretrain.planning.flops import token_cost
from hfpretrain.small_models import tiny_config

LENGTH = 64
DENSE = (
    *("llama", "gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "phi3", "gemma2", "qwen3", "olmo2"),
    *("starcoder2", "stablelm", "granite", "glm4", "minicpm3", "mpt"),
)
SPARSE = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe")
WEIGHTS = {"mm", "addmm", "convolution"}  # operations that nothing but products with weights use in these models


def counted(model_type: str) -> tuple[dict[str, float], dict[str, float]]:
    """FLOPs of one token by operation, forward and backward, as torch counts them on a real row."""
    config = tiny_config(model_type)
    config._experts_implementation = "eager"  # each expert multiplies the tokens that were sent to it
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    row = torch.randint(3, 200, (1, LENGTH))
    with FlopCounterMode(display=False) as forward:
        logits = model(input_ids=row, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.float().logsumexp(-1).sum().backward()
    by_name = [
        {operation.__name__: flops / LENGTH for operation, flops in mode.get_flop_counts()["Global"].items()}
        for mode in (forward, backward)
    ]
    return by_name[0], by_name[1]


def of_weights(flops: dict[str, float]) -> float:
    return sum(value for name, value in flops.items() if name in WEIGHTS)


def cost_of(counts: ModelCounts) -> Any:
    attention = [(None, attention.width) for attention in counts.attention]  # eager computes the whole square
    return token_cost({part.role: part.active for part in counts.parts}, attention, sequence_length=LENGTH)


@pytest.mark.parametrize("model_type", DENSE + SPARSE)
def test_two_and_two_and_two(model_type: str) -> None:
    """2 N forward and 2 N + 2 N backward from the sum over roles, within 1 % of torch's count; attention as well."""
    forward, backward = counted(model_type)
    counts = count_model(tiny_config(model_type))
    cost = cost_of(counts)
    assert cost.weights == 2 * counts.active
    assert of_weights(forward) == pytest.approx(2 * counts.active, rel=0.01)
    assert of_weights(backward) == pytest.approx(4 * counts.active, rel=0.01)
    assert sum(forward.values()) == pytest.approx(cost.weights + cost.full_attention, rel=0.01)
    assert sum(forward.values()) + sum(backward.values()) == pytest.approx(cost.training_full_attention, rel=0.01)
    assert (counts.active < counts.multiplied) == (model_type in SPARSE)


def parameters_of(counts: ModelCounts) -> dict[str, int]:
    return {part.role: part.parameters for part in counts.parts}


def test_roles_of_a_llama_by_hand() -> None:
    """Width 64, 4 heads of which 2 for keys and values, MLP 128, 2 layers, 100 words."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    counts = count_model(config)
    expected = {"embedding": 6400, "head": 6400, "attention": 2 * 3 * 64**2, "mlp": 2 * 3 * 64 * 128, "norm": 5 * 64}
    assert parameters_of(counts) == expected
    assert counts.active == counts.multiplied == 6400 + 2 * 3 * 64**2 + 2 * 3 * 64 * 128
    assert [(part.window, part.width, part.layers) for part in counts.attention] == [(None, 128.0, 2)]
    assert (counts.width, counts.tied) == (64, False)
    config.tie_word_embeddings = True
    tied = count_model(config)
    assert tied.tied
    assert parameters_of(tied) == {role: count for role, count in expected.items() if role != "embedding"}


def test_a_large_model_is_counted_without_its_memory() -> None:
    """The default LlamaConfig is LLaMA 7B: 27 GB that are not allocated; on LLaMA-2's 2T tokens 14.84 times 20 N."""
    counts = count_model(LlamaConfig())
    assert counts.parameters == 6_738_415_616
    assert over_training(counts.parameters, 2e12) == pytest.approx(14.84, abs=0.005)
    assert counts.of("attention").parameters + counts.of("mlp").parameters == 6_476_005_376


def test_experts_count_for_those_that_a_token_meets() -> None:
    """4 experts, 2 of them for a token; the router has a row for each."""
    counts = count_model(tiny_config("mixtral"))
    experts, router = counts.of("experts"), counts.of("router")
    assert experts.parameters == experts.multiplied == 2 * 4 * 3 * 64 * 128
    assert experts.active == experts.multiplied / 2
    assert router.parameters == router.active == 2 * 4 * 64


@pytest.mark.parametrize(
    ("model_type", "windows"), [("gemma2", {32: 1, None: 1}), ("mistral", {32: 2}), ("gpt_oss", {32: 1, None: 1})]
)
def test_windows_are_read_off_the_attention(model_type: str, windows: dict[int | None, int]) -> None:
    counts = count_model(tiny_config(model_type))
    assert {part.window: part.layers for part in counts.attention} == windows


def test_recurrence_and_a_matrix_used_twice() -> None:
    """Mamba attends nowhere; dory runs through its recurrent layers twice, so they are multiplied twice."""
    mamba = count_model(tiny_config("lfm2"))
    assert mamba.of("recurrence").active == pytest.approx(mamba.of("recurrence").parameters)
    assert mamba.of("attention").parameters > 0
    twice = count_model(tiny_config("dory"))
    assert twice.active > twice.multiplied


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "lfm2", "bert", "gpt_bigcode"])
def test_every_parameter_has_one_role(model_type: str) -> None:
    config = tiny_config(model_type)
    counts = count_model(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert counts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert {part.role for part in counts.parts} <= set(ROLES)


def test_what_needs_values_says_so() -> None:
    with pytest.raises(NotCountable, match="nonzero"):
        count_model(tiny_config("dbrx"))
