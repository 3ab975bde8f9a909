"""FLOP counts against an operation counter and published figures; device names as drivers report them."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from hfpretrain.planning.flops import (
    PEAK_FLOPS,
    flops_per_token,
    mean_attended,
    mean_attended_packed,
    peak_flops,
    token_cost,
)


def test_full_convention_equals_counted_operations():
    """torch's counter on a real forward and backward, attention not masked away (eager counts the whole square)."""
    length, rows = 32, 2
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(0, 64, (rows, length))
    with FlopCounterMode(display=False) as counter:
        model(tokens, use_cache=False).logits.sum().backward()
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name)
    ours = flops_per_token(matmul_parameters=matrices, num_layers=3, attention_width=32, mean_attended=length)
    # The counter sees rotary's own outer product (position x frequency) as a matmul: 2 * L * head_dim / 2 per row.
    rotary = 2 * length * 4
    assert counter.get_total_flops() == pytest.approx(ours * rows * length, abs=2 * rotary * rows)


def test_published_llama_1b_example():
    """Llama-3.2-1B at L = 4096: 6N 7.41 G, causal 8.22 G, full 9.03 G per token."""
    shape = {"matmul_parameters": 1_235_814_400, "num_layers": 16, "attention_width": 32 * 64}
    assert flops_per_token(**shape, mean_attended=0) / 1e9 == pytest.approx(7.41, abs=0.01)
    assert flops_per_token(**shape, mean_attended=2048) / 1e9 == pytest.approx(8.22, abs=0.01)
    assert flops_per_token(**shape, mean_attended=4096) / 1e9 == pytest.approx(9.03, abs=0.01)


def test_mean_attended_of_packed_documents():
    assert mean_attended_packed([1024]) == 512.0
    assert mean_attended_packed([512, 512]) == 256.0
    assert mean_attended_packed([3, 1]) == (9 + 1) / 2 / 4
    lengths = [5, 2, 9]
    exact = sum(position + 1 for n in lengths for position in range(n)) / sum(lengths)
    assert mean_attended_packed(lengths) == pytest.approx(exact - 0.5)
    for wrong in ([], [0, 0], [3, -1]):
        with pytest.raises(ValueError, match="pieces"):
            mean_attended_packed(wrong)


@pytest.mark.parametrize(
    ("length", "document", "window"), [(64, 23, None), (64, 23, 9), (64, 301, 20), (64, 301, None)]
)
def test_mean_attended_of_equal_documents(length: int, document: int, window: int | None) -> None:
    """The closed form against a stream of documents cut into rows; 64 and the prime lengths meet at every offset."""
    begins = document * np.arange(length)
    cuts = np.union1d(begins, length * np.arange(document))
    pieces = np.diff(np.append(cuts, length * document))
    limit = length if window is None else window
    seen = sum(min(n, limit) ** 2 / 2 + max(n - limit, 0) * limit for n in pieces)  # the integral of min(position, w)
    expected = mean_attended(length, document_tokens=document, window=window)
    assert seen / pieces.sum() == pytest.approx(expected, rel=2e-3)


def test_mean_attended_at_its_limits() -> None:
    assert mean_attended(4096) == 2048
    assert mean_attended(4096, document_tokens=1e12) == pytest.approx(2048)
    assert mean_attended(4096, document_tokens=512) == pytest.approx(256 - 512**2 / 6 / 4096)
    assert mean_attended(4096, window=1024) == 1024 - 1024**2 / 2 / 4096
    assert mean_attended(4096, window=8192) == 2048
    assert mean_attended(4096, document_tokens=512, window=1) == pytest.approx(1, abs=2e-3)
    assert mean_attended(4096, document_tokens=4096) == pytest.approx(4096 / 3)
    for wrong in ({"sequence_length": 0}, {"sequence_length": 8, "document_tokens": 0}):
        with pytest.raises(ValueError, match="must be above 0"):
            mean_attended(**wrong)


def test_cost_of_a_token() -> None:
    """Two windows: 4 * width * attended each; a head of 30 weights is not computed a second time."""
    cost = token_cost({"mlp": 50.0, "head": 30.0, "embedding": 0.0}, [(None, 8.0), (4, 2.0)], sequence_length=16)
    assert cost.matrices == {"mlp": 100.0, "head": 60.0}
    assert cost.attention == {None: 4 * 8 * 8, 4: 4 * 2 * (4 - 4**2 / 32)}
    assert cost.full_attention == 4 * 10 * 16
    assert cost.recomputed == cost.forward - 60


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA GH200 480GB", 989.5e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A1000", None),
        ("cpu", None),
    ],
)
def test_devices_by_name(name, expected):
    assert peak_flops(name) == expected


def test_every_entry_finds_itself():
    assert all(peak_flops(f"NVIDIA {name}") == peak for name, peak in PEAK_FLOPS.items())


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="negative"):
        flops_per_token(matmul_parameters=-1, num_layers=1, attention_width=1, mean_attended=1)
