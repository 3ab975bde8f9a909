"""Know a run before it starts: steps, FLOPs, hours, money, checkpoints, and what published laws say of size and batch.

    python recipes/plan.py --params 7B --total_tokens 1T --batch_tokens 8_388_608 --sequence_length 4096 \\
        --per_device_train_batch_size 4 --world_size 64 --save_steps 1000 --warmup_steps 2000 --explain

Flags that pretrain.py has too mean the same and have the same default. `--model_type llama --config_overrides ...` in
place of `--params` counts the real model, built without memory. Nothing is trained and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hfpretrain.arguments.types import key_values, token_count
from hfpretrain.data.packing import pack_concat
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.model import load_config
from hfpretrain.planning import budget, scaling_laws
from hfpretrain.planning.flops import PEAK_FLOPS, peak_flops
from hfpretrain.training.run_length import DEFAULT_WARMUP_FRACTION
from hfpretrain.training.schedule import resolve_steps
from hfpretrain.training.throughput import token_flops


def points(text: str) -> list[tuple[int, int]]:
    """25M:90k,100M:180k -> pairs of (parameters, tokens)."""
    pairs = [pair.split(":") for pair in text.split(",")]
    if any(len(pair) != 2 or min(map(token_count, pair)) < 1 for pair in pairs):
        raise ValueError("expected parameters:tokens,parameters:tokens, all above 0")
    return [(token_count(x), token_count(y)) for x, y in pairs]


# flag -> how its word is read, its default, what it is
FLAGS: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "params": (token_count, None, "parameters of the model: 7B, 160M; or name a model"),
    "model_type": (str, None, "architecture to count: llama, gpt2, ..."),
    "config_name": (str, None, "folder or hub name of a configuration to count"),
    "config_overrides": (key_values, None, "hidden_size=256,num_hidden_layers=4 or JSON"),
    "total_tokens": (token_count, None, "tokens to train on: 8B, 2T"),
    "batch_tokens": (token_count, 262_144, "tokens of an optimizer step over all devices"),
    "sequence_length": (int, 1024, "tokens of a row"),
    "per_device_train_batch_size": (int, 8, "rows of a device at once"),
    "world_size": (int, 1, "devices"),
    "warmup_steps": (int, None, "optimizer steps of warm-up; default 2 %% of the run"),
    "save_steps": (int, 500, "optimizer steps between checkpoints"),
    "save_total_limit": (int, 3, "newest checkpoints kept; none keeps all"),
    "zero_stage": (int, None, "DeepSpeed's, for what a checkpoint holds; not set: DDP"),
    "device": (str, "h100", "its dense bf16 peak counts: h200, h100, a100, ..."),
    "mfu": (float, 0.4, "share of that peak; 0.4 is usual for large models, measure yours"),
    "storage_gbps": (float, 2.0, "GB (1e9 bytes) written a second"),
    "price_per_device_hour": (float, None, "in any currency"),
    "inference_tokens": (token_count, None, "tokens the model will read and write in its life"),
    "mean_document_tokens": (float, None, "for what padding every document to a row would waste"),
    "critical_batch_points": (points, None, "measured parameters:tokens to continue with N^0.5: 25M:90k,100M:180k"),
}
MAY_BE_ZERO = {"warmup_steps", "save_total_limit", "zero_stage", "price_per_device_hour", "inference_tokens"}
AT_MOST = {"mfu": 1, "zero_stage": 3}


def main(argv: list[str] | None = None) -> None:
    # 1. What is asked for, and everything about it that cannot work.
    problems: list[Problem] = []
    args = read(argv, problems)
    config = check(args, problems)
    refuse(problems)
    model = {"parameters": args.params}
    if config is not None:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)
        row = pack_concat(np.array([args.sequence_length]), args.sequence_length)
        flops = token_flops(built, row, isolate_documents=True)  # one document fills the row: the upper bound
        model = {"parameters": flops.parameters, "flops_per_token": flops.causal}
    parameters, peak = model["parameters"], peak_flops(args.device) or 0.0

    # 2. The figures, each with its unit, formula and source.
    steps = budget.optimizer_steps(args.total_tokens, args.batch_tokens)
    share = DEFAULT_WARMUP_FRACTION if args.warmup_steps is None else None
    warmup, _ = resolve_steps(num_steps=steps, warmup_steps=args.warmup_steps, warmup_fraction=share)
    figures = [budget.Figure("parameters", parameters, "parameters", "N: all, tied ones once, idle experts too")]
    figures += budget.step_figures(
        **pick(args, "total_tokens batch_tokens sequence_length per_device_train_batch_size world_size"),
        warmup_steps=warmup,
    )
    if args.mean_document_tokens is not None:
        waste = budget.padding_waste(args.mean_document_tokens, args.sequence_length)
        figures.append(budget.Figure("padding_waste", waste, "share", "1 - mean / L with one document a row; packed 0"))
    figures += budget.compute_figures(
        **model, **pick(args, "total_tokens world_size mfu price_per_device_hour"), peak_flops=peak
    )
    figures += budget.storage_figures(
        parameters=parameters,
        num_steps=steps,
        **pick(args, "save_steps save_total_limit storage_gbps zero_stage"),
    )
    figures += scaling_laws.law_figures(
        parameters=parameters,
        tokens=args.total_tokens,
        **pick(args, "batch_tokens inference_tokens critical_batch_points"),
    )

    # 3. For people, or for programs.
    as_json = [asdict(figure) for figure in figures]
    print(json.dumps(as_json, indent=2) if args.json else budget.figure_table(figures, explain=args.explain))


def pick(args: argparse.Namespace, names: str) -> dict[str, Any]:
    """The flags of these names."""
    return {name: getattr(args, name) for name in names.split()}


def read(argv: list[str] | None, problems: list[Problem]) -> argparse.Namespace:
    """The flags; what cannot be read becomes a problem and None."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )

    def typed(name: str, convert: Callable[[str], Any]) -> Callable[[str], Any]:
        def value(text: str) -> Any:
            if text.lower() in ("none", "null"):
                return None
            try:
                return convert(text)
            except ValueError as error:
                reason = "expected a whole number" if convert is int else str(error)
                problems.append(Problem(f"{name} cannot be read", text or "nothing", "command line", reason))
                return None

        return value

    for name, (convert, default, text) in FLAGS.items():
        shown = "" if default is None else f" [{default}]"
        parser.add_argument(
            f"--{name}", type=typed(name, convert), default=default, nargs="?", const="", help=text + shown
        )
    parser.add_argument("--explain", action="store_true", help="formula and source beside each number")
    parser.add_argument("--json", action="store_true", help="the same as JSON: name, value, unit, formula, source")
    args, strays = parser.parse_known_args(argv)
    if strays:
        problems.append(Problem("no such flag", " ".join(strays), "command line", "remove it; --help lists them"))
    return args


