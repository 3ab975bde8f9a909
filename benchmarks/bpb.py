"""Bits per byte of a real model on real documents, ours against lm-eval's, in one process and with the same windows.

    HFPRETRAIN_ASSETS=FOLDER python benchmarks/bpb.py           # about four minutes on two cores

FOLDER holds `model/smollm2-135m-instruct-fp32` (SmolLM2-135M-Instruct as a transformers folder) and `corpora/*.jsonl`
with the columns id, lang and text (file names and languages: DOCUMENTS below); `--model` and `--corpora` name others.
lm-eval comes with the extra: `pip install -c constraints.txt -e '.[bench]'`.

Both score the same weights in float32 with float32 log-softmax, the same prefix token in front of each document,
windows of `--max_length` inputs, stride the same; ours in its default batches, lm-eval with each of `--batch_sizes`.
Seconds are those of tokenising and scoring, ours with its round trip of every text. Left out are loading the model,
what lm-eval does to build its task, and what we do once per model (comparing loss and gradients at the head with the
model's own, and whether padding matters): its seconds are printed. Contenders take turns, and medians over rounds are
taken. CPU seconds, of all threads, are there for machines that others use too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hfpretrain.bpb.compare import bits_per_byte
from hfpretrain.bpb.fidelity import encode
from hfpretrain.bpb.models import load
from hfpretrain.bpb.score import score
from machine import describe_machine

# (corpus, language) -> documents: the first ones of that many UTF-8 bytes
DOCUMENTS = {
    ("en_kjv", "en"): 2,
    ("en_jargon", "en"): 2,
    ("en_python_docs", "en"): 3,
    ("code_python", "python"): 3,
    ("multi_man", "ja"): 1,
    ("multi_man", "de"): 2,
    ("multi_man", "zh_CN"): 1,
    ("multi_man", "es"): 1,
    ("multi_man", "fr"): 1,
    ("multi_handbook", "ko-KR"): 2,
    ("multi_handbook", "ar-MA"): 1,
    ("multi_handbook", "ru-RU"): 1,
    ("multi_handbook", "pl-PL"): 2,
    ("multi_fortunes", "it"): 2,
    ("multi_fortunes", "zh"): 1,
}
SIZES = range(800, 4000)
LARGEST_DIFFERENCE = 1e-5  # of bits per byte, for the corpus and for each document
TASK = "hfpretrain_bpb"
OURS = "hfpretrain"


class Clock:
    """Wall and CPU seconds since it was made."""

    def __init__(self) -> None:
        self.start = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self.start[0], time.process_time() - self.start[1]


def read_documents(corpora: Path) -> list[dict[str, str]]:
    """The chosen documents of all corpora, as {"id", "lang", "text"}."""
    left = dict(DOCUMENTS)
    chosen = []
    for corpus in dict.fromkeys(name for name, _ in DOCUMENTS):
        with open(corpora / f"{corpus}.jsonl", encoding="utf-8", newline="\n") as lines:
            for document in map(json.loads, lines):
                key = (corpus, document["lang"])
                if left.get(key) and len(document["text"].encode()) in SIZES:
                    left[key] -= 1
                    chosen.append(document)
    missing = [f"{corpus}/{language}" for (corpus, language), count in left.items() if count]
    if missing:
        raise SystemExit(f"{corpora}: not enough documents of {SIZES.start} to {SIZES.stop} bytes in {missing}")
    return chosen


def peer(model: Any, tokenizer: Any, *, prefix_id: int, max_length: int, batch_size: int) -> Any:
    """lm-eval's model around the same weights; keeps the seconds and the log-likelihoods of its scoring."""
    from lm_eval.models.huggingface import HFLM

    class Timed(HFLM):
        taken: tuple[float, float]
        log_likelihoods: list[float]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            clock = Clock()
            self.log_likelihoods = super().loglikelihood_rolling(requests, disable_tqdm)
            self.taken = clock.read()
            return self.log_likelihoods

    return Timed(
        pretrained=model,
        tokenizer=tokenizer,
        device="cpu",
        dtype="float32",
        softmax_dtype="float32",
        max_length=max_length,
        batch_size=batch_size,
        prefix_token_id=prefix_id,
        add_bos_token=False,
    )


