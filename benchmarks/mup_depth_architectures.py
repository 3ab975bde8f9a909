"""Which parameters write into the residual stream of every causal architecture that can be built small: a table.

    python benchmarks/mup_depth_architectures.py [--only llama gpt2 ...] [--results FILE.jsonl]
        [--output docs/mup_depth_architectures.md]

For each, a tiny model and one of twice its depth are compared as `--mup_base_depth` does it. "placed" means proved on
the model's numbers: doubling the writers doubles what every branch adds to the stream, within 1e-4 in float32.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import logging

from hfpretrain.errors import ConfigError
from hfpretrain.model import name_template
from hfpretrain.mup.depth import depth_laws
from hfpretrain.mup.layers import layer_count, set_depth
from hfpretrain.mup.probe import probe_model
from hfpretrain.small_models import NotBuildable, causal_model_types, tiny_config, tiny_model
from machine import describe_machine


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        verdict: placed, refused, or not built.
        detail: the writers, else the reason.
        powers: of the depth that the architecture has by itself, in initial values or branches.
    """

    model_type: str
    verdict: str
    detail: str
    powers: str = ""


def examine(model_type: str) -> Row:
    """Place its parameters between a tiny model's depth and twice that."""
    try:
        tiny_model(model_type)
    except NotBuildable as error:
        return Row(model_type, "not built", " ".join(str(error).split())[:120])
    base = tiny_config(model_type)
    try:
        deep = set_depth(base, 2 * layer_count(base))
        laws, _ = depth_laws(probe_model(deep), probe_model(base), overrides={})
    except ConfigError as error:
        problem = error.problems[0]
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        return Row(model_type, "refused", f"{problem.what}: {problem.given}{more}"[:240])
    writers, powers = dict[str, None](), dict[str, None]()
    for name, law in laws.items():
        short = name_template(name).partition(".*.")[2]
        if law.place == "writer":
            writers[short.removesuffix(".weight") + (" (1 + weight)" if law.one_plus else "")] = None
            if law.forward_exponent:
                powers[f"branches {law.forward_exponent:+g}"] = None
        if law.init_exponent:
            powers[f"{short} {law.init_exponent:+g}"] = None
    return Row(model_type, "placed", ", ".join(writers), ", ".join(powers))


def write(rows: list[Row], output: Path, command: str) -> None:
    counts = Counter(row.verdict for row in rows)
    machine = ", ".join(f"{name}: {value}" for name, value in describe_machine(["torch", "transformers"]).items())
    lines = [
        "# What writes into the residual stream, architecture by architecture",
        "",
        f"Made by `{command}` ({machine}).",
        "",
        "`--mup_base_depth` divides what every residual branch adds by (layers / base layers): CompleteP (Dey et al.",
        "2025, arXiv:2505.01618) with alpha = 1, folded into the last linear map of each branch. Which one that is, is",
        "measured; *placed* means that doubling these parameters doubles what every branch adds, within 1e-4, and that",
        "the stream is a plain sum from the first layer to the last. *By itself*: powers of the depth that the",
        "architecture has already, which are not put on a second time. What is refused can still scale its width.",
        "",
        "It does not show that the best learning rate carries over. The sizes of the tiny models, not the defaults of",
        "their configurations, decide which kinds of layers there are.",
        "",
        "; ".join(f"{verdict}: {number}" for verdict, number in counts.most_common()) + ".",
        "",
        "| model type | verdict | writers, or why not | by itself |",
        "|---|---|---|---|",
    ]
    for row in rows:
        cells = (row.model_type, row.verdict, row.detail.replace("|", "/"), row.powers)
        lines.append("| " + " | ".join(cells) + " |")
    output.write_text("\n".join(lines) + "\n")


def _row(line: str) -> Row:
    return Row(**json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=None, help="model types; default: all")
    parser.add_argument("--output", type=Path, default=None, help="Markdown file; default: print only")
    parser.add_argument("--results", type=Path, default=None, help="one line per type as it is done; read at the start")
    asked = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    done = {}
    if asked.results is not None and asked.results.exists():
        done = {row.model_type: row for row in map(_row, asked.results.read_text().splitlines())}
    rows = []
    for model_type in asked.only or causal_model_types():
        start = time.perf_counter()
        row = done.get(model_type) or examine(model_type)
        rows.append(row)
        if asked.results is not None and model_type not in done:
            with asked.results.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        print(f"{model_type:28} {row.verdict:9} {time.perf_counter() - start:5.1f} s  {row.detail}", flush=True)
    print(Counter(row.verdict for row in rows))
    if asked.output is not None:
        write(rows, asked.output, f"python benchmarks/{Path(__file__).name} --output {asked.output}")


if __name__ == "__main__":
    main()