def check(args: argparse.Namespace, problems: list[Problem]) -> Any:
    """Adds everything that cannot be; returns the model's configuration, None with --params or where it is wrong."""
    bad = {problem.what.split()[0] for problem in problems}  # unreadable, so not to be judged
    for name, (_, default, _) in FLAGS.items():
        value, low, high = getattr(args, name), 0 if name in MAY_BE_ZERO else 1e-300, AT_MOST.get(name, float("inf"))
        required = name == "total_tokens" or (default is not None and name != "save_total_limit")
        fault = "has no value" if value is None and required and name not in bad else ""
        if isinstance(value, int | float) and not low <= value <= high:
            fault = f"is out of range, {'0 or more' if not low else 'above 0'}, at most {high:g}"
        if fault:
            bad.add(name)
            problems.append(Problem(f"{name} {fault}", str(value), "command line", f"correct --{name}"))
    if args.device is not None and peak_flops(args.device) is None:
        problems.append(Problem("unknown device", args.device, "command line", "one of " + ", ".join(PEAK_FLOPS)))
    counts = "total_tokens batch_tokens sequence_length world_size warmup_steps"
    if not bad & set(counts.split()):
        problems += budget.contradictions(**pick(args, counts))
    models = [name for name in ("params", "model_type", "config_name") if getattr(args, name) or name in bad]
    if len(models) != 1 or (models == ["params"] and args.config_overrides):
        remedy = "params alone, or one of model_type and config_name with config_overrides"
        problems.append(
            Problem("it is not clear which model is planned", ", ".join(models) or "none", "command line", remedy)
        )
    elif models != ["params"] and "config_overrides" not in bad:
        try:
            return load_config(**pick(args, "model_type config_name config_overrides"))
        except ConfigError as error:
            problems += error.problems
        except OSError as error:  # transformers finds no such configuration
            problems.append(Problem(str(error).split("\n")[0], str(args.config_name), "config_name", "correct it"))
    return None


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(str(error))
