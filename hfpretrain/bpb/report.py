"""A comparison (`result.comparison`) for people: tables on a terminal, bars in a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_WIDTH = 150  # where output goes to a file, rich would take 80 columns and fold every row
_DOMAINS_SHOWN = 30


def print_report(result: Mapping[str, Any]) -> None:
    """Models with references, domains, pairs, and whatever a reader of the figures should know."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    data = result["data"]
    console.print(
        f"{data['documents']:,} documents, {data['text_bytes']:,} bytes, the largest {data['largest_share']:.1%} of "
        f"them; fingerprint {data['fingerprint']}"
    )
    console.print(_model_table(result))
    domains = next(iter(result["models"].values()))["domains"]
    if len(domains) > 1:
        console.print(_domain_table(result, domains))
    if result["pairs"]:
        console.print(_pair_table(result))
    for line in _lines(result):
        console.print(escape(line), soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=bool(number))
    return table


def _range(interval: Mapping[str, float], sign: str = "") -> str:
    low, high = interval["low"], interval["high"]
    return "-" if math.isnan(low) else f"{low:{sign}.4f} to {high:{sign}.4f}"


def _model_table(result: Mapping[str, Any]) -> Table:
    table = _table(
        "bits per byte of the whole text; fewer are better",
        *("model", "bpb", "95 % interval", "nats/token", "tokens/byte", "tokens", "bytes", "lossy", "prefix"),
    )
    for name, model in result["models"].items():
        prefix = model["scoring"]["prefix_id"]
        table.add_row(
            escape(name),
            f"{model['bpb']:.4f}",
            _range(model["interval"]),
            f"{model['nats_per_token']:.4f}",
            f"{model['tokens_per_byte']:.4f}",
            f"{model['tokens']:,}",
            f"{model['text_bytes']:,}",
            f"{model['lossy_documents']:,}",
            "none" if prefix is None else str(prefix),
        )
    table.add_section()
    for name, coder in result["reference"].items():
        table.add_row(name, f"{coder['bpb']:.4f}", *[""] * 4, f"{result['data']['text_bytes']:,}")
    for name, model in result["models"].items():
        vocabulary = f"{model['scoring']['vocabulary']:,}"
        table.add_row(escape(f"uniform over {vocabulary}: {name}"), f"{model['uniform_bound']:.4f}")
    return table


def _domain_table(result: Mapping[str, Any], domains: Mapping[str, Any]) -> Table:
    largest = sorted(domains, key=lambda name: -domains[name]["text_bytes"])
    left = len(largest) - _DOMAINS_SHOWN
    more = f"; the {_DOMAINS_SHOWN} largest, {left} more are in the JSON" if left > 0 else ""
    table = _table(f"bits per byte by domain{more}", "domain", "documents", "bytes", *map(escape, result["models"]))
    for name in largest[:_DOMAINS_SHOWN]:
        figures = [model["domains"][name]["bpb"] for model in result["models"].values()]
        sizes = f"{domains[name]['documents']:,}", f"{domains[name]['text_bytes']:,}"
        table.add_row(escape(name), *sizes, *("-" if math.isnan(bpb) else f"{bpb:.4f}" for bpb in figures))
    return table


def _pair_table(result: Mapping[str, Any]) -> Table:
    title = "pairs: second minus first on the same documents, drawn together"
    table = _table(title, "first", "second", "difference", "95 % interval", "second better on", "so")
    for pair in result["pairs"]:
        difference = pair["difference"]
        better = pair["second"] if difference["value"] < 0 else pair["first"]
        table.add_row(
            escape(pair["first"]),
            escape(pair["second"]),
            f"{difference['value']:+.4f}",
            _range(difference, "+"),
            f"{pair['better_documents']:,} of {pair['documents']:,}",
            escape(f"{better} is better") if pair["decided"] else "not decided",
        )
    return table


def _lines(result: Mapping[str, Any]) -> list[str]:
    models, data, choices = result["models"], result["data"], result["choices"]
    lines = []
    for name, model in models.items():
        scoring = model["scoring"]
        lines.append(f"prefix    {name}: {scoring['prefix_id']}, {model['prefix_why']}")
        lines.append(
            f"windows   {name}: {scoring['max_length']:,} tokens, stride {scoring['stride']:,}; a token saw "
            f"{scoring['mean_context']:,.0f} tokens ({model['mean_context_bytes']:,.0f} bytes) before it on average"
        )
    lines += [f"note      {line}" for line in result["disagreements"]]
    lines += [f"note      {name}: {note}" for name, model in models.items() for note in model["notes"]]
    if len({model["scoring"]["max_length"] for model in models.values()}) > 1:
        lines.append("note      the models see windows of different lengths; --max_length makes them equal")
    lines += [f"warning   {line}" for line in data["warnings"]]
    if data["lossy"]:
        done = {"exclude": "left out for every model", "keep": "kept: who loses text is flattered"}[choices["lossy"]]
        lines.append(f"lossy     {len(data['lossy'])} documents, {done}")
        for identity, reasons in data["lossy"].items():
            lines += [f"          {identity}: {label}: {reason}" for label, reason in reasons.items()]
    return lines


def draw_chart(result: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Bars of bits per byte with their 95 % intervals, and a line for each compressor, into a picture at `path`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    names = list(result["models"])
    intervals = [model["interval"] for model in result["models"].values()]
    figure = Figure(figsize=(8, 1.5 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots()
    values = [one["value"] for one in intervals]
    known = [not math.isnan(one["low"]) for one in intervals]
    # A percentile interval need not hold the value itself; an error bar cannot be negative.
    below = [max(one["value"] - one["low"], 0) if k else 0 for one, k in zip(intervals, known, strict=True)]
    above = [max(one["high"] - one["value"], 0) if k else 0 for one, k in zip(intervals, known, strict=True)]
    axes.barh(names, values, xerr=[below, above], capsize=4, color="tab:blue", alpha=0.8)
    for number, (name, coder) in enumerate(result["reference"].items()):
        axes.axvline(coder["bpb"], color=f"C{number + 1}", linestyle="--", label=name)
    axes.invert_yaxis()
    axes.set_xlabel(f"bits per byte of {result['data']['text_bytes']:,} bytes, 95 % intervals over documents")
    if result["reference"]:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(Path(path), dpi=120)
