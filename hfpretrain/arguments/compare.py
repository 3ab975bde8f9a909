"""What `recipes/compare_bpb.py` can be asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hfpretrain.arguments.command_line import read_command_line
from hfpretrain.errors import Problem


def _arg(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class CompareArguments:
    """Models, text, and every choice that moves bits per byte; all of them are printed and written with the result."""

    _argument_group_name = "bits per byte"

    models: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Causal language models: folders, checkpoint-N folders of a running run, hub names, .gguf files. "
            "Each is scored with the tokenizer beside it. No default."
        },
    )
    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Text to score, in all forms that --dataset of pretrain.py takes: txt (one file, one document), "
            "jsonl, parquet, arrow, globs, save_to_disk folders, hub names, stdlib. No default: text that a model was "
            "trained on says nothing."
        },
    )
    text_column: str = _arg("text", "Column that holds the text. Default: what most data sets call it.")
    domain_column: str | None = _arg(
        None,
        "Column that says which domain a document counts under (language, source). Default: the name of its source.",
    )
    id_column: str | None = _arg(
        None, "Column that identifies a document, the same in every run. Default: its file and row, always unique."
    )
    max_length: int | None = _arg(
        None,
        "Most tokens a model sees at once. Default: each model's positions, at most 2048, since more context is what a "
        "model with more positions can do; results of different lengths are not comparable (lm-eval#2467).",
    )
    stride: int | None = _arg(
        None,
        "New tokens of each further window of a long document; 1 to max_length. Default max_length: fastest, and what "
        "lm-eval does; max_length / 2 gives every token at least half a window of context at twice the time.",
    )
    prefix: str = _arg(
        "trained",
        "What the first token of a document is predicted from: trained (the start token that run.json records, else "
        "BOS, else EOS), bos, eos, a token id, or none (the first token is then charged a uniform code, so that all "
        "models are charged for the same bytes). Default trained: any other token was never seen in that place.",
    )
    batch_size: int = _arg(
        8,
        "Most windows of a forward pass; speed and memory only. Default 8: with a 1B model, 8 x 2048 tokens fit 24 GB.",
    )
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = _arg(
        "float32",
        "Of the weights. Default float32, for the same figures everywhere; log-softmax is in float32 at least and sums "
        "in float64 whatever is given.",
    )
    lossy: Literal["exclude", "keep", "error"] = _arg(
        "exclude",
        "Documents that the tokenizer of any model loses part of. exclude: leave them out for all models, the "
        "default, because text that is lost costs a model nothing. keep: score them, which flatters. error: stop.",
    )
    output: str | None = _arg(
        None,
        "JSON file of all choices, fingerprints and figures, the nats of every document included; a bar chart (.png) "
        "is drawn beside it. Default: print only.",
    )


def read_compare_arguments(argv: Sequence[str] | None = None) -> tuple[CompareArguments, list[Problem]]:
    """The arguments, and everything about them that cannot be right; a value that cannot be read is its default.

    Raises:
        SystemExit: after `--help` only.
    """
    reading = read_command_line([CompareArguments], list(sys.argv[1:] if argv is None else argv))
    args = CompareArguments(**reading.values)
    problems = list(reading.problems)

    def note(name: str, what: str, remedy: str) -> None:
        if name not in reading.bad_fields:
            problems.append(Problem(what, f"{name}={getattr(args, name)!r}", reading.sources[name], remedy))

    if not args.models:
        note("models", "no model is named", "--models FOLDER_OR_HUB_NAME ...; one is scored, several are compared")
    if twice := sorted({name for name in args.models if args.models.count(name) > 1}):
        note("models", f"{', '.join(twice)} is named more than once", "name each model once")
    for name in ("max_length", "stride", "batch_size"):
        if (value := getattr(args, name)) is not None and value < 1:
            note(name, f"{name} is out of range", "choose at least 1")
    if args.max_length and args.stride and args.stride > args.max_length and "max_length" not in reading.bad_fields:
        note(
            "stride",
            f"stride is more than max_length={args.max_length}, so tokens would be skipped",
            "at most max_length",
        )
    if args.output is not None:
        path = Path(args.output)
        if path.suffix != ".json":
            note("output", "the output is a JSON file, and its chart has the same name with .png", "a name with .json")
        elif not path.resolve().parent.is_dir():
            note("output", "the folder of the output does not exist", f"mkdir -p {path.parent}")
    return args, problems