def evaluate_with_peer(lm: Any, documents: list[dict[str, str]], folder: Path) -> float:
    """lm-eval's own bits per byte, from a task in a local file."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(task))  # JSON is YAML
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(lm, tasks=[TASK], task_manager=manager, bootstrap_iters=0)
    return float(found["results"][TASK]["bits_per_byte,none"])


def main() -> None:
    assets = Path(os.environ.get("HFPRETRAIN_ASSETS", "assets"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=assets / "model" / "smollm2-135m-instruct-fp32")
    parser.add_argument("--corpora", type=Path, default=assets / "corpora")
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 4], help="of lm-eval")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    absent = [str(path) for path in (options.model, options.corpora) if not path.exists()]
    absent += [] if find_spec("lm_eval") else ["the package lm-eval"]
    if absent:
        print(f"skipped: {' and '.join(absent)} missing; the docstring of {Path(__file__).name} says how to get it")
        return
    documents = read_documents(options.corpora)
    texts = [document["text"] for document in documents]
    text_bytes = np.array([len(text.encode()) for text in texts])
    about = describe_machine(("torch", "transformers", "lm-eval"))
    print(*(f"{key}: {value}" for key, value in about.items()), f"threads: {torch.get_num_threads()}", sep=", ")
    loaded = load(str(options.model), dtype="float32", prefix="bos", device="cpu")
    prefix_id = int(loaded.prefix_id or 0)
    theirs = load(str(options.model), dtype="float32", prefix="bos", device="cpu").model  # untouched by our measuring
    clock = Clock()
    verdict = loaded.scorer.fused.verdict
    print("measured once in {:.1f} s, {:.1f} CPU s:".format(*clock.read()), verdict)
    print(f"{len(texts)} documents, {text_bytes.sum():,} bytes, prefix token {prefix_id}, {loaded.name}")

    taken: dict[str, list[tuple[float, float]]] = {}
    nats: dict[str, np.ndarray] = {}
    corpus: dict[str, float] = {}
    for _ in range(options.rounds):
        clock = Clock()
        ids = encode(loaded.tokenizer, texts).ids
        scores = score(loaded, ids, prefix_id=prefix_id, max_length=options.max_length)
        taken.setdefault(OURS, []).append(clock.read())
        nats[OURS] = scores.nats
        corpus[OURS] = bits_per_byte(scores.nats, text_bytes)
        for batch_size in options.batch_sizes:
            name = f"lm-eval, batch {batch_size}"
            sizes = {"max_length": options.max_length, "batch_size": batch_size}
            lm = peer(theirs, loaded.tokenizer, prefix_id=prefix_id, **sizes)
            with tempfile.TemporaryDirectory() as folder:
                corpus[name] = evaluate_with_peer(lm, documents, Path(folder))
            nats[name] = -np.array(lm.log_likelihoods)
            taken.setdefault(name, []).append(lm.taken)

    medians = {name: np.median(times, axis=0) for name, times in taken.items()}
    worst = 0.0
    print("\n| scorer | seconds | x ours | CPU seconds | x ours | BPB | difference | largest of a document |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, (wall, cpu) in medians.items():
        apart = np.abs(nats[name] - nats[OURS]) / (math.log(2) * text_bytes)
        off = corpus[name] - corpus[OURS]
        worst = max(worst, abs(off), float(apart.max()))
        times = f"{wall:.1f} | {wall / medians[OURS][0]:.2f} | {cpu:.1f} | {cpu / medians[OURS][1]:.2f}"
        print(f"| {name} | {times} | {corpus[name]:.8f} | {off:+.1e} | {apart.max():.1e} |")
    fastest = np.min([times for name, times in medians.items() if name != OURS], axis=0) / medians[OURS]
    print(f"\nlm-eval at its fastest takes {fastest[0]:.2f} x our seconds, {fastest[1]:.2f} x our CPU seconds")
    if worst > LARGEST_DIFFERENCE:
        sys.exit(f"the two disagree by {worst:.1e} bits per byte; at most {LARGEST_DIFFERENCE:.0e} is rounding")


if __name__ == "__main__":
    main()
