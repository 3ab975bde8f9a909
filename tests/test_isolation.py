"""The verdict on architectures whose isolation is known, on the traps that undo it, and on models made to leak."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from hfpretrain.data.collator import PackedCollator
from hfpretrain.data.isolation import Leak, measure_leak
from hfpretrain.model import build_model
from hfpretrain.training.separation import assert_isolated

VOCABULARY = 97
LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SIZES: dict[str, dict[str, Any]] = {
    "llama": LLAMA_LIKE,
    "gemma2": {**LLAMA_LIKE, "sliding_window": 8},
    "mixtral": {**LLAMA_LIKE, "num_local_experts": 4},
    "gpt_oss": {**LLAMA_LIKE, "num_local_experts": 4, "sliding_window": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "opt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48}
    | {"word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


def tiny(model_type: str, attention: str | None = None) -> PreTrainedModel:
    config = CONFIG_MAPPING[model_type](
        vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=None, **SIZES[model_type]
    )
    return build_model(config, seed=0, attn_implementation=attention).eval()


def leak_of(model: nn.Module, collator: Any = None, **extra: Any) -> Leak:
    takes_positions = getattr(getattr(model, "config", None), "model_type", "") not in ("bloom", "mamba")

    def forward(batch: dict[str, Any]) -> Tensor:
        if not takes_positions:
            batch = {key: value for key, value in batch.items() if key != "position_ids"}
        options = {key: value(batch) if callable(value) else value for key, value in extra.items()}
        return model(**batch, **options).logits

    collator = collator or PackedCollator()
    return measure_leak(forward, vocab_size=VOCABULARY, device="cpu", collator=collator)


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [(name, kind) for name in ("llama", "gpt2", "mixtral") for kind in ("sdpa", "eager")] + [("gemma2", "eager")],
)
def test_clean_architectures(model_type, attention):
    leak = leak_of(tiny(model_type, attention), use_cache=False)
    assert leak.isolated, leak.detail
    assert leak.max_difference < 1e-4 * leak.scale


@pytest.mark.parametrize("model_type", ["mamba", "bloom", "opt", "gpt_oss"])
def test_leaking_architectures(model_type):
    leak = leak_of(tiny(model_type), use_cache=False)
    assert not leak.isolated
    assert "LEAK" in leak.detail
    assert leak.max_difference > 1e-3 * leak.scale, "far from the threshold, so the verdict is not a matter of luck"


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "mixtral"])
def test_an_attention_mask_of_ones_or_a_cache_undoes_the_isolation(model_type):
    model = tiny(model_type)
    ones: Callable[[dict[str, Any]], Tensor] = lambda batch: torch.ones_like(batch["input_ids"])  # noqa: E731
    assert not leak_of(model, use_cache=False, attention_mask=ones).isolated
    assert not leak_of(model, use_cache=True).isolated


def test_without_restarted_positions_documents_see_each_other():
    leak = leak_of(tiny("llama"), PackedCollator(None), use_cache=False)
    assert not leak.isolated


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "mixtral"])
def test_reduced_precision_is_not_taken_for_a_leak(model_type):
    model = tiny(model_type)
    with torch.autocast("cpu", torch.bfloat16):
        assert leak_of(model, use_cache=False).isolated
    assert leak_of(model.bfloat16(), use_cache=False).isolated


@pytest.mark.parametrize("model_type", ["mamba", "bloom", "opt", "gpt_oss"])
def test_reduced_precision_does_not_hide_a_leak(model_type):
    assert not leak_of(tiny(model_type).bfloat16(), use_cache=False).isolated


def test_the_tokens_are_the_same_everywhere_and_no_random_state_is_touched():
    model, seen = tiny("llama"), []

    def forward(batch: dict[str, Any]) -> Tensor:
        assert "labels" not in batch
        seen.append(batch["input_ids"])
        return model(**batch, use_cache=False).logits

    before = torch.get_rng_state()
    for _ in range(2):
        measure_leak(forward, vocab_size=VOCABULARY, device="cpu", collator=PackedCollator(), sequence_length=48)
    assert torch.equal(before, torch.get_rng_state())
    assert len(seen) == 18
    assert all(torch.equal(a, b) for a, b in zip(seen[:9], seen[9:], strict=True))
    assert {tuple(ids.shape) for ids in seen} == {(1, 48), (2, 48), (1, 15), (1, 18)}
    assert max(int(ids.max()) for ids in seen) < VOCABULARY


class Toy:
    """A position-wise model with one defect at a time, on random embeddings."""

    def __init__(self, defect: str) -> None:
        self.defect = defect
        self.table = torch.randn(VOCABULARY, 16, generator=torch.Generator().manual_seed(0))

    def __call__(self, batch: dict[str, Any]) -> Tensor:
        hidden = self.table[batch["input_ids"]]
        if self.defect == "convolution":  # sees one token back, across the boundary
            hidden = hidden + torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        if self.defect == "batch":  # rows of a batch are mixed
            hidden = hidden + hidden.mean(dim=(0, 1)) * (len(hidden) > 1)
        if self.defect == "positions":  # positions run on through the row: no contamination, yet not the same as alone
            hidden = hidden + torch.arange(hidden.shape[1])[None, :, None] / 10
        if self.defect == "constant":
            hidden = hidden * 0
        if self.defect == "nan":
            hidden = hidden / 0 * 0
        if self.defect == "future":
            hidden = hidden + hidden.flip(1)
        return hidden


@pytest.mark.parametrize(
    ("defect", "said"),
    [
        ("convolution", r"changed in a row: \S+ \(LEAK\)"),
        ("positions", r"changed in a row: 0\S+ \(rounding.*packed instead of alone: \S+ \(LEAK\)"),
        ("constant", "all logits are equal"),
        ("nan", "not finite"),
        ("future", "not a causal model"),
        ("batch", "depend on what follows"),
    ],
)
def test_each_defect_is_named(defect, said):
    leak = measure_leak(Toy(defect), vocab_size=VOCABULARY, device="cpu", collator=PackedCollator())
    assert not leak.isolated
    assert re.search(said, leak.detail), leak.detail


def test_a_position_wise_model_is_clean_also_when_rows_are_flattened():
    for collator in (PackedCollator(), PackedCollator("varlen")):
        leak = measure_leak(Toy("none"), vocab_size=VOCABULARY, device="cpu", collator=collator)
        assert leak.isolated
        assert leak.max_difference == 0.0


def test_sizes_that_cannot_be_measured_are_refused():
    with pytest.raises(ValueError, match="sequence_length >= 8"):
        measure_leak(Toy("none"), vocab_size=2, device="cpu", collator=PackedCollator(), sequence_length=4)


def test_assert_isolated_names_the_model_and_leaves_its_mode():
    model = tiny("llama").train()
    assert assert_isolated(model).isolated
    assert model.training
    for leaking in (tiny("bloom"), tiny("mamba")):  # neither takes position_ids
        with pytest.raises(AssertionError, match=rf"{type(leaking).__name__}: documents see each other"):
            assert_isolated(leaking)
    with pytest.raises(AssertionError, match="LEAK"):
        assert_isolated(model, PackedCollator(None))
