"""Nats of documents against sums written by hand: closed forms, float64 chain rules, and what must not change them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hfpretrain.bpb.score import Scorer, measured, score
from hfpretrain.errors import ConfigError
from tiny import tiny_config

LENGTH, PREFIX, VOCABULARY = 8, 1, 97
COUNTS = [0, 1, LENGTH, LENGTH + 1, 2 * LENGTH, 2 * LENGTH + 1, 3, 29]


def _documents(counts: list[int] = COUNTS) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCABULARY, size=count) for count in counts]


def _model(model_type: str = "gpt2", dtype: torch.dtype = torch.float64, **overrides: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = (
        tiny_config(model_type, **overrides)
        if model_type in ("gpt2", "llama")
        else AutoConfig.for_model(model_type, **({"vocab_size": VOCABULARY, "pad_token_id": None} | overrides))
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return model


@torch.no_grad()
def _by_hand(model: PreTrainedModel, ids: np.ndarray, *, length: int, stride: int, prefix: int | None) -> float:
    """-ln p, one token after another, each in a forward pass of its own over exactly the inputs that it may see."""
    stream = [*([] if prefix is None else [prefix]), *ids.tolist()]
    terms = [math.log(VOCABULARY)] if prefix is None and len(ids) else []
    for position in range(len(stream) - 1):
        # the window that scores this position: the first one, or the stride that the position falls into
        past = position + 1 - length
        end = length if past <= 0 else length + math.ceil(past / stride) * stride
        end = min(end, len(stream) - 1)
        inputs = torch.tensor([stream[max(end - length, 0) : position + 1]])
        logits = model(input_ids=inputs, use_cache=False).logits[0, -1].double()
        terms.append(-float(logits.log_softmax(-1)[stream[position + 1]]))
    return math.fsum(terms)


def test_uniform_model_is_log2_vocabulary_bits_a_token() -> None:
    model = _model("llama", torch.float32)
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    scores = score(model, _documents(), prefix_id=PREFIX, max_length=LENGTH)
    assert scores.tokens.tolist() == COUNTS
    np.testing.assert_allclose(scores.nats / math.log(2), np.array(COUNTS) * math.log2(VOCABULARY), rtol=1e-6)
    assert scores.nats[0] == 0.0
    in_double = _model()
    torch.nn.init.zeros_(in_double.get_output_embeddings().weight)
    exact = score(in_double, _documents(), prefix_id=PREFIX, max_length=LENGTH)
    np.testing.assert_allclose(exact.nats, np.array(COUNTS) * math.log(VOCABULARY), rtol=1e-14)


@pytest.mark.parametrize("prefix", [PREFIX, None])
def test_one_window_is_the_chain_rule(prefix: int | None) -> None:
    model = _model()
    scores = score(model, _documents(), prefix_id=prefix, max_length=32)
    expected = [_by_hand(model, ids, length=32, stride=32, prefix=prefix) for ids in _documents()]
    np.testing.assert_allclose(scores.nats, expected, rtol=1e-12)
    assert scores.uniform_tokens == (0 if prefix is not None else len(COUNTS) - 1)
    assert ("uniform code" in "".join(scores.notes)) == (prefix is None)


@pytest.mark.parametrize("stride", [1, LENGTH // 2, LENGTH])
def test_windows_give_each_token_the_context_that_is_promised(stride: int) -> None:
    model = _model()
    scores = score(model, _documents(), prefix_id=PREFIX, max_length=LENGTH, stride=stride)
    expected = [_by_hand(model, ids, length=LENGTH, stride=stride, prefix=PREFIX) for ids in _documents()]
    np.testing.assert_allclose(scores.nats, expected, rtol=1e-12)


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "gemma2": {  # a softcap between head and logits, windows in every other layer
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "final_logit_softcapping": 2.0,
        "sliding_window": 4,
        "initializer_range": 0.5,
    },
    "phi": {  # a head with a bias
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "mixtral": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "max_position_embeddings": 64,
    },
    "mamba": {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_batches_do_not_change_any_architecture(name: str) -> None:
    overrides = dict(ARCHITECTURES[name])
    model = _model(overrides.pop("model_type", name), torch.float32, **overrides)
    for bias in (b for n, b in model.named_parameters() if n == "lm_head.bias"):
        torch.nn.init.normal_(bias)
    expected = [_by_hand(model, ids, length=LENGTH, stride=LENGTH, prefix=PREFIX) for ids in _documents()]
    with measured(model) as scorer:
        assert scorer.fused.verdict is not None
        assert scorer.fused.verdict.path == "fused"
        assert scorer.padding is None
        for batch_size in (1, 3, 8):
            scores = scorer.score(_documents(), prefix_id=PREFIX, max_length=LENGTH, batch_size=batch_size)
            np.testing.assert_allclose(scores.nats, expected, rtol=1e-6)


class _Doubling(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(hidden)


def test_a_head_that_is_more_than_its_matrix_is_scored_from_the_logits() -> None:
    model = _model("llama", torch.float32)
    model.lm_head.__class__ = _Doubling
    expected = [_by_hand(model, ids, length=LENGTH, stride=LENGTH, prefix=PREFIX) for ids in _documents()]
    scores = score(model, _documents(), prefix_id=PREFIX, max_length=LENGTH)
    assert scores.verdict.startswith("from the logits")
    np.testing.assert_allclose(scores.nats, expected, rtol=1e-6)


def test_a_model_whose_padding_matters_is_scored_alone() -> None:
    model = _model("llama", torch.float32)
    with measured(model) as scorer:
        alone = Scorer(scorer.fused, scorer.forward, scorer.device, "measured to matter")
        sizes: list[int] = []
        handle = model.get_input_embeddings().register_forward_hook(lambda _m, args, _o: sizes.append(len(args[0])))
        scores = alone.score(_documents(), prefix_id=PREFIX, max_length=LENGTH, batch_size=8)
        handle.remove()
    assert set(sizes) == {1}
    assert scores.batch_size == 1
    assert "measured to matter" in scores.notes[0]


class _AveragesOverTheBatch(torch.nn.Module):
    """Centres what goes through by the mean over all rows, padding included."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - hidden.mean(dim=(0,), keepdim=True) * (len(hidden) > 1)


