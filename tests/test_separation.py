"""Which way keeps documents apart, by architecture; and that what was chosen does, in logits, gradients and losses."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel

from hfpretrain.attention import TORCH_VARLEN, register_torch_varlen, torch_varlen_attention
from hfpretrain.data.collator import IGNORED_LABEL, PackedCollator
from hfpretrain.data.isolation import Way, ways
from hfpretrain.small_models import tiny_config
from hfpretrain.training.separation import Separation, separate
from isolation_architectures import (
    ROW,
    ROWS,
    WINDOW,
    difference_to_separate,
    logits_of,
    narrow_model,
    random_documents,
)

# Model type: the way among all, and among those that keep the model's own attention ("": no way isolates).
EXPECTED = {
    "llama": (TORCH_VARLEN, "position_ids"),
    "mistral": (TORCH_VARLEN, "position_ids"),
    "mixtral": (TORCH_VARLEN, "position_ids"),
    "qwen3": (TORCH_VARLEN, "position_ids"),
    "gemma2": (TORCH_VARLEN, "position_ids"),
    "gemma3_text": (TORCH_VARLEN, "position_ids"),
    "phi3": (TORCH_VARLEN, "position_ids"),
    "olmo2": (TORCH_VARLEN, "position_ids"),
    "gpt2": (TORCH_VARLEN, "position_ids"),
    "gpt_neox": (TORCH_VARLEN, "position_ids"),
    "deepseek_v3": (TORCH_VARLEN, "position_ids"),
    "afmoe": (TORCH_VARLEN, "mask"),  # a window in some layers, its masks are made without position_ids
    "opt": (TORCH_VARLEN, "mask"),
    "bert": (TORCH_VARLEN, "mask"),
    "gpt_oss": (TORCH_VARLEN, "mask"),  # its masks are made without position_ids; eager: an additive one
    "biogpt": ("mask", "mask"),
    "falcon": ("position_ids", "position_ids"),
    "gpt_neo": ("position_ids", "position_ids"),
    "stablelm": ("position_ids", "position_ids"),
    "llama4_text": ("position_ids", "position_ids"),
    "got_ocr2": ("position_ids", "position_ids"),  # refuses torch_varlen when its text model has taken it already
    "mamba": ("", ""),
    "jamba": ("", ""),
    "bloom": ("", ""),
    "lfm2": ("", ""),  # short convolutions
    "big_bird": ("mask", "mask"),  # eager attention adds its mask to the scores: a boolean one would leak
    "roberta": ("", ""),  # by itself counts positions from 2
}
LEAKS_BY_RESETS = {name for name, (_, own) in EXPECTED.items() if own != "position_ids"}


@cache
def _built(model_type: str) -> PreTrainedModel:
    return narrow_model(model_type)


def fresh(model_type: str) -> PreTrainedModel:
    return copy.deepcopy(_built(model_type))


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register_torch_varlen()


def separation(model: PreTrainedModel, tried: Sequence[Way]) -> Separation:
    def logits(_: torch.nn.Module, batch: Any) -> Tensor:
        return logits_of(model, batch)

    return separate(tried, model, wrapped=model, logits=logits, device=torch.device("cpu"))


def all_ways(model: PreTrainedModel, *attentions: str) -> list[Way]:
    return ways(model.config, attentions=attentions, attn_implementation=None, sequence_length=ROW)


def attentions_of(model: PreTrainedModel) -> list[str | None]:
    return [part.config._attn_implementation for part in model.modules() if isinstance(part, PreTrainedModel)]


# -- what is chosen ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", EXPECTED)
def test_the_way_by_name_and_that_it_computes_what_separate_forwards_do(model_type):
    model, reference = fresh(model_type), fresh(model_type)
    before, documents = attentions_of(model), random_documents(ROWS)
    batches = ([documents[0]], documents)
    for attentions, expected in zip(((TORCH_VARLEN,), ()), EXPECTED[model_type], strict=True):
        found = separation(model, all_ways(model, *attentions))
        resets = next(line for line in found.tried if "by position_ids" in line) if expected != TORCH_VARLEN else ""
        assert ("LEAK" in resets) == bool(resets and model_type in LEAKS_BY_RESETS), resets
        if not expected:
            assert found.way is None
            assert len(found.tried) == 3 + len(attentions), "each way is accounted for"
            assert attentions_of(model) == before
            continue
        assert found.way is not None, found.tried
        assert expected == (found.way.attn_implementation or found.way.mechanism)
        assert "documents do not see each other" in found.tried[-1]
        assert difference_to_separate(model, reference, found.way.collator(), batches) < 1e-4
        assert difference_to_separate(model, reference, PackedCollator(None), batches) > 0.1, "the control"
        model = fresh(model_type)


@pytest.mark.parametrize("model_type", ["mamba", "jamba", "bloom", "lfm2"])
def test_one_document_a_row_where_nothing_else_isolates(model_type):
    model, documents = fresh(model_type), random_documents(ROWS)
    found = separation(model, [*all_ways(model, TORCH_VARLEN), Way("single")])
    assert found.way == Way("single")
    rows = [[document] for row in documents for document in row]
    assert difference_to_separate(model, model, found.way.collator(), [rows]) < 1e-4
    assert difference_to_separate(model, model, PackedCollator(None), [documents]) > 1e-2, "the control"


def test_a_mask_that_loses_the_window_is_rejected():
    model = fresh("mistral")
    found = separation(model, [Way("mask"), Way("mask", windows=WINDOW)])
    assert found.way == Way("mask", windows=WINDOW)
    assert "packed instead of alone" in found.tried[0]
    assert "LEAK" in found.tried[0]


def test_a_model_that_counts_positions_otherwise_is_rejected():
    found = separation(fresh("roberta"), [Way("mask")])
    assert found.way is None
    assert "changed in a row: 0.0e+00 (rounding" in found.tried[0], "nothing leaks"
    assert "packed instead of alone" in found.tried[0]
    assert "LEAK" in found.tried[0]


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral"])
def test_bfloat16_is_not_taken_for_a_leak(model_type):
    for attentions, expected in zip(((TORCH_VARLEN,), ()), EXPECTED[model_type], strict=True):
        model = fresh(model_type).bfloat16()
        found = separation(model, all_ways(model, *attentions))
        assert found.way is not None, found.tried
        assert expected == (found.way.attn_implementation or found.way.mechanism)


# -- what is left behind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["jamba", "got_ocr2", "big_bird"])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_as_it_was_where_no_way_isolates(model_type, training):
    model = fresh(model_type).train(training)
    before = attentions_of(model)
    assert separation(model, [Way("varlen", TORCH_VARLEN), Way("varlen", "no_such_attention")]).way is None
    assert attentions_of(model) == before
    assert model.training is training


def test_the_model_keeps_the_attention_that_was_chosen():
    model = fresh("llama")
    assert separation(model, all_ways(model, TORCH_VARLEN)).way == Way("varlen", TORCH_VARLEN)
    assert set(attentions_of(model)) == {TORCH_VARLEN}


@contextmanager
def registered(name: str, attention: Any) -> Iterator[None]:
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


def doubled(*args: Any, scaling: float, **others: Any) -> Any:
    return torch_varlen_attention(*args, scaling=2 * scaling, **others)


def uncapped(*args: Any, softcap: float | None = None, **others: Any) -> Any:
    return torch_varlen_attention(*args, **others)


@pytest.mark.parametrize("wrong", [doubled, uncapped])
def test_an_attention_that_computes_something_else_is_rejected(wrong):
    model = fresh("gemma2")
    with torch.no_grad():
        for layer in model.model.layers:  # scores of a new model are too near to 0 for scale and softcap to matter
            layer.self_attn.q_proj.weight *= 300
            layer.self_attn.attn_logit_softcapping = 2.0
    with registered("wrong", wrong):
        found = separation(model, [Way("varlen", "wrong"), Way("varlen", TORCH_VARLEN)])
    assert found.way == Way("varlen", TORCH_VARLEN), found.tried
    assert "changed in a row: 0.0e+00 (rounding" in found.tried[0], "it does keep documents apart"
    assert "packed instead of alone" in found.tried[0]
    assert "LEAK" in found.tried[0]


def test_a_way_that_raises_is_skipped_and_named():
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel for this device\nand a long traceback")

    model = fresh("llama")
    with registered("broken", broken):
        found = separation(model, all_ways(model, "broken"))
    assert found.way == Way("position_ids")
    assert found.tried[0] == "by varlen with broken: RuntimeError: no kernel for this device"
    assert attentions_of(model) == ["sdpa"] * len(attentions_of(model))


# -- gradients and losses ---------------------------------------------------------------------------------------------


def batch_of(rows: Sequence[Sequence[np.ndarray]], collator: PackedCollator) -> dict[str, Any]:
    length = max(sum(map(len, row)) for row in rows)
    blocks = []
    for row in rows:
        tokens = np.concatenate([*row, np.zeros(length, dtype=np.int64)])[:length]
        blocks.append({"input_ids": tokens, "piece_lengths": [len(document) for document in row]})
    return collator(blocks)


def token_losses(model: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
    """Cross-entropy of every target, in order of rows and positions."""
    logits, targets = logits_of(model, batch)[:, :-1], batch["labels"][:, 1:]
    is_target = targets != IGNORED_LABEL
    return F.cross_entropy(logits[is_target], targets[is_target], reduction="none")


def gradient_at_the_first_document(model: PreTrainedModel, collator: PackedCollator) -> tuple[float, float]:
    """Largest gradient of document B's loss by the embedding of a token of A, and by one of B."""
    generator = np.random.default_rng(3)
    first, second = generator.integers(8, 100, 11), generator.integers(100, 200, 13)
    rows = [[first], [second]] if collator.mechanism == "single" else [[first, second]]
    batch, embedded = batch_of(rows, collator), []

    def keep(_module: Any, _inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    hook = model.get_input_embeddings().register_forward_hook(keep)
    losses = token_losses(model, batch)
    hook.remove()
    assert len(losses) == 10 + 12
    assert len(embedded) == 1
    losses[10:].sum().backward()
    of_first, of_second = (batch["input_ids"] < 100) & (batch["input_ids"] >= 8), batch["input_ids"] >= 100
    gradient = embedded[0].grad.reshape(*batch["input_ids"].shape, -1)
    return float(gradient[of_first].abs().max()), float(gradient[of_second].abs().max())


@pytest.mark.parametrize(
    ("model_type", "attentions"),
    [
        ("llama", [TORCH_VARLEN]),
        ("llama", []),
        ("gpt_oss", [TORCH_VARLEN]),
        ("gemma2", []),
        ("opt", [TORCH_VARLEN]),
        ("afmoe", []),
        ("falcon", []),
        ("mamba", []),
        ("jamba", []),
    ],
)
def test_the_loss_of_a_document_has_no_gradient_at_the_one_before_it(model_type, attentions):
    model = fresh(model_type)
    found = separation(model, [*all_ways(model, *attentions), Way("single")])
    before, own = gradient_at_the_first_document(model, found.way.collator())
    assert before == 0.0 < own
    before, own = gradient_at_the_first_document(fresh(model_type), PackedCollator(None))
    assert before > 1e-3 * own > 0.0, "the control"


@pytest.mark.parametrize(
    ("model_type", "attentions", "expected"),
    [
        ("llama", [TORCH_VARLEN], "varlen"),
        ("llama", [], "position_ids"),
        ("gpt_oss", [TORCH_VARLEN], "varlen"),
        ("gemma2", [TORCH_VARLEN], "varlen"),
        ("gemma2", [], "position_ids"),
        ("afmoe", [], "mask"),
    ],
)
def test_training_on_packed_documents_is_training_on_separate_ones(model_type, attentions, expected):
    model, reference = fresh(model_type), fresh(model_type)
    found = separation(model, all_ways(model, *attentions))
    assert found.way is not None
    assert found.way.mechanism == expected
    rows = random_documents(ROWS)
    packed = token_losses(model.train(), batch_of(rows, found.way.collator()))
    alone = [[document] for row in rows for document in row]
    separate_ = token_losses(reference.train(), batch_of(alone, PackedCollator("single")))
    assert len(packed) == sum(length - 1 for row in ROWS for length in row)
    torch.testing.assert_close(packed, separate_, rtol=0, atol=1e-5)
    packed.mean().backward()
    separate_.mean().backward()
    total = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None]).norm()
    for (name, made), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (made.grad is None) == (wanted.grad is None), name
        if made.grad is not None:
            missed, size = (made.grad - wanted.grad).norm(), wanted.grad.norm()
            assert missed <= 1e-5 * max(size, 1e-3 * total), (name, float(missed / size))


def test_a_single_document_that_padding_changes_is_refused() -> None:
    """BERT as an encoder sees what follows, so padding after a document counts; nothing is left to try."""
    config = tiny_config("bert")
    config.is_decoder = False
    found = separation(AutoModelForCausalLM.from_config(config).eval(), [Way("single")])
    assert found.way is None
    problem = str(found.problem("BertLMHeadModel"))
    assert "of a document in a padded batch" in problem
    assert "LEAK" in problem
