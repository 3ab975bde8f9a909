"""The loss of a large vocabulary from hidden states to gradients: time, peak memory and correctness, side by side.

    python benchmarks/loss.py                                      # three quarters of an hour on two cores
    python benchmarks/loss.py --vocabulary 8192 --tokens 256       # a minute; its times mean little

Every contender gets hidden states, the head's weight and unshifted Hugging Face labels, and returns a loss divided by
the number of targets, of which the gradients of hidden states and weight are taken. Seconds are medians over rounds in
which the contenders take turns in one process, after one untimed round.

Peak memory is what one forward and backward adds at most to what the inputs occupy, gradients included; each contender
is measured in a fresh process. On a CPU it is the growth of the resident set up to its high-water mark (Linux only), on
a GPU that of the allocated memory.

Beside the loss stands its float64 value for the same inputs. A gradient's error is the largest over its rows (tokens,
entries of the vocabulary) of |found - float64| / |float64|; a gradient where none should be gives inf.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F

from hfpretrain.loss import IGNORE_INDEX, head_sums, shift_labels
from machine import describe_machine

Z_LOSS_WEIGHT = 1e-4
IGNORED_FRACTION = 0.02
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Inputs:
    """What a contender may use."""

    hidden: torch.Tensor  # [N, D]
    weight: torch.Tensor  # [V, D]
    labels: torch.Tensor  # [1, N], unshifted
    targets: torch.Tensor  # [N], shifted
    num_targets: torch.Tensor  # 0-d


@dataclass(frozen=True)
class Contender:
    name: str
    loss: Callable[[Inputs], torch.Tensor]
    z_loss_weight: float = 0.0


def stock(inputs: Inputs, *, z_loss_weight: float) -> torch.Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits_1NV = F.linear(inputs.hidden, inputs.weight)[None]
    vocabulary = logits_1NV.shape[-1]
    loss = ForCausalLMLoss(logits_1NV, inputs.labels, vocabulary, num_items_in_batch=inputs.num_targets)
    if z_loss_weight:
        z_squares_N = torch.logsumexp(logits_1NV[0].float(), -1) ** 2
        loss = loss + z_loss_weight * z_squares_N[inputs.targets != IGNORE_INDEX].sum() / inputs.num_targets
    return loss


def torch_chunked(inputs: Inputs, *, rows: int | None) -> torch.Tensor:
    chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)  # None: its own choice, few rows
    leaves = inputs.hidden, inputs.weight
    return F.linear_cross_entropy(*leaves, inputs.targets, reduction="sum", options=chunks) / inputs.num_targets


def trl_chunked(inputs: Inputs) -> torch.Tensor:
    """What a model does after `trl.trainer.utils.add_fused_lm_head`, as in `SFTTrainer`, without its metrics."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    hidden_ND, targets_N = inputs.hidden, inputs.targets
    is_target = targets_N != IGNORE_INDEX
    if hidden_ND.device.type == "cuda":
        hidden_ND, targets_N, is_target = hidden_ND[is_target], targets_N[is_target], is_target[is_target]
    arguments = (1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs",))
    log_probs_N = ChunkedLogProbFunction.apply(hidden_ND, inputs.weight, None, targets_N.clamp(min=0), *arguments)[0]
    loss: torch.Tensor = -log_probs_N.masked_fill(~is_target, 0).sum() / inputs.num_targets
    return loss


def ours(inputs: Inputs, *, z_loss_weight: float) -> torch.Tensor:
    sums = head_sums(inputs.hidden, inputs.weight, inputs.targets, z_loss_weight=z_loss_weight)
    return sums.total / inputs.num_targets


CONTENDERS = {
    "hf": Contender("HF ForCausalLMLoss", partial(stock, z_loss_weight=0.0)),
    "hf_z": Contender("HF + naive z-loss", partial(stock, z_loss_weight=Z_LOSS_WEIGHT), Z_LOSS_WEIGHT),
    "torch": Contender("torch linear_cross_entropy", partial(torch_chunked, rows=None)),
    "torch_256": Contender("torch linear_cross_entropy, 256 rows", partial(torch_chunked, rows=256)),
    "trl": Contender("TRL chunked", trl_chunked),
    "ours": Contender("hfpretrain, CE only", partial(ours, z_loss_weight=0.0)),
    "ours_z": Contender("hfpretrain, CE + z-loss", partial(ours, z_loss_weight=Z_LOSS_WEIGHT), Z_LOSS_WEIGHT),
}
if find_spec("trl") is None:  # an extra
    del CONTENDERS["trl"]


def make_inputs(options: argparse.Namespace, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden_size, generator=generator)
    weight = torch.randn(options.vocabulary, options.hidden_size, generator=generator).mul_(0.02)
    labels = torch.randint(0, options.vocabulary, (1, options.tokens), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < IGNORED_FRACTION] = IGNORE_INDEX
    labels = labels.to(options.device)
    targets = shift_labels(labels).flatten()
    return Inputs(
        hidden.to(options.device, dtype).requires_grad_(),
        weight.to(options.device, dtype).requires_grad_(),
        labels,
        targets,
        (targets != IGNORE_INDEX).sum(),
    )


def run(contender: Contender, inputs: Inputs) -> float:
    """One forward and backward; leaves the gradients in the inputs and returns the loss, waiting for a GPU."""
    inputs.hidden.grad = inputs.weight.grad = None
    loss = contender.loss(inputs)
    loss.backward()
    return float(loss.detach())


# -- peak memory ------------------------------------------------------------------------------------------------------


def peak_bytes(contender: Contender, options: argparse.Namespace, dtype: torch.dtype) -> int:
    """Largest growth of memory during one forward and backward; a small one before keeps first-call costs out."""
    small = argparse.Namespace(**vars(options) | {"tokens": 64, "vocabulary": 1024})
    run(contender, make_inputs(small, dtype))
    inputs = make_inputs(options, dtype)
    gc.collect()
    if inputs.hidden.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(contender, inputs)
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the current size
    before = resident_bytes("VmRSS")
    run(contender, inputs)
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def peak_bytes_of_fresh_process(key: str, dtype_name: str, options: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "--measure", "--contenders", key, "--dtypes", dtype_name]
    for name in ("vocabulary", "hidden_size", "tokens", "device"):
        command += [f"--{name}", str(getattr(options, name))]
    returns_freed_memory = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=os.environ | returns_freed_memory, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.split()[-1])


