"""Which model predicts this text better, whatever its tokenizer: bits per byte, with intervals, side by side.

    python recipes/compare_bpb.py --models runs/first HuggingFaceTB/SmolLM2-135M --data 'held_out/*.jsonl' \\
        --domain_column lang --output first_against_smollm2.json

The same through `accelerate launch` on several ranks gives the same figures. Loss per token says nothing across
tokenizers; bits per byte do if all models are charged for the same bytes. Every choice that moves them is a flag with
a reason for its default (`--help`), is printed, and stands in the JSON. docs/bpb.md shows what each one moves.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState

from hfpretrain.arguments.compare import CompareArguments, read_compare_arguments
from hfpretrain.bpb.coders import coded_bytes
from hfpretrain.bpb.corpus import Corpus, read_corpus
from hfpretrain.bpb.fidelity import Encoded, encode, tokenizer_disagreement
from hfpretrain.bpb.models import ModelCard, load, read_card
from hfpretrain.bpb.report import draw_chart, print_report
from hfpretrain.bpb.result import Scored, comparison, lossy_documents
from hfpretrain.bpb.score import DEFAULT_MAX_LENGTH, Scores, position_limit, score
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.launch_checks import close_process_group
from hfpretrain.run_record import git_commit, versions


def main(argv: list[str] | None = None) -> None:
    # 1. What is asked for, and everything about arguments, text, models and tokenizers that cannot work.
    args, problems = read_compare_arguments(argv)
    state = PartialState(cpu=not torch.accelerator.is_available())
    cards = find_models(args, problems)
    read = find_text(args, problems)
    encoded = encode_faithfully(cards, read, problems)
    lossy = lossy_documents(list(encoded), list(encoded.values()), read.ids)
    corpus = without_lossy(read, lossy, args, problems)
    refuse(problems)

    # 2. The same documents for every model; one model in memory at a time.
    kept = set(corpus.ids)
    models = []
    for card in cards:
        one = encoded[card.name]
        ids = [tokens for identity, tokens in zip(read.ids, one.ids, strict=True) if identity in kept]
        models.append(Scored(card, one, score_model(card.name, ids, args, state.device)))
    if not state.is_main_process:
        return

    # 3. For people, and for programs.
    choices = asdict(args) | {"ranks": state.num_processes, "device": str(state.device)}
    coders = coded_bytes("".join(corpus.texts).encode())
    result = comparison(corpus, models, choices=choices, lossy=lossy, coders=coders)
    print_report(result)
    if args.output is not None:
        record = {"command": sys.argv, "versions": versions(), "git_commit": git_commit()} | result
        write(record, Path(args.output))


def find_models(args: CompareArguments, problems: list[Problem]) -> list[ModelCard]:
    """What is known of each model without its weights; what is wrong with any becomes a problem."""
    cards = []
    for name in args.models:
        try:
            card = read_card(name, prefix=args.prefix)
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
            continue
        cards.append(card)
        positions = position_limit(card.config) or math.inf
        length = args.max_length or min(positions, DEFAULT_MAX_LENGTH)
        if length > positions:
            what = f"max_length is more than the {positions:,} positions of this model"
            problems.append(Problem(what, f"max_length={length}, {name}", "command line", f"at most {positions}"))
        if args.max_length is None and args.stride is not None and args.stride > length:
            what = f"stride is more than the {length:,} tokens of a window, so tokens would be skipped"
            problems.append(Problem(what, f"stride={args.stride}, {name}", "command line", f"at most {length}"))
    return cards


def find_text(args: CompareArguments, problems: list[Problem]) -> Corpus:
    """The documents; an empty corpus where that is a problem."""
    try:
        return read_corpus(
            args.data, text_column=args.text_column, domain_column=args.domain_column, id_column=args.id_column
        )
    except ConfigError as error:
        problems += error.problems
        return Corpus([], [], [], "")


def encode_faithfully(cards: list[ModelCard], corpus: Corpus, problems: list[Problem]) -> dict[str, Encoded]:
    """Model -> ids of every document; a tokenizer that is not the one the model was trained with becomes a problem."""
    encoded = {}
    for card in cards:
        if other := tokenizer_disagreement(card.tokenizer, corpus.texts):
            remedy = (
                "in its tokenizer_config.json set tokenizer_class to TokenizersBackend: it takes tokenizer.json as is"
            )
            problems.append(Problem(other, card.name, "models", remedy))
        try:
            encoded[card.name] = encode(card.tokenizer, corpus.texts)
        except ConfigError as error:
            problems += error.problems
    return encoded


def without_lossy(
    corpus: Corpus, lossy: dict[str, dict[str, str]], args: CompareArguments, problems: list[Problem]
) -> Corpus:
    """The documents that are scored, the same for every model."""
    if not lossy or args.lossy == "keep":
        return corpus
    if args.lossy == "error":
        for identity, reasons in lossy.items():
            given = "; ".join(f"{label}: {reason}" for label, reason in reasons.items())
            remedy = "--lossy exclude leaves the document out for every model, --lossy keep scores it"
            problems.append(Problem(f"a tokenizer loses text of document {identity}", given, "lossy=error", remedy))
        return corpus
    left = corpus.only(np.array([identity not in lossy for identity in corpus.ids]))
    if not any(left.texts):
        what = f"no document is left: some tokenizer loses text of all {len(lossy)} that have any"
        first = "; ".join(f"{label}: {reason}" for label, reason in next(iter(lossy.values())).items())
        problems.append(Problem(what, first, "lossy=exclude", "--lossy keep, or models whose tokenizers lose less"))
    return left


def score_model(name: str, ids: list[np.ndarray], args: CompareArguments, device: torch.device) -> Scores:
    """Load, score, and let go of the weights."""
    loaded = load(name, dtype=args.dtype, prefix=args.prefix, device=device)
    if PartialState().is_main_process:
        print(f"scoring   {name}: {len(ids):,} documents, {sum(map(len, ids)):,} tokens", flush=True)
    return score(
        loaded,
        ids,
        prefix_id=loaded.prefix_id,
        max_length=args.max_length,
        stride=args.stride,
        batch_size=args.batch_size,
    )


def write(record: dict[str, object], path: Path) -> None:
    """The JSON, and its chart where matplotlib is installed."""
    path.write_text(json.dumps(finite(record), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written   {path}")
    try:
        draw_chart(record, path.with_suffix(".png"))
        print(f"drawn     {path.with_suffix('.png')}")
    except ImportError as error:
        print(f"no chart  {error}: pip install 'hfpretrain[plot]' draws it; the JSON is complete")


def finite(value: object) -> object:
    """NaN, which JSON has no word for, becomes null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, FloatingPointError) as error:
        sys.exit(str(error) if os.environ.get("RANK", "0") == "0" else 1)  # every rank found the same
    finally:
        close_process_group()
