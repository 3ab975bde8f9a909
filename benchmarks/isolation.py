"""Real tokens per second of padded, packed and isolated rows: one Llama, the same documents, forward and backward.

    python benchmarks/isolation.py             # under four minutes on two cores
    python benchmarks/isolation.py --smoke     # seconds; its ratios mean nothing
    python benchmarks/isolation.py --sequence_length 256 --mean_fraction 1.5 --rows 48 --rows_at_once 4

The lengths of documents are log-normal with a mean of 20 % of a row and none longer than a row; together they fill
whole rows. Contenders take turns in one process, each over all documents, and all have the same fused loss:

    padded              a document per row, padded to the full length: what fine-tuning code without packing does
    single              a document per row, sorted by length, cut to the longest of the micro-batch (`pack_single`)
    packed              rows full of documents (`pack_concat`), each of which sees those before it: not isolated
    isolated, mask      position_ids restart, of which transformers makes a dense block-diagonal mask for sdpa
    isolated, varlen    boundaries between documents, and attention "torch_varlen"
    isolated, flex      position_ids and flex_attention; CUDA only (--flex), as it has no backward on a CPU

Real tokens are those of documents, padding excluded. Ratios are medians over rounds; where other programs want the same
cores, set OMP_NUM_THREADS=1. The loss is the mean over all targets; packed rows have a few less, because documents are
cut where a row ends. Documents are isolated if the loss of packed rows is that of the same documents one by one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hfpretrain.attention import TORCH_VARLEN, register_torch_varlen
from hfpretrain.data.collator import Mechanism, PackedBlocks, PackedCollator
from hfpretrain.data.packing import PackedIndex, pack_concat, pack_single
from hfpretrain.loss import count_targets, fuse_loss
from machine import describe_machine
from memory_tokens import MemoryTokens

OVER_PADDED, OVER_PACKED = 4.8, 1.0  # goals for VARLEN in real tokens per second
SAME_LOSS = 1e-5
PADDED, SINGLE, PACKED, MASK, VARLEN = "padded", "single", "packed", "isolated, mask", "isolated, varlen"

Batch = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """Its micro-batches are made beforehand and lie on the device."""

    name: str
    attention: str
    batches: list[Batch]

    @property
    def positions(self) -> int:
        """Tokens and padding that the model computes."""
        return sum(batch["input_ids"].numel() for batch in self.batches)


def main() -> None:
    options = _options()
    about = describe_machine(("torch", "transformers"))
    print(*(f"{key}: {value}" for key, value in about.items()), f"threads: {torch.get_num_threads()}", sep=", ")
    lengths = _lengths(options)
    tokens = np.random.default_rng(options.seed).integers(2, options.vocab_size, int(lengths.sum()))
    contenders = _contenders(lengths, tokens, options)
    model = _model(options)
    print(f"Llama: width {options.hidden_size}, {options.layers} layers, vocabulary {options.vocab_size}", end=", ")
    print(f"{options.dtype}, {options.device}; {options.rounds} rounds")
    print(
        f"{len(lengths)} documents, mean {lengths.mean():.0f}, longest {lengths.max()}; {len(tokens):,} tokens", end=""
    )
    print(f" = {options.rows} rows of {options.sequence_length}, {options.rows_at_once} at once\n")
    losses = {contender.name: _run(model, contender) for contender in contenders}  # an untimed round
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(options.rounds):
        for contender in contenders:
            start = time.perf_counter()
            _run(model, contender)
            seconds[contender.name].append(time.perf_counter() - start)
    _report(contenders, seconds, losses, len(tokens))
    pieces = pack_concat(lengths, options.sequence_length).piece_lengths
    alone = Contender("", "sdpa", _batches(pack_single(pieces, options.sequence_length), tokens, "single", 1, options))
    with torch.no_grad():
        _check(losses, _run(model, alone))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one untimed")
    parser.add_argument("--sequence_length", type=int, default=2048, help="tokens per row")
    parser.add_argument("--rows", type=int, default=4, help="packed rows, which all documents together fill")
    parser.add_argument("--rows_at_once", type=int, default=2, help="packed rows of one micro-batch")
    parser.add_argument("--mean_fraction", type=float, default=0.2, help="mean length of a document, in rows")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the lengths' logarithm")
    parser.add_argument("--hidden_size", type=int, default=256, help="width of the Llama; heads are 64 wide")
    parser.add_argument("--layers", type=int, default=4, help="layers of the Llama")
    parser.add_argument("--vocab_size", type=int, default=2048, help="entries of the vocabulary")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0, help="of the order of lengths, of tokens and weights")
    parser.add_argument("--flex", action="store_true", help="flex_attention too (CUDA only), which compiles first")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and short rows, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.sequence_length, options.hidden_size, options.layers = 1, 128, 64, 2
    if options.rows % options.rows_at_once:
        parser.error(f"--rows {options.rows} is no multiple of --rows_at_once {options.rows_at_once}")
    if options.flex and options.device == "cpu":
        parser.error("--flex needs --device cuda: flex_attention has no backward on a CPU")
    return options


# -- rows -------------------------------------------------------------------------------------------------------------


def _lengths(options: argparse.Namespace) -> np.ndarray:
    """Quantiles of a log-normal distribution in random order, scaled so that together they fill all rows exactly.

    Quantiles, not draws: twenty draws may look like anything. None is longer than a row, unless the mean is a row or
    more (their pieces are the documents then).
    """
    total, longest = options.rows * options.sequence_length, options.sequence_length
    if options.mean_fraction >= 1:
        longest = total
    number = max(1, round(options.rows / options.mean_fraction))
    normal = statistics.NormalDist(0.0, options.sigma)
    shape = np.exp([normal.inv_cdf((i + 0.5) / number) for i in range(number)])
    scale = 0.0
    for _ in range(1000):  # what is capped makes the others longer
        scale += (total - np.minimum(scale * shape, longest).sum()) / shape.sum()
    ends = np.cumsum(np.minimum(scale * shape, longest)).round().astype(np.int64)
    return np.random.default_rng(options.seed).permutation(np.diff(ends, prepend=0))


def _contenders(lengths: np.ndarray, tokens: np.ndarray, options: argparse.Namespace) -> list[Contender]:
    single, packed = (pack(lengths, options.sequence_length) for pack in (pack_single, pack_concat))
    at_once = options.rows_at_once
    documents_at_once = -(-single.num_blocks * at_once // options.rows)  # as many as stand in `at_once` packed rows
    contenders = [
        Contender(PADDED, "sdpa", _batches(single, tokens, None, documents_at_once, options)),
        Contender(SINGLE, "sdpa", _batches(single, tokens, "single", documents_at_once, options)),
        Contender(PACKED, "sdpa", _batches(packed, tokens, None, at_once, options)),
        Contender(MASK, "sdpa", _batches(packed, tokens, "position_ids", at_once, options)),
        Contender(VARLEN, TORCH_VARLEN, _batches(packed, tokens, "varlen", at_once, options)),
    ]
    if options.flex:
        batches = _batches(packed, tokens, "position_ids", at_once, options)
        contenders.append(Contender("isolated, flex", "flex_attention", batches))
    return contenders


def _batches(
    index: PackedIndex, tokens: np.ndarray, mechanism: Mechanism | None, at_once: int, options: argparse.Namespace
) -> list[Batch]:
    documents: Any = SimpleNamespace(tokens=MemoryTokens(tokens), end_id=1)
    blocks = PackedBlocks(documents, index)
    order = np.argsort(index.piece_lengths) if mechanism == "single" else np.arange(len(blocks))
    collate = PackedCollator(mechanism)
    batches = [collate([blocks[int(i)] for i in order[k : k + at_once]]) for k in range(0, len(order), at_once)]
    return [
        {key: value.to(options.device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        for batch in batches
    ]


# -- model ------------------------------------------------------------------------------------------------------------


def _model(options: argparse.Namespace) -> Any:
    register_torch_varlen()
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=8 * options.hidden_size // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden_size // 64,
        max_position_embeddings=options.sequence_length,
        initializer_range=0.1,  # large, so that a document seen by another one shows in the loss
        use_cache=False,  # with a cache transformers makes no mask of position_ids
    )
    model = LlamaForCausalLM(config).to(options.device, getattr(torch, options.dtype))
    fuse_loss(model, z_loss_weight=0.0)
    return model


def _run(model: Any, contender: Contender) -> float:
    """Forward and backward of all micro-batches; the mean loss over all targets. Waits for a GPU."""
    model.set_attn_implementation(contender.attention)
    model.zero_grad()
    losses = []
    for batch in contender.batches:
        count = count_targets(batch["labels"])
        loss = model(**batch, num_items_in_batch=count).loss
        if loss.requires_grad:
            loss.backward()
        losses.append((loss.detach(), count))
    return sum(float(loss) * int(count) for loss, count in losses) / sum(int(count) for _, count in losses)


# -- report -----------------------------------------------------------------------------------------------------------


def _report(
    contenders: list[Contender], seconds: dict[str, list[float]], losses: dict[str, float], real_tokens: int
) -> None:
    print("| contender | positions / real tokens | seconds | real tokens/s | x padded | x packed | loss |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for contender in contenders:
        taken = statistics.median(seconds[contender.name])
        speed = f"{contender.positions / real_tokens:.2f} | {taken:.2f} | {real_tokens / taken:,.0f}"
        ratios = " | ".join(f"{_times_faster(seconds, contender.name, other):.2f}" for other in (PADDED, PACKED))
        print(f"| {contender.name} | {speed} | {ratios} | {losses[contender.name]:.6f} |")
    print()
    for other, goal in ((PADDED, OVER_PADDED), (PACKED, OVER_PACKED)):
        ratio = _times_faster(seconds, VARLEN, other)
        print(f"{VARLEN}: {ratio:.2f} x {other}, goal {goal}: {'reached' if ratio >= goal else 'MISSED'}")


def _times_faster(seconds: dict[str, list[float]], name: str, other: str) -> float:
    """Median over rounds, whose own pace drops out."""
    return statistics.median(theirs / ours for ours, theirs in zip(seconds[name], seconds[other], strict=True))


def _check(losses: dict[str, float], alone: float) -> None:
    print(f"loss of the documents (pieces, where cut by a row's end) one by one: {alone:.6f}; apart from it are")
    for name in (MASK, VARLEN):
        apart = abs(losses[name] - alone)
        print(f"    {name}: {apart:.1e}, {'the same' if apart <= SAME_LOSS else 'NOT THE SAME'}")
    print(f"    {PACKED}: {abs(losses[PACKED] - alone):.1e}, which is what isolation changes")


if __name__ == "__main__":
    main()
