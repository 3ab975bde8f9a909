"""Is muP right for this architecture? A few steps at several widths: sizes of activations, their slopes, a verdict.

    python recipes/coord_check.py --model_type mixtral --widths 64 128 256 512 --steps 4
    python recipes/coord_check.py --config recipes/configs/model/llama_160m.yaml --widths 64 128 256 --seeds 2

A `--model_type` is taken in its smallest form (2 layers, 256 tokens, heads of 16), changed by `--config_overrides`; the
model of `--config` files (those of pretrain.py; other fields are ignored) keeps its depth, vocabulary and head size.
The smallest width is the base. `--standard` is the negative control: one learning rate for all, which is not flat.
Exit status 2 where the architecture is refused, with the reason; 0 with a verdict, flat or not flat.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from hfpretrain.arguments import DataArguments, ModelArguments, PretrainArguments
from hfpretrain.arguments.files import merge_files
from hfpretrain.arguments.types import key_values
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.model import load_config
from hfpretrain.mup.coord_check import LEARNING_RATE, ROWS, TOKENS, CoordCheck, coord_check
from hfpretrain.mup.slopes import FLAT
from hfpretrain.small_models import NotBuildable, tiny_config


def main(argv: list[str] | None = None) -> None:
    # 1. Which model, at which widths.
    args = read(argv)
    torch.set_num_threads(1)  # models this small spend their time waiting for one another's threads
    try:
        refuse(check(args))
        config = model_config(args)

        # 2. Train each width for a few steps on the same tokens.
        result = coord_check(
            config,
            widths=args.widths,
            steps=args.steps,
            seeds=args.seeds,
            rows=args.rows,
            tokens=args.tokens,
            lr=args.learning_rate,
            standard=args.standard,
            overrides=args.mup_overrides,
        )
    except (ConfigError, NotBuildable) as error:
        write(args.json, {"verdict": "refused", "why": str(error)})
        print(f"refused: {error}")
        raise SystemExit(2) from error

    # 3. For people, for programs, and as a picture.
    form = "standard" if args.standard else "muP"
    print(f"{config.model_type}, {form}, widths {args.widths}, {args.steps} steps, {args.seeds} seed(s)")
    print(result)
    write(args.json, {"model_type": config.model_type, **result.as_dict()})
    if args.png is not None:
        draw(result, args.png, f"{config.model_type}, {form}: {result.verdict}")


def read(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_type", help="architecture, in its smallest form: llama, gpt2, mixtral, ...")
    parser.add_argument("--config", nargs="+", default=[], metavar="FILE", help="YAML files as for pretrain.py")
    parser.add_argument("--config_overrides", type=key_values, default={}, help="num_hidden_layers=4,... or JSON")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512], help="hidden sizes [%(default)s]")
    parser.add_argument("--steps", type=int, default=4, help="Adam steps [%(default)s]")
    parser.add_argument("--seeds", type=int, default=1, help="initialisations and batches of tokens [%(default)s]")
    parser.add_argument("--rows", type=int, default=ROWS, help="of random tokens [%(default)s]")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="in a row [%(default)s]")
    parser.add_argument(
        "--learning_rate", type=float, default=LEARNING_RATE, help="at the smallest width [%(default)s]"
    )
    parser.add_argument("--standard", action="store_true", help="without muP: the negative control")
    parser.add_argument(
        "--mup_overrides", type=key_values, default={}, help="regular expression=role, as in pretrain.py"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write verdict, sizes and slopes there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw sizes against width (needs matplotlib)")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> list[Problem]:
    """Everything about the flags that cannot be."""
    problems = []
    if (args.model_type is None) == (not args.config):
        given = f"model_type={args.model_type}, config={args.config}"
        problems.append(Problem("it is not clear which model", given, "command line", "give one of the two"))
    if len(set(args.widths)) < 2 or min(args.widths) < 1:
        what = "a slope needs two widths"
        problems.append(Problem(what, str(args.widths), "command line", "such as --widths 64 128 256"))
    for name, low in (("steps", 1), ("seeds", 1), ("rows", 1), ("tokens", 2), ("learning_rate", 0)):
        value = getattr(args, name)
        if value < low or not value:
            problems.append(
                Problem(
                    f"{name} is out of range", str(value), "command line", f"at least {low}" if low else "more than 0"
                )
            )
    return problems


def model_config(args: argparse.Namespace) -> PreTrainedConfig:
    """The configuration whose width is changed."""
    if args.model_type is not None:
        load_config(model_type=args.model_type, config_overrides=args.config_overrides)  # names what it does not know
        small = tiny_config(args.model_type)
        changes = {small.attribute_map.get(name, name): value for name, value in args.config_overrides.items()}
        return type(small).from_dict(small.to_dict() | changes)
    problems: list[Problem] = []
    classes = (ModelArguments, DataArguments, PretrainArguments)
    names = {field.name for cls in classes for field in dataclasses.fields(cls)}
    given, _ = merge_files(args.config, names, problems=problems)
    refuse(problems)
    return load_config(
        model_type=given.get("model_type"),
        config_name=given.get("config_name"),
        config_overrides=given.get("config_overrides", {}) | args.config_overrides,
    )


def write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def draw(result: CoordCheck, path: Path, title: str) -> None:
    """Mean |x| after the last step against width, one line per kind; those that are not flat are labelled."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for slope in result.slopes:
        shown = {width: size for width, size in slope.sizes.items() if size > 0}
        style = {"color": "tab:red", "label": slope.kind} if not slope.flat else {"color": "tab:blue", "alpha": 0.4}
        axes.loglog(list(shown), list(shown.values()), marker="o", base=2, **style)
    axes.set(xlabel="width", ylabel=f"mean |x| after {result.steps} steps", title=f"{title} (|slope| < {FLAT})")
    if result.fault:
        axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
