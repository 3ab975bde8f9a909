"""torch_varlen against attention written out in float64 for each document, then inside whole models."""

from __future__ import annotations

from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from gpu_attention import SMALL, attention_errors, document_rows, loss_errors
from hfpretrain import attention
from hfpretrain.attention import TORCH_VARLEN, register_torch_varlen, torch_varlen_attention
from hfpretrain.data.collator import PackedCollator
from hfpretrain.small_models import tiny_config

LENGTHS = [1, 9, 2, 14, 1, 5]  # tokens of the segments of a flat row; the last may be padding
HEADS, KEY_HEADS, WIDTH = 4, 2, 8
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64)


def inputs(rows: int = 1, length: int = sum(LENGTHS), *, value_width: int = WIDTH, **kind: Any) -> list[Tensor]:
    """Query [rows, 4, length, 8], key [rows, 2, length, 8], value; leaves, float64 unless another dtype is given."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, value_width)]
    made = [torch.randn(rows, h, length, d, generator=generator, dtype=torch.float64) for h, d in shapes]
    return [tensor.to(**kind).requires_grad_() for tensor in made]


def boundaries(lengths: list[int]) -> dict[str, Any]:
    return {
        "cu_seq_lens_q": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        "max_length_q": max(lengths),
    }


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    *,
    scaling: float = WIDTH**-0.5,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """[1, H, T, D] -> [T, H, D], float64: each token of each head by itself, from its own document's keys."""
    query, key, value = (tensor[0].double() for tensor in (query, key, value))
    group = query.shape[0] // key.shape[0]
    tokens = []
    for start, end in pairwise([0, *accumulate(lengths)]):
        for t in range(start, end):
            first = start if sliding_window is None else max(start, t - sliding_window + 1)
            heads = []
            for h in range(query.shape[0]):
                scores = key[h // group, first : t + 1] @ query[h, t] * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                sink = 0.0 if s_aux is None else s_aux[h].double().exp()
                heads.append(weights @ value[h // group, first : t + 1] / (weights.sum() + sink))
            tokens.append(torch.stack(heads))
    return torch.stack(tokens)


def module(training: bool = False, **attributes: Any) -> nn.Module:
    layer = nn.Module().train(training)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scaling": 0.7},
    "window of one token": {"sliding_window": 1},
    "window shorter than documents": {"sliding_window": 4},
    "window as long as the longest document": {"sliding_window": max(LENGTHS)},
    "window longer than documents": {"sliding_window": 100},
    "softcap": {"softcap": 1.5},
    "sinks": {"s_aux": SINKS},
    "everything": {"scaling": 0.7, "sliding_window": 3, "softcap": 1.5, "s_aux": SINKS},
}


@pytest.mark.parametrize("value_width", [WIDTH, 6])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_of_documents_in_a_flat_row(case: str, value_width: int) -> None:
    options = CASES[case]
    ours, theirs = inputs(value_width=value_width), inputs(value_width=value_width)
    output, weights = torch_varlen_attention(module(), *ours, None, **options, **boundaries(LENGTHS))
    expected = reference(*theirs, LENGTHS, **options)
    assert weights is None
    assert output.shape == (1, sum(LENGTHS), HEADS, value_width)
    tolerance = 1e-6 if "softcap" in options or "s_aux" in options else 1e-13  # those have their softmax in float32
    torch.testing.assert_close(output[0], expected, rtol=0, atol=tolerance)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    output.backward(upstream)
    expected.backward(upstream[0])
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=0, atol=10 * tolerance)


def test_without_boundaries_each_row_is_a_document() -> None:
    query, key, value = inputs(rows=3, length=7)
    output, _ = torch_varlen_attention(module(), query, key, value, None)
    for row in range(3):
        expected = reference(query[row : row + 1], key[row : row + 1], value[row : row + 1], [7])
        torch.testing.assert_close(output[row], expected, rtol=0, atol=1e-13)


def test_a_sink_is_what_it_is_in_gpt_oss() -> None:
    query, key, value = inputs(length=9)
    sinks = nn.Parameter(SINKS.clone())
    layer = module(sinks=sinks, num_key_value_groups=HEADS // KEY_HEADS)
    mask = torch.full((9, 9), -1e30, dtype=torch.float64).triu(1)[None, None]
    expected, _ = eager_attention_forward(layer, query, key, value, mask, scaling=0.3)
    output, _ = torch_varlen_attention(layer, query, key, value, None, scaling=0.3, s_aux=sinks)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    (wanted,) = torch.autograd.grad(expected.square().sum(), sinks)
    (found,) = torch.autograd.grad(output.square().sum(), sinks)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}])