# -- correctness ------------------------------------------------------------------------------------------------------


def exact(inputs: Inputs, z_loss_weight: float) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Loss and gradients in float64, at most a quarter GB of logits at a time."""
    hidden, weight = (leaf.detach().double().requires_grad_() for leaf in (inputs.hidden, inputs.weight))
    rows = max(1, 2**25 // len(weight))
    total = 0.0
    for first in range(0, len(hidden), rows):
        targets = inputs.targets[first : first + rows]
        logits = F.linear(hidden[first : first + rows], weight)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        if z_loss_weight:
            loss = loss + z_loss_weight * (logits.logsumexp(-1)[targets != IGNORE_INDEX] ** 2).sum()
        loss = loss / inputs.num_targets
        loss.backward()
        total += float(loss.detach())
    assert hidden.grad is not None
    assert weight.grad is not None
    return total, hidden.grad, weight.grad


def largest_row_error(leaf: torch.Tensor, exact_gradient: torch.Tensor) -> float:
    assert leaf.grad is not None
    apart = (leaf.grad.double() - exact_gradient).norm(dim=1)
    return float(torch.where(apart == 0, 0.0, apart / exact_gradient.norm(dim=1)).max())


# -- one table --------------------------------------------------------------------------------------------------------


def compare(chosen: dict[str, Contender], dtype_name: str, options: argparse.Namespace) -> None:
    peaks = {key: peak_bytes_of_fresh_process(key, dtype_name, options) for key in chosen}
    inputs = make_inputs(options, DTYPES[dtype_name])
    checks: dict[str, str] = {}
    for z_loss_weight in sorted({contender.z_loss_weight for contender in chosen.values()}):
        exact_loss, *exact_gradients = exact(inputs, z_loss_weight)
        for key, contender in chosen.items():
            if contender.z_loss_weight == z_loss_weight:
                loss = run(contender, inputs)
                errors = map(largest_row_error, (inputs.hidden, inputs.weight), exact_gradients)
                checks[key] = f"{loss:.5f} ({exact_loss:.5f}) | {', '.join(f'{error:.1e}' for error in errors)}"
        del exact_gradients
    times: dict[str, list[float]] = {key: [] for key in chosen}
    for _ in range(options.rounds):
        for key, contender in chosen.items():
            start = time.perf_counter()
            run(contender, inputs)
            times[key].append(time.perf_counter() - start)
    seconds = {key: statistics.median(values) for key, values in times.items()}
    print(f"\n{dtype_name}, {int(inputs.num_targets):,} targets\n")
    print("| contender | seconds | x HF | peak GiB | x HF | loss (float64) | grad error (hidden, weight) |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for key, contender in chosen.items():
        taken = f"{seconds[key]:.3f} | {ratio(seconds, key)} | {peaks[key] / 2**30:.3f} | {ratio(peaks, key)}"
        print(f"| {contender.name} | {taken} | {checks[key]} |", flush=True)


def ratio(values: Mapping[str, float], key: str) -> str:
    return f"{values[key] / values['hf']:.2f}" if "hf" in values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # one peak, in a fresh process
    options = parser.parse_args()
    chosen = {key: contender for key, contender in CONTENDERS.items() if key in options.contenders}
    if options.measure:
        print(peak_bytes(chosen[options.contenders[0]], options, DTYPES[options.dtypes[0]]))
        return
    about = describe_machine(("torch", "transformers", "trl"))
    print(*(f"{key}: {value}" for key, value in about.items()), f"threads: {torch.get_num_threads()}", sep=", ")
    sizes = f"{options.tokens:,} tokens, d = {options.hidden_size:,}, V = {options.vocabulary:,}"
    print(f"{sizes}, device: {options.device}, {options.rounds} rounds")
    for dtype_name in options.dtypes:
        compare(chosen, dtype_name, options)


if __name__ == "__main__":
    main()