def test_that_padding_matters_is_measured() -> None:
    model = _model("llama", torch.float32)
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, _AveragesOverTheBatch())
    with measured(model) as scorer:
        assert scorer.padding is not None


def test_a_model_that_sees_the_future_is_refused_and_left_as_it_was() -> None:
    model = _model("llama", torch.float32)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    forward = model.forward
    with pytest.raises(ConfigError, match="depend on tokens that follow"):
        score(model, _documents(), prefix_id=PREFIX, max_length=LENGTH)
    assert model.forward == forward


class _LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        self.numel = max([self.numel, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
        return result


def test_no_logits_of_a_whole_batch_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, rows, length, width = 4001, 8, 32, 16
    sizes = {"hidden_size": width, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = _model("llama", torch.float32, vocab_size=vocabulary, **sizes)
    monkeypatch.setitem(
        vars(__import__("hfpretrain.loss.head", fromlist=["_"]))["_CHUNK_BYTES"], "cpu", 4 * 9 * vocabulary
    )
    with measured(model) as scorer, _LargestTensor() as largest:
        scorer.score(_documents([32] * 16), prefix_id=PREFIX, max_length=length, batch_size=rows)
    assert largest.numel == vocabulary * width  # the weight itself
    assert largest.numel < rows * length * vocabulary / 10


def test_modes_and_forward_are_given_back_and_dropout_is_off() -> None:
    model = _model("gpt2", torch.float32, resid_pdrop=0.5, embd_pdrop=0.5)
    model.train()
    model.transformer.h[1].eval()
    first = score(model, _documents(), prefix_id=PREFIX, max_length=LENGTH)
    second = score(model, _documents(), prefix_id=PREFIX, max_length=LENGTH)
    np.testing.assert_array_equal(first.nats, second.nats)
    assert model.training
    assert model.transformer.h[0].training
    assert not model.transformer.h[1].training
    assert "_fused_loss" not in model.__dict__


def test_default_length_is_the_models_positions_and_says_so() -> None:
    scores = score(_model("llama", torch.float32), _documents([70]), prefix_id=PREFIX)
    assert (scores.max_length, scores.windows) == (64, 2)
    assert "64 inputs" in scores.notes[0]


def test_positions_that_a_model_keeps_for_padding_are_named() -> None:
    """RoBERTa counts positions from padding_idx + 1: of 64 it uses 62."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model(
        "roberta", vocab_size=VOCABULARY, max_position_embeddings=64, is_decoder=True, **sizes
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"(?s)windows of 64 inputs.*a smaller max_length"):
        score(model, _documents([70]), prefix_id=PREFIX)
    assert score(model, _documents([70]), prefix_id=PREFIX, max_length=62).tokens.tolist() == [70]


def test_everything_wrong_is_said_at_once() -> None:
    documents = [np.array([1, 2]), np.array([VOCABULARY])]
    with pytest.raises(ConfigError) as error:
        score(_model("llama", torch.float32), documents, prefix_id=VOCABULARY, max_length=65, stride=66, batch_size=0)
    message = str(error.value)
    assert message.startswith("5 problems")
    for words in ("64 positions", "outside 1 .. max_length", "needs a window", "begin documents with", "number 1"):
        assert words in message


def test_nats_that_are_not_finite_name_the_document() -> None:
    model = _model("llama", torch.float32)
    documents = [np.array([1, 2, 3]), np.array([4, 90, 5, 6])]
    with measured(model) as scorer:
        model.get_input_embeddings().weight.data[90] = math.inf
        with pytest.raises(FloatingPointError, match=r"1 of 2 documents.*document 1"):
            scorer.score(documents, prefix_id=PREFIX, max_length=LENGTH)


def test_half_precision_weights_are_scored_in_float32() -> None:
    """The sum over a document is not one of bfloat16 terms: it is what float32 makes of the same hidden states."""
    model = _model("llama", torch.bfloat16)
    ids = _documents([29])[0]
    nats = score(model, [ids], prefix_id=PREFIX, max_length=32).nats[0]
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([[PREFIX, *ids[:-1].tolist()]]), use_cache=False).last_hidden_state
        logits = hidden[0].double() @ model.lm_head.weight.double().T
    expected = -float(logits.log_softmax(-1)[torch.arange(29), torch.from_numpy(ids)].sum())
    assert nats == pytest.approx(expected, rel=1e-6)