def test_dropout_in_training_only(options: dict[str, Any]) -> None:
    """With values of one the output is the sum of the weights: 1, and 1 on average where some are dropped."""
    query, key, _ = inputs(length=200)
    value = torch.ones_like(key)
    lengths = boundaries([80, 120])
    evaluated, _ = torch_varlen_attention(module(), query, key, value, None, dropout=0.3, **options, **lengths)
    torch.testing.assert_close(evaluated, torch.ones_like(evaluated), rtol=0, atol=1e-6)
    torch.manual_seed(0)
    dropped, _ = torch_varlen_attention(module(True), query, key, value, None, dropout=0.3, **options, **lengths)
    sums = dropped[..., 0]  # [1, T, H]
    assert sums.isfinite().all()
    assert sums.std() > 0.05
    # A sum has a spread of sqrt(0.3 / 0.7) at most (where one weight is all), the mean of 800 one of 0.023 at most.
    assert abs(sums.mean() - 1.0) < 0.03


def test_under_autocast_everything_is_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotary embedding in float32 leaves query and key in float32, which the kernel would not take."""
    query, key, value = inputs(dtype=torch.float32)
    seen: list[torch.dtype] = []
    document = attention._document
    monkeypatch.setattr(
        attention, "_document", lambda q, k, v, how: seen.extend([q.dtype, k.dtype, v.dtype]) or document(q, k, v, how)
    )
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = torch_varlen_attention(module(), query, key, value.bfloat16(), None, **boundaries(LENGTHS))
    assert set(seen) == {torch.bfloat16}
    torch.testing.assert_close(output[0].double(), reference(query, key, value, LENGTHS), rtol=0, atol=0.03)


# -- the kernel -------------------------------------------------------------------------------------------------------


def documented_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """What torch documents of `varlen_attn`: query t sees keys t - left to t + right, all where left is -1."""
    lengths = cu_seq_q.diff().tolist()
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == max(lengths)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert enable_gqa or query.shape[1] == key.shape[1]
    left, right = window_size
    assert right == 0
    flat = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return reference(
        *flat, lengths, scaling=WIDTH**-0.5 if scale is None else scale, sliding_window=None if left < 0 else left + 1
    )


@pytest.mark.parametrize("value_width", [WIDTH, 6])
@pytest.mark.parametrize("case", ["plain", "scale", "window of one token", "window shorter than documents"])
def test_arguments_of_the_kernel(case: str, value_width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", documented_varlen_attn)
    monkeypatch.setattr(attention._How, "fits_kernel", lambda *_: True)
    query, key, value = inputs(value_width=value_width)
    output, _ = torch_varlen_attention(module(), query, key, value, None, **CASES[case], **boundaries(LENGTHS))
    expected = reference(query, key, value, LENGTHS, **CASES[case])
    torch.testing.assert_close(output[0], expected, rtol=0, atol=1e-13)
    query, key, value = inputs(rows=2, length=5)
    output, _ = torch_varlen_attention(module(), query, key, value, None, **CASES[case])
    expected = reference(query[1:], key[1:], value[1:], [5], **CASES[case])
    torch.testing.assert_close(output[1], expected, rtol=0, atol=1e-13)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["plain", "scale", "window of one token", "window shorter than documents"])
def test_the_kernel_itself(case: str) -> None:
    ours, theirs = inputs(dtype=torch.bfloat16, device="cuda"), inputs(dtype=torch.bfloat16)
    lengths = boundaries(LENGTHS)
    lengths["cu_seq_lens_q"] = lengths["cu_seq_lens_q"].cuda()
    output, _ = torch_varlen_attention(module(), *ours, None, **CASES[case], **lengths)
    expected = reference(*theirs, LENGTHS, **CASES[case])
    torch.testing.assert_close(output[0].double().cpu(), expected, rtol=0, atol=0.03)
    output.sum().backward()
    expected.sum().backward()
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found.grad.cpu(), wanted.grad, rtol=0.02, atol=0.1)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (module(), {"attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)}, "an attention mask"),
        (module(), {"position_bias": torch.zeros(1, HEADS, 4, 4)}, "a bias of positions"),
        (module(is_causal=False), {}, "not causal"),
        (module(), {"is_causal": False}, "not causal"),
        (module(config=SimpleNamespace(sliding_window=8)), {}, "a window or chunks made by a mask"),
        (module(config=SimpleNamespace(attention_chunk_size=8)), {}, "a window or chunks made by a mask"),
    ],
)
def test_refusals(layer: nn.Module, options: dict[str, Any], message: str) -> None:
    query, key, value = inputs(length=4)
    options = {"attention_mask": None} | options
    with pytest.raises(ValueError, match=rf"torch_varlen does not compute .*{message}.*Module.*sdpa or eager"):
        torch_varlen_attention(layer, query, key, value, **options)


def test_keys_of_another_length_are_refused() -> None:
    query, key, value = inputs(length=4)
    with pytest.raises(ValueError, match="keys of another length than queries"):
        torch_varlen_attention(module(), query[:, :, -1:], key, value, None)


def test_a_layer_that_says_it_has_no_window_is_believed() -> None:
    layer = module(config=SimpleNamespace(sliding_window=2))
    query, key, value = inputs(length=6)
    output, _ = torch_varlen_attention(layer, query, key, value, None, sliding_window=None)
    torch.testing.assert_close(output[0], reference(query, key, value, [6]), rtol=0, atol=1e-13)


# -- whole models -----------------------------------------------------------------------------------------------------

WINDOWED = {"mistral", "gemma2", "gpt_oss"}
MODELS = ["llama", "qwen3", *sorted(WINDOWED), "gpt2", "gpt_neox", "phi3", "olmo2", "deepseek_v3"]
WINDOW = 8


def model(model_type: str, attn_implementation: str | None = None, **changes: Any) -> PreTrainedModel:
    register_torch_varlen()
    config = tiny_config(model_type)
    changes = ({"sliding_window": WINDOW} if model_type in WINDOWED else {}) | changes
    for name, value in changes.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=torch.float32
        ).eval()


def documents_and_batch() -> tuple[list[np.ndarray], dict[str, Any]]:
    """Five documents in two rows of 64 tokens, both with padding behind, and the batch without its labels."""
    generator = np.random.default_rng(0)
    rows = [[generator.integers(8, 200, size=n) for n in lengths] for lengths in ([1, 23, 30], [40, 11])]
    blocks = [
        {
            "input_ids": np.concatenate([*row, np.zeros(64 - sum(map(len, row)), dtype=np.int64)]),
            "piece_lengths": np.array([len(document) for document in row]),
        }
        for row in rows
    ]
    batch = PackedCollator("varlen")(blocks)
    del batch["labels"]
    return [document for row in rows for document in row], batch


def apart(packed: Tensor) -> list[Tensor]:
    """[1, 128, V] -> the logits of each document."""
    starts_and_lengths = [(0, 1), (1, 23), (24, 30), (64, 40), (104, 11)]
    return [packed[0, start : start + length] for start, length in starts_and_lengths]


@torch.no_grad()
def difference(model_type: str, *, leave_out: str = "") -> float:
    """Largest difference between packed logits and those of each document alone, over their standard deviation."""
    documents, batch = documents_and_batch()
    batch = {name: value for name, value in batch.items() if not leave_out or not name.startswith(leave_out)}
    stock, ours = model(model_type), model(model_type, TORCH_VARLEN)
    assert stock.config._attn_implementation in ("sdpa", "eager")
    assert ours.config._attn_implementation == TORCH_VARLEN
    alone = [stock(torch.from_numpy(document)[None], use_cache=False).logits[0] for document in documents]
    packed = apart(ours(**batch, use_cache=False).logits)
    largest = max(float((a - b).abs().max()) for a, b in zip(alone, packed, strict=True))
    return largest / float(torch.cat(alone).std())


@pytest.mark.parametrize("model_type", MODELS)
def test_packed_documents_have_the_logits_that_they_have_alone(model_type: str) -> None:
    assert difference(model_type) < 1e-5


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
def test_they_do_not_without_boundaries(model_type: str) -> None:
    assert difference(model_type, leave_out="cu_seq_lens") > 1e-2


@pytest.mark.parametrize("model_type", sorted(WINDOWED))
@torch.no_grad()
def test_the_window_matters_in_documents_of_this_length(model_type: str) -> None:
    """So that the comparison of logits is one of windows too."""
    _, batch = documents_and_batch()
    with_window = model(model_type, TORCH_VARLEN)(**batch, use_cache=False).logits
    without = model(model_type, TORCH_VARLEN, sliding_window=64)(**batch, use_cache=False).logits
    assert (with_window - without).abs().max() > 1e-2 * with_window.std()


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("llama4_text", {"attention_chunk_size": 8}), ("phimoe", {"sliding_window": 8})],
)
def test_models_whose_window_is_in_the_mask_alone_are_refused(model_type: str, changes: dict[str, Any]) -> None:
    """They do not pass it on to the attention, so without a mask each token would see its whole document."""
    with pytest.raises(ValueError, match="a window or chunks made by a mask"):
        model(model_type, TORCH_VARLEN, **changes)(torch.arange(20)[None], use_cache=False)


def test_an_attention_mask_is_refused_before_attention() -> None:
    _, batch = documents_and_batch()
    with pytest.raises(ValueError, match=r"torch_varlen takes no attention_mask; .* cu_seq_lens_q"):
        model("llama", TORCH_VARLEN)(**batch, attention_mask=torch.ones(1, 128, dtype=torch.int64), use_cache=False)


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
@torch.no_grad()
def test_attention_of_a_built_model_can_be_set_and_set_back(model_type: str) -> None:
    documents, batch = documents_and_batch()
    built = model(model_type)
    own = built.config._attn_implementation
    before = built(torch.from_numpy(documents[3])[None], use_cache=False).logits
    built.set_attn_implementation(TORCH_VARLEN)
    packed = apart(built(**batch, use_cache=False).logits)[3]
    torch.testing.assert_close(packed, before[0], rtol=0, atol=1e-5 * float(before.std()))
    built.set_attn_implementation(own)
    assert built.config._attn_implementation == own
    assert torch.equal(built(torch.from_numpy(documents[3])[None], use_cache=False).logits, before)


def test_gradients_of_a_model_are_those_of_its_documents_alone() -> None:
    documents, batch = documents_and_batch()
    stock, ours = model("qwen3"), model("qwen3", TORCH_VARLEN)
    for document in documents:
        stock(torch.from_numpy(document)[None], use_cache=False).logits.square().sum().backward()
    sum(logits.square().sum() for logits in apart(ours(**batch, use_cache=False).logits)).backward()
    for (name, found), wanted in zip(ours.named_parameters(), stock.parameters(), strict=True):
        error = (found.grad - wanted.grad).abs().max() / wanted.grad.abs().max()
        assert error < 1e-4, name


def test_the_benchmark_for_gpus_works_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert [sum(row) for row in document_rows(64, 192)] == [64, 64, 64]
    assert attention_errors(SMALL, torch.device("cpu"))
    assert loss_errors(SMALL, torch.device("cpu"))
    table = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "torch_varlen" in line]
    assert all(1e-4 < float(number.strip(" |")) < 1e-2 for row in table for number in row[2:]), "bfloat16, not float32"
    assert len(table) == 2
