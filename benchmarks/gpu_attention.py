"""What runs on CUDA only: attention inside packed documents, and the loss at the head; exactness and speed.

    bash benchmarks/gpu_attention.sh                              # one GPU, a few minutes; tests of the kernel as well
    python benchmarks/gpu_attention.py --device cpu --small       # seconds: only whether this script works

Documents have log-normal lengths with a mean of 20 % of a row before they fill the rows one behind another and are cut
at row ends.
Errors are the largest absolute difference to attention written out per document in float32, over the largest absolute
value of that; times are medians over rounds of one forward and backward in bfloat16, after three untimed ones. The exit
status is 1 if `torch_varlen` or a loss is less exact than bfloat16 explains.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hfpretrain.attention import torch_varlen_attention
from hfpretrain.data.collator import PackedCollator
from hfpretrain.loss import head_sums
from hfpretrain.loss.liger import liger_sums
from loss import DTYPES, Contender, Inputs, exact, largest_row_error, make_inputs, run
from machine import describe_machine

MEAN_DOCUMENT, SPREAD = 0.2, 1.0  # of a row; standard deviation of the lengths' logarithm
UNTIMED = 3
WORST = 0.02  # of the reference's largest value; bfloat16 keeps 8 bits: its own rounding is 0.004
BESIDE_SDPA = 3.0  # or as many times sdpa's own error


@dataclass(frozen=True)
class Sizes:
    """Rows are `lengths` tokens long, `batch_tokens` of them together; `exact_*` are those of the exactness tables."""

    lengths: tuple[int, ...] = (4096, 8192)
    batch_tokens: int = 16_384
    heads: int = 32
    key_heads: int = 8
    width: int = 128
    exact_length: int = 2048
    exact_tokens: int = 4096
    window: int = 256
    loss: tuple[int, int, int] = (8192, 4096, 128_256)  # tokens, hidden size, vocabulary
    exact_loss: tuple[int, int, int] = (1024, 512, 8192)
    rounds: int = 10


SMALL = Sizes((64, 128), 256, 4, 2, 16, 64, 128, 8, (64, 32, 512), (64, 32, 512), 2)


# -- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """Query [B, L, H, D], key and value [B, L, K, D] as projections make them, and where documents end."""

    tensors: tuple[Tensor, Tensor, Tensor]
    bounds: Tensor  # int32 [documents + 1] over the rows laid behind one another
    longest: int
    mask: Tensor  # bool [B, 1, L, L]
    window: int | None
    layer: nn.Module

    @property
    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (tensor.flatten(0, 1) for tensor in self.tensors)
        return query, key, value


def document_rows(length: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Lengths of the pieces in each of tokens / length full rows."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(tokens // length):
        pieces, left = [], length
        while left:
            mean_log = np.log(MEAN_DOCUMENT * length) - SPREAD**2 / 2
            pieces.append(min(left, max(1, round(generator.lognormal(mean_log, SPREAD)))))
            left -= pieces[-1]
        rows.append(pieces)
    return rows


def make_packed(sizes: Sizes, length: int, tokens: int, device: torch.device, window: int | None = None) -> Packed:
    blocks = [
        {"input_ids": np.zeros(length, dtype=np.int64), "piece_lengths": np.array(pieces)}
        for pieces in document_rows(length, tokens)
    ]
    boundaries = PackedCollator("varlen")(blocks)
    mask = PackedCollator("mask", windows=window)(blocks)["attention_mask"]
    generator = torch.Generator().manual_seed(0)
    heads = (sizes.heads, sizes.key_heads, sizes.key_heads)
    tensors = (torch.randn(len(blocks), length, h, sizes.width, generator=generator) for h in heads)
    query, key, value = (tensor.to(device, torch.bfloat16).requires_grad_() for tensor in tensors)
    layer = nn.Module()
    layer.is_causal, layer.num_key_value_groups = True, sizes.heads // sizes.key_heads  # type: ignore[assignment]
    bounds = boundaries["cu_seq_lens_q"].to(device)
    return Packed((query, key, value), bounds, boundaries["max_length_q"], mask.to(device), window, layer)


def torch_varlen(packed: Packed) -> Tensor:
    query, key, value = (tensor[None].transpose(1, 2) for tensor in packed.flat)
    output, _ = torch_varlen_attention(
        packed.layer,
        query,
        key,
        value,
        None,
        sliding_window=packed.window,
        cu_seq_lens_q=packed.bounds,
        max_length_q=packed.longest,
    )
    return output.flatten(0, 1)


def sdpa(packed: Packed, *, isolated: bool) -> Tensor:
    """As transformers calls it; not isolated: a causal row, in which documents see those before them."""
    query, key, value = (tensor.transpose(1, 2) for tensor in packed.tensors)
    mask = packed.mask if isolated else None
    output: Tensor = sdpa_attention_forward(packed.layer, query, key, value, mask)[0]
    return output.flatten(0, 1)


def flash_attn(packed: Packed) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    window = (-1 if packed.window is None else packed.window - 1, 0)
    bounds, longest = (packed.bounds, packed.bounds), (packed.longest, packed.longest)
    output: Tensor = flash_attn_varlen_func(*packed.flat, *bounds, *longest, causal=True, window_size=window)
    return output


def by_hand(packed: Packed) -> Tensor:
    """[B * L, H, D] in float32, a document at a time."""
    query, key, value = (tensor.float().transpose(0, 1) for tensor in packed.flat)
    group = len(query) // len(key)
    key, value = (tensor.repeat_interleave(group, dim=0) for tensor in (key, value))
    outputs = []
    for start, end in pairwise(packed.bounds.tolist()):
        scores = query[:, start:end] @ key[:, start:end].transpose(1, 2) * query.shape[-1] ** -0.5
        positions = torch.arange(end - start, device=scores.device)
        distance = positions[:, None] - positions[None, :]
        hidden = (distance < 0) | (distance >= (packed.window or end - start))
        outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value[:, start:end])
    return torch.cat(outputs, dim=1).transpose(0, 1)


MASKED, CAUSAL = "sdpa, block-diagonal mask", "sdpa, causal rows, NOT isolated"
ATTENTIONS: dict[str, Callable[[Packed], Tensor]] = {
    "torch_varlen": torch_varlen,
    MASKED: partial(sdpa, isolated=True),
    CAUSAL: partial(sdpa, isolated=False),
}


def attentions(device: torch.device) -> dict[str, Callable[[Packed], Tensor]]:
    installed = device.type == "cuda" and find_spec("flash_attn") is not None
    return ATTENTIONS | ({"flash_attn_varlen_func": flash_attn} if installed else {})


def with_gradients(attention: Callable[[Packed], Tensor], packed: Packed, upstream: Tensor) -> list[Tensor]:
    """Output, and the gradients of query, key and value."""
    output = attention(packed)
    return [output.detach(), *torch.autograd.grad(output, packed.tensors, upstream.to(output.dtype))]


def upstream_of(packed: Packed) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    query = packed.tensors[0].flatten(0, 1)
    return torch.randn(query.shape, generator=generator).to(query)


def attention_errors(sizes: Sizes, device: torch.device) -> bool:
    """Prints the table; whether torch_varlen is as exact as it should be."""
    print(f"\nError in bfloat16 of attention in rows of {sizes.exact_length:,} tokens, over the largest value\n")
    print("| window | attention | output | d query | d key | d value |")
    print("|---:|---|---:|---:|---:|---:|")
    good = True
    for window in (None, sizes.window):
        packed = make_packed(sizes, sizes.exact_length, sizes.exact_tokens, device, window)
        upstream = upstream_of(packed)
        expected = with_gradients(by_hand, packed, upstream)
        errors: dict[str, list[float]] = {}
        for name, attention in attentions(device).items():
            if name == CAUSAL:
                continue
            found = with_gradients(attention, packed, upstream)
            errors[name] = [relative_error(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
            print(f"| {window or 'none'} | {name} | {' | '.join(f'{error:.1e}' for error in errors[name])} |")
        allowed = [max(WORST, BESIDE_SDPA * error) for error in errors[MASKED]]
        good &= all(error <= most for error, most in zip(errors["torch_varlen"], allowed, strict=True))
    return good


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def attention_times(sizes: Sizes, device: torch.device) -> None:
    shape = f"{sizes.heads} query heads, {sizes.key_heads} key-value heads, D = {sizes.width}"
    print(f"\nForward and backward of {sizes.batch_tokens:,} tokens, {shape}\n")
    print(f"| row length | documents | longest | attention | ms | x {MASKED} | peak MiB |")
    print("|---:|---:|---:|---|---:|---:|---:|")
    for length in sizes.lengths:
        packed = make_packed(sizes, length, sizes.batch_tokens, device)
        upstream = upstream_of(packed)
        steps = {
            name: partial(with_gradients, attention, packed, upstream) for name, attention in attentions(device).items()
        }
        about = f"{length:,} | {len(packed.bounds) - 1} | {packed.longest:,}"
        print_times(about, measured(steps, sizes.rounds, device), base=MASKED)


# -- loss -------------------------------------------------------------------------------------------------------------


def materialised(inputs: Inputs) -> Tensor:
    """All logits at once, in float32 as in transformers."""
    logits = F.linear(inputs.hidden, inputs.weight).float()
    return F.cross_entropy(logits, inputs.targets, reduction="sum") / inputs.num_targets


def sums_of(sums: Callable[..., Any], inputs: Inputs) -> Tensor:
    total: Tensor = sums(inputs.hidden, inputs.weight, inputs.targets).total
    return total / inputs.num_targets


CROSS_ENTROPY = "F.cross_entropy on all logits"


def losses(device: torch.device) -> dict[str, Contender]:
    found: dict[str, Callable[[Inputs], Tensor]] = {
        CROSS_ENTROPY: materialised,
        "head_sums": partial(sums_of, head_sums),
    }
    if device.type == "cuda" and find_spec("liger_kernel") is not None:
        found["liger_sums"] = partial(sums_of, liger_sums)
    return {name: Contender(name, loss) for name, loss in found.items()}


def loss_inputs(sizes: tuple[int, int, int], device: torch.device) -> Inputs:
    tokens, hidden_size, vocabulary = sizes
    options = argparse.Namespace(tokens=tokens, hidden_size=hidden_size, vocabulary=vocabulary, device=device)
    return make_inputs(options, DTYPES["bf16"])


def loss_errors(sizes: Sizes, device: torch.device) -> bool:
    """Prints the table; whether every loss of ours is as exact as it should be."""
    inputs = loss_inputs(sizes.exact_loss, device)
    expected, *gradients = exact(inputs, 0.0)
    print("\nLoss in bfloat16, {:,} tokens, d = {:,}, V = {:,}; errors over float64\n".format(*sizes.exact_loss))
    print("| loss | loss error | d hidden | d weight |")
    print("|---|---:|---:|---:|")
    good = True
    for name, contender in losses(device).items():
        errors = [abs(run(contender, inputs) / expected - 1.0)]
        errors += [largest_row_error(*pair) for pair in zip((inputs.hidden, inputs.weight), gradients, strict=True)]
        print(f"| {name} | {' | '.join(f'{error:.1e}' for error in errors)} |")
        good &= name == CROSS_ENTROPY or all(error <= WORST for error in errors)
    return good


def step_of_loss(contender: Contender, inputs: Inputs) -> None:
    run(contender, inputs)
    inputs.hidden.grad = inputs.weight.grad = None  # they would count as there before the next contender


def loss_times(sizes: Sizes, device: torch.device) -> None:
    inputs = loss_inputs(sizes.loss, device)
    print("\nForward and backward of the loss, bfloat16, {:,} tokens, d = {:,}, V = {:,}\n".format(*sizes.loss))
    print(f"| loss | ms | x {CROSS_ENTROPY} | peak MiB |")
    print("|---|---:|---:|---:|")
    steps = {name: partial(step_of_loss, contender, inputs) for name, contender in losses(device).items()}
    print_times("", measured(steps, sizes.rounds, device), base=CROSS_ENTROPY)


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Of one step; nan where it did not fit into memory. `bytes` is what it adds at most; 0 on a CPU: not measured."""

    milliseconds: float
    bytes: int


