"""One pretraining job, five ways, from text to a model: speed, time to the first step, tokens lost, held-out quality.

    python benchmarks/end_to_end.py --output results.json             # about half an hour on two cores
    python benchmarks/end_to_end.py --smoke                           # two minutes; its figures mean nothing
    python benchmarks/end_to_end.py --contenders plain ours --repeat 3

The job: a Llama of 7 million parameters on the standard library of the running Python, rows of L = 512 tokens, 32 rows
(16,384 target tokens but for the first of a piece) a step. The contenders (contenders.py):

    plain        a hand-written loop: one token file, windows of L + 1 tokens, documents not isolated, cosine schedule
    run_clm      the steps of transformers' example script on the stock Trainer: group_texts, no end token, linear
    trl_wrapped  TRL's SFTTrainer, packing strategy "wrapped": rows filled without regard to documents, linear
    trl_bfd      TRL's SFTTrainer, packing strategy "bfd", its default: documents cut off at L tokens, isolated, linear
    ours         PretrainTrainer: concat packing as a view, documents isolated, warmup_stable_decay

Equal for all: training documents (one jsonl file), tokenizer (trained beforehand, not timed), initial weights, float32,
no recomputation, attention backend, rows per step and micro-batch, fused AdamW with the same betas, eps, weight decay
and clipping, peak learning rate, length of the warm-up, and target tokens over the run: who has fewer in a row takes
more steps. The peak was tuned for nobody. By habit: data pipeline and processes, where documents begin and end, order
of the rows, isolation, schedule, what decays, loss over micro-batches, logging. Without --same_schedule, BPB differs by
the schedules too: the others warm up from a learning rate of 0 and waste their first step, ours does not.

Every start is a fresh interpreter. "Cold" is a start with empty data caches that ends after its first optimizer step;
"warm" is the start after it, which trains to the end. Both count seconds from the start of the interpreter, imports
included (the system's file cache is warm in both). Target tokens/s are those of the warm run from the end of its first
step on, median over --repeat; contenders take turns, so that a machine that slows down slows all.

Lost, in % of the text tokens (without start and end tokens) of the training documents: "dropped" stand in no row of an
epoch; "unlearnt" stand in a row but are never predicted, because the row begins with them.

BPB: hfpretrain.training.evaluation on the same held-out documents for all, each after the start token that every
contender saw before every document: all of their tokenizers' habits put it there; none but the end token differs, which
is not scored.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from contest import NAMES, Job
from hfpretrain.data.documents import load_documents
from hfpretrain.data.sources import find_sources
from hfpretrain.data.spans import encoded_text, in_validation, iter_texts, plan_spans, read_span
from hfpretrain.data.tokenizer import load_tokenizer
from hfpretrain.loss import logits_sums
from hfpretrain.training.evaluation import EvaluationWindows, evaluate_bits_per_byte, evaluation_windows
from machine import describe_machine

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "trl")


@dataclass(frozen=True)
class Run:
    """One cold and one warm start of a contender."""

    cold_seconds: float
    warm_seconds: float
    tokens_per_second: float
    steps: int
    target_tokens: int
    first_learning_rate: float
    schedule: str
    dropped: float  # share of the text tokens
    unlearnt: float
    bits_per_byte: float


def main() -> None:
    options = _options()
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    names = _installed(options.contenders)
    about = describe_machine(PACKAGES)
    print(*(f"{key}: {value}" for key, value in about.items()), sep=", ")
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        job, text_tokens, windows = _prepare(options, Path(folder))
        for turn in range(options.repeat):
            for name in names:
                runs[name].append(_compete(name, job, text_tokens, windows, Path(folder)))
                print(f"  {turn + 1}/{options.repeat} {name}: {runs[name][-1]}", flush=True)
    _print_table(runs)
    if options.output:
        settings = {key: value for key, value in asdict(job).items() if key not in ("started", "first_step_only")}
        record = {
            "machine": about,
            "options": vars(options),
            "job": {key: value for key, value in settings.items() if not str(value).startswith(folder)},
            "text_tokens": text_tokens,
            "runs": {name: [asdict(run) for run in results] for name, results in runs.items()},
        }
        Path(options.output).write_text(json.dumps(record, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=list(NAMES), help="run only these")
    parser.add_argument("--steps", type=int, default=36, help="optimizer steps of 32 x 512 target tokens")
    parser.add_argument("--repeat", type=int, default=1, help="cold and warm starts of each contender")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="peak; a guess at this size")
    parser.add_argument("--same_schedule", action="store_true", help="linear for all instead of each one's habit")
    parser.add_argument("--output", help="JSON file for all figures")
    parser.add_argument("--smoke", action="store_true", help="a tiny job, to see that everything runs")
    parser.add_argument("--tokenizer_name", default="train:8192", help="as in the recipe; trained on 8 MB of text")
    return parser.parse_args()


def _installed(names: list[str]) -> list[str]:
    if find_spec("trl") is None:
        print("TRL is not installed, so its rows are missing: pip install 'hfpretrain[bench]' (or pip install trl)")
        return [name for name in names if not name.startswith("trl")]
    return names


# -- what all contenders get ------------------------------------------------------------------------------------------


def _prepare(options: argparse.Namespace, folder: Path) -> tuple[Job, int, EvaluationWindows]:
    """Texts and tokenizer on disk, the job, the number of text tokens to train on, and what is held out."""
    smoke = options.smoke
    held_out_share = 0.02
    _write_texts(folder, held_out_share=held_out_share, most_documents=150 if smoke else None)
    name = "train:512" if smoke else options.tokenizer_name
    texts = iter_texts([str(folder / "train.jsonl")], max_bytes=300_000 if smoke else 8_000_000)
    tokenizer = load_tokenizer(name, texts=texts, cache_dir=folder / "prepared")
    tokenizer.save_pretrained(folder / "tokenizer")
    train, held_out = (
        load_documents([str(folder / f)], tokenizer, validation_fraction=0.0, cache_dir=folder / "prepared")[0]
        for f in ("train.jsonl", "held_out.jsonl")
    )
    width, layers, length = (64, 2, 128) if smoke else (256, 6, 512)
    overrides: dict[str, int | bool] = {
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "max_position_embeddings": length,
        "tie_word_embeddings": True,
    }
    steps = min(options.steps, 4) if smoke else options.steps
    job = Job(
        train_text=str(folder / "train.jsonl"),
        tokenizer=str(folder / "tokenizer"),
        caches=str(folder / "caches"),
        output=str(folder / "run"),
        config_overrides=overrides,
        sequence_length=length,
        rows_per_step=8 if smoke else 32,
        rows_at_once=4,
        num_steps=steps,
        warmup_steps=max(1, round(0.05 * steps)),
        learning_rate=options.learning_rate,
        same_schedule=options.same_schedule,
        started=0.0,
        first_step_only=False,
    )
    text_tokens = len(train.tokens) - 2 * len(train)
    print(f"{len(train):,} training documents, {text_tokens:,} text tokens; {len(held_out):,} documents held out")
    return job, text_tokens, evaluation_windows(held_out, length)


def _write_texts(folder: Path, *, held_out_share: float, most_documents: int | None) -> None:
    """The standard library as two jsonl files, split as `load_documents` would; no document occurs in both."""
    spans = plan_spans(find_sources(["stdlib"]))
    with open(folder / "train.jsonl", "w") as train, open(folder / "held_out.jsonl", "w") as held_out:
        documents = (item for span in spans for item in _texts(span))
        for text, encoded in islice(documents, most_documents):
            file = held_out if in_validation(encoded, held_out_share if most_documents is None else 0.1) else train
            file.write(json.dumps({"text": text}) + "\n")


def _texts(span: Any) -> Any:
    for row, text in read_span(span, text_column="text"):
        if text:
            yield text, encoded_text(text, span.path, row)


# -- one contender ----------------------------------------------------------------------------------------------------


def _compete(name: str, job: Job, text_tokens: int, windows: EvaluationWindows, folder: Path) -> Run:
    shutil.rmtree(job.caches, ignore_errors=True)
    Path(job.caches).mkdir()
    cold = _start(name, replace(job, first_step_only=True), folder)
    warm = _start(name, job, folder)
    ends, targets = warm["ends"], warm["targets"]
    return Run(
        cold_seconds=cold["ends"][0],
        warm_seconds=ends[0],
        tokens_per_second=(targets[-1] - targets[0]) / (ends[-1] - ends[0]) if len(ends) > 1 else float("nan"),
        steps=len(ends),
        target_tokens=targets[-1],
        first_learning_rate=warm["learning_rates"][0],
        schedule=warm["schedule"],
        dropped=1 - warm["kept"] / text_tokens,
        unlearnt=(warm["kept"] - warm["targets_of_epoch"]) / text_tokens,
        bits_per_byte=_score(job.output, windows),
    )


def _start(name: str, job: Job, folder: Path) -> dict[str, Any]:
    """Run a contender in an interpreter of its own; what it prints is shown only if it fails."""
    shutil.rmtree(job.output, ignore_errors=True)
    Path(job.output).mkdir()
    environment = os.environ | {"HF_DATASETS_CACHE": job.caches, "HF_HUB_OFFLINE": "1"}
    script = Path(__file__).with_name("contenders.py")
    with open(folder / "log.txt", "w+") as log:
        file = folder / "job.json"
        file.write_text(json.dumps(asdict(replace(job, started=time.time()))))
        ended = subprocess.run([sys.executable, script, file, name], env=environment, stdout=log, stderr=log)
        if ended.returncode:
            log.seek(0)
            raise RuntimeError(f"contender {name} ended with status {ended.returncode}:\n{log.read()[-4000:]}")
    result: dict[str, Any] = json.loads((Path(job.output) / "result.json").read_text())
    return result


def _score(model_folder: str, windows: EvaluationWindows) -> float:
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    model.eval()

    def nats(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        return logits_sums(logits, batch["labels"]).cross_entropy

    metrics = evaluate_bits_per_byte(nats, windows, rows=8, device=torch.device("cpu"))
    return metrics["bpb"]


# -- what is shown ----------------------------------------------------------------------------------------------------


def _print_table(runs: dict[str, list[Run]]) -> None:
    """Medians over the repeats; the ratio is speed over that of the plain loop."""

    def median(name: str, what: str) -> float:
        return statistics.median(getattr(run, what) for run in runs[name])

    head = f"{'':12}{'tok/s':>8}{'ratio':>7}{'cold':>8}{'warm':>8}{'dropped':>9}{'unlearnt':>10}{'BPB':>8}"
    print(f"\n{head}{'steps':>7}{'targets':>10}{'LR of step 1':>14}  schedule")
    for name, results in runs.items():
        last, speed = results[-1], median(name, "tokens_per_second")
        ratio = f"{speed / median('plain', 'tokens_per_second'):.3f}" if "plain" in runs else "-"
        print(
            f"{name:12}{speed:>8,.0f}{ratio:>7}"
            f"{median(name, 'cold_seconds'):>7.1f}s{median(name, 'warm_seconds'):>7.1f}s"
            f"{last.dropped:>9.2%}{last.unlearnt:>10.2%}{median(name, 'bits_per_byte'):>8.4f}"
            f"{last.steps:>7}{last.target_tokens:>10,}{last.first_learning_rate:>14.2e}  {last.schedule}"
        )


if __name__ == "__main__":
    main()
