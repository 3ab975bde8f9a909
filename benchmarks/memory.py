"""Predicted against measured peak memory of a training step, a case at a time in processes of its own.

    python benchmarks/memory.py                # all cases, about ten minutes on two cores
    python benchmarks/memory.py --only gpt2 moe
    python benchmarks/memory.py --markdown     # the table of docs/memory.md
    python benchmarks/memory.py --architectures    # of which architectures a pass can be followed; nothing is measured

Predicted: `hfpretrain.memory_estimate` before anything runs. Measured: what torch's allocator hands out during the
second optimizer step, see `memory_case.py`. On a machine with a GPU the cases run there (and `--ranks` of them are
needed); that has not been tried.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from hfpretrain.memory_estimate import estimate_memory
from hfpretrain.model import load_config
from hfpretrain.planning.memory import MemoryEstimate, Placement
from hfpretrain.small_models import NotBuildable, causal_model_types, tiny_config, tiny_model
from machine import describe_machine
from memory_case import Case

LIMIT = 0.15
WORKER = Path(__file__).with_name("memory_case.py")


def llama(**overrides: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    return {"model_type": "llama", "vocab_size": 4001, "config_overrides": sizes | overrides}


GPT2 = {"model_type": "gpt2", "vocab_size": 5003, "config_overrides": {"n_embd": 192, "n_layer": 3, "n_head": 6}}
MOE = {
    "model_type": "mixtral",
    "vocab_size": 2003,
    "config_overrides": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
}
GEMMA = {
    "model_type": "gemma2",
    "vocab_size": 8009,
    "config_overrides": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
}
MAMBA = {
    "model_type": "mamba",
    "vocab_size": 3001,
    "config_overrides": {"hidden_size": 128, "num_hidden_layers": 2, "state_size": 8},
}
WIDE = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 2}
DEEP = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 12, "tie_word_embeddings": True}
SMALL_BUCKET = {"reduce_bucket_size": 300_000}
ZERO3 = {**SMALL_BUCKET, "stage3_prefetch_bucket_size": 100_000, "stage3_param_persistence_threshold": 2_000}
HALF = "bfloat16"


@dataclass(frozen=True)
class Named:
    """A case, its name, and on how many ranks it runs."""

    name: str
    case: Case
    ranks: int = 1


CASES = [
    Named("llama", Case(llama(), rows=4, sequence_length=256)),
    Named("llama, logits", Case(llama(), rows=4, sequence_length=256, fused_loss=False)),
    Named("llama, checkpointing", Case(llama(), rows=4, sequence_length=256, gradient_checkpointing=True)),
    Named("llama, eager attention", Case(llama(), rows=2, sequence_length=256, attn_implementation="eager")),
    Named("llama, bf16 autocast", Case(llama(), rows=4, sequence_length=256, dtype=HALF)),
    Named("wide llama, short rows", Case(llama(**WIDE), rows=2, sequence_length=64, micro_batches=2)),
    Named("deep tied llama", Case(llama(**DEEP), rows=4, sequence_length=256)),
    Named("gpt2, dropout", Case(GPT2, rows=4, sequence_length=256)),
    Named("mixtral", Case(MOE, rows=4, sequence_length=256)),
    Named("gemma2, softcap", Case(GEMMA, rows=2, sequence_length=256)),
    Named("mamba", Case(MAMBA, rows=2, sequence_length=128)),
    Named("llama, DDP", Case(llama(), rows=2, sequence_length=256, micro_batches=2), 2),
    Named("llama, ZeRO 0", Case(llama(), rows=2, sequence_length=256, zero_stage=0), 2),
    Named("llama, ZeRO 0, bf16", Case(llama(), 2, 256, 2, 0, HALF), 2),
    Named("llama, ZeRO 1, bf16", Case(llama(), 2, 256, 2, 1, HALF, SMALL_BUCKET), 2),
    Named("llama, ZeRO 2", Case(llama(), 2, 256, 1, 2, zero=SMALL_BUCKET), 2),
    Named("llama, ZeRO 2, bf16", Case(llama(), 2, 256, 2, 2, HALF, SMALL_BUCKET), 2),
    Named("llama, ZeRO 2, default bucket", Case(llama(), 2, 256, 2, 2, HALF, {"overlap_comm": True}), 2),
    Named("llama, ZeRO 3", Case(llama(), 2, 256, 1, 3, zero=ZERO3), 2),
    Named("llama, ZeRO 3, bf16", Case(llama(), 2, 256, 2, 3, HALF, ZERO3), 2),
    Named("wide llama, ZeRO 3, bf16", Case(llama(**WIDE), 1, 64, 2, 3, HALF, ZERO3), 2),
    Named("mixtral, ZeRO 3", Case(MOE, 2, 256, 1, 3, zero=ZERO3), 2),
    Named("gpt2, ZeRO 2, bf16", Case(GPT2, 2, 256, 1, 2, HALF, SMALL_BUCKET), 2),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these words")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--architectures", action="store_true", help="estimate every architecture in its smallest form")
    options = parser.parse_args()
    if options.architectures:
        estimate_architectures()
        return
    print(describe_machine(["torch", "transformers", "deepspeed"]), flush=True)
    rows = [["case", "ranks", "parameters", "at rest, predicted", "measured", "peak, predicted", "measured", "ratio"]]
    ratios = []
    for named in CASES:
        if any(word in named.name for word in options.only):
            estimate, measured = predict(named.case, named.ranks), run(named.case, named.ranks)
            ratios.append(estimate.peak_bytes / measured["peak"])
            rows.append(
                [
                    named.name,
                    str(named.ranks),
                    f"{measured['parameters']:,}",
                    *(f"{n:,}" for n in (estimate.static_bytes, measured["rest"])),
                    *(f"{n:,}" for n in (estimate.peak_bytes, measured["peak"])),
                    f"{ratios[-1]:.3f}",
                ]
            )
            print(rows[-1], flush=True)
    print(table(rows, markdown=options.markdown))
    inside = sum(abs(ratio - 1.0) <= LIMIT for ratio in ratios)
    print(f"{inside} of {len(ratios)} within {LIMIT:.0%}; from {min(ratios):.3f} to {max(ratios):.3f}")


def estimate_architectures() -> None:
    """Print the architectures whose activations cannot be followed, why, and how many can."""
    logging.set_verbosity_error()
    placement, counts = Placement(world_size=1, zero_stage=None, dtype="float32"), Counter[str]()
    for model_type in causal_model_types():
        try:
            tiny_model(model_type)
        except NotBuildable:
            counts["not built"] += 1
            continue
        estimate = estimate_memory(
            tiny_config(model_type), sequence_length=64, rows=2, placement=placement, device="cpu"
        )
        if estimate.activations is None:
            print(f"{model_type:20} {estimate.left_out[-1]}", flush=True)
        counts["left out" if estimate.activations is None else "followed"] += 1
    print(dict(counts))


def predict(case: Case, ranks: int) -> MemoryEstimate:
    """The estimate for a case of `memory_case.py`."""
    config = load_config(**case.model)
    placement = Placement.from_deepspeed(case.deepspeed(ranks), world_size=ranks, dtype=case.dtype)
    return estimate_memory(
        config,
        placement=placement,
        sequence_length=case.sequence_length,
        rows=case.rows,
        micro_batches=case.micro_batches,
        gradient_checkpointing=case.gradient_checkpointing,
        fused_loss=case.fused_loss,
        attn_implementation=case.attn_implementation,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )


def run(case: Case, ranks: int) -> dict[str, int]:
    """Bytes on the fullest rank: `peak` of the second step, `rest` after it without the batch."""
    ((results),) = run_cases([case], ranks)
    peak = max(max(rank["backward"], rank["step"]) for rank in results)
    rest = max(sum(rank["owners"]["after_step"].values()) - rank["owners"]["after_step"]["batch"] for rank in results)
    return {"peak": peak, "rest": rest, "parameters": results[0]["parameters"]}


def run_cases(cases: list[Case], ranks: int, *, timeout: float = 600) -> list[list[dict[str, Any]]]:
    """What each case measured on each rank, all in one launch."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *launcher, str(WORKER), str(out), *(json.dumps(vars(case)) for case in cases)]
        root = Path(__file__).resolve().parents[1]
        own = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        if not torch.cuda.is_available():
            own |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        env = {"TORCH_EXTENSIONS_DIR": str(root / ".cache" / "torch_extensions")} | dict(os.environ) | own
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode:
            raise RuntimeError(f"{cases} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        by_rank = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]
    return [list(case) for case in zip(*by_rank, strict=True)]


def table(rows: list[list[str]], *, markdown: bool) -> str:
    if markdown:
        rule = ["---", *["---:"] * (len(rows[0]) - 1)]
        return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


if __name__ == "__main__":
    main()