def measured(steps: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, Cost]:
    return {name: cost_of(step, rounds, device) for name, step in steps.items()}


def cost_of(step: Callable[[], object], rounds: int, device: torch.device) -> Cost:
    on_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_cuda else 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    try:
        for _ in range(UNTIMED + rounds):
            start = time.perf_counter()
            step()
            if on_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return Cost(float("nan"), 0)
    peak = torch.cuda.max_memory_allocated() - before if on_cuda else 0
    return Cost(1000.0 * statistics.median(seconds[UNTIMED:]), peak)


def print_times(about: str, costs: dict[str, Cost], *, base: str) -> None:
    for name, cost in costs.items():
        memory = f"{cost.bytes / 2**20:,.0f}" if cost.bytes else "-"
        ratio = f"{cost.milliseconds / costs[base].milliseconds:.2f}"
        first = f"| {about} | {name}" if about else f"| {name}"
        print(f"{first} | {cost.milliseconds:.2f} | {ratio} | {memory} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script (with --small)")
    parser.add_argument("--small", action="store_true", help="tiny sizes; the times mean nothing")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"No CUDA device here (torch {torch.__version__}), so there is nothing to measure; nothing was run.")
        return 0
    device, sizes = torch.device(options.device), SMALL if options.small else Sizes()
    about = describe_machine(("torch", "transformers", "flash-attn", "liger-kernel"))
    about["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(*(f"{key}: {value}" for key, value in about.items()), sep=", ")
    good = [attention_errors(sizes, device), loss_errors(sizes, device)]
    attention_times(sizes, device)
    loss_times(sizes, device)
    for what, is_good in zip(("torch_varlen", "the loss at the head"), good, strict=True):
        print(f"\n{what}: {'as exact as bfloat16 allows' if is_good else 'NOT EXACT, see the errors above'}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
