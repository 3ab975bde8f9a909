"""Does the best learning rate stay where it is when the width grows? muP against the standard form, 32 to 256.

    python benchmarks/mup_transfer.py --folder runs/mup_transfer     # docs/mup_transfer.md, .json and .png

Both forms start from one model: an untied Llama of width 32 with heads of 16, where they are the same to the last bit
(checked). Data, batch, schedule, weight decay and clipping are the same at every width and in both forms, and nothing
is tuned for either but the learning rate. All trials are those of recipes/tune_lr.py, so the same command goes on where
it was stopped; `--forms muP` and `--forms standard` can run side by side before the report is made of both.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hfpretrain.training.sweep import run_trials
from machine import describe_machine

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes"))
import pretrain
import tune_lr

REPOSITORY = Path(__file__).resolve().parents[1]
HEAD, ROW = 16, 256
MARKS = ("<!-- from here: what benchmarks/mup_transfer.py found -->", "<!-- to here -->")
# Width -> log2 of its rates, seven for each. They differ because the optima do: all have worse rates on both sides.
GRIDS = {
    "muP": {width: range(-9, -2) for width in (32, 64, 128, 256)},
    "standard": {32: range(-9, -2), 64: range(-10, -3), 128: range(-10, -3), 256: range(-11, -4)},
}
OVERRIDES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 32 // HEAD,
    "num_key_value_heads": 32 // HEAD,
    "head_dim": HEAD,
    "max_position_embeddings": ROW,
    # What a matrix of width 768 gets from the usual 0.02: 0.02 * sqrt(768 / 32).
    "initializer_range": 0.1,
}
SETTINGS: dict[str, Any] = {
    "dataset": "stdlib",
    "tokenizer_name": "bytes",
    "validation_fraction": 0.002,
    "sequence_length": ROW,
    "model_type": "llama",
    "config_overrides": ",".join(f"{name}={value}" for name, value in OVERRIDES.items()),
    "batch_tokens": 1024,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 16,
    "max_steps": 192,
    "lr_scheduler_type": "cosine",
    "warmup_fraction": 0.1,
    "logging_steps": 16,
    "eval_strategy": "no",  # the end is what counts, and is always scored
    "disable_tqdm": "true",
}


def sweep(form: str, folder: Path, seeds: int) -> dict[str, Any]:
    """The numbers of one form; trials that are not done are run, all widths at one seed before the next."""
    run = [str(word) for name, value in SETTINGS.items() for word in (f"--{name}", value)]
    run += ["--output_dir", str(folder / form.lower()), "--seeds", str(seeds)]
    run += ["--standard"] if form == "standard" else ["--mup_base_width", str(OVERRIDES["hidden_size"])]
    trials = []
    for width, powers in GRIDS[form].items():
        rates = [repr(2.0**power) for power in powers]
        trials += tune_lr.plan(*tune_lr.read([*run, "--widths", str(width), "--learning_rates", *rates]))[0]
    trials.sort(key=lambda trial: (trial.seed, -trial.width))
    run_trials(trials, pretrain.main, rank=0)
    found, transfer = tune_lr.summarise(trials, standard=form == "standard")
    print(f"\n{form}\n\n{transfer}")
    return found


def same_at_base(forms: Mapping[str, Mapping[str, Any]]) -> int:
    """Rates at which both forms ran at the base width, all with equal losses.

    Raises:
        AssertionError: they differ, so the forms do not start from one model.
    """
    losses = [
        {row["learning_rate"]: row["by_seed"] for row in found["widths"][0]["losses"]} for found in forms.values()
    ]
    both = losses[0].keys() & losses[1].keys()
    differing = {rate: (losses[0][rate], losses[1][rate]) for rate in both if losses[0][rate] != losses[1][rate]}
    assert not differing, f"the forms differ at their common base width: {differing}"
    return len(both)


def table(found: Mapping[str, Any]) -> list[str]:
    """Markdown: mean loss per width and rate (log2), the best in bold, and the regret at the widest."""
    rates = sorted({row["learning_rate"] for width in found["widths"] for row in width["losses"]})
    lines = [
        "| width | " + " | ".join(f"2^{math.log2(rate):g}" for rate in rates) + " | optimum | regret at the widest |"
    ]
    lines.append("|" + "---|" * (len(rates) + 3))
    for width in found["widths"]:
        losses = {row["learning_rate"]: row["by_seed"] for row in width["losses"]}
        cells = []
        for rate in rates:
            by_seed = losses.get(rate, ())
            cell = "diverged" if None in by_seed else f"{sum(by_seed) / len(by_seed):.3f}" if by_seed else ""
            cells.append(f"**{cell}**" if rate == width["best"] else cell)
        optimum, regret = width["optimum"], width["regret_at_widest"]
        cells.append("not bracketed" if optimum is None else f"2^{optimum['log2_rate']:.2f}")
        cells.append("" if regret is None else f"{regret:.3f}")
        lines.append(f"| {width['width']} | " + " | ".join(cells) + " |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/mup_transfer"), help="where the trials are")
    parser.add_argument("--forms", nargs="+", choices=list(GRIDS), default=list(GRIDS), help="which to run now")
    parser.add_argument("--seeds", type=int, default=2, help="of each trial")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "mup_transfer", help=".json, .png and .md")
    args = parser.parse_args(argv)
    forms = {form: sweep(form, args.folder, args.seeds) for form in args.forms}
    if len(forms) == len(GRIDS):
        write(forms, args.out)


def write(forms: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Raw numbers, figure, and the tables in the page beside them, between its marks."""
    about = describe_machine(("torch", "transformers"))
    raw = {"machine": about, "settings": SETTINGS, **forms}
    out.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    tune_lr.draw(list(forms.values()), out.with_suffix(".png"))
    lines = [", ".join(f"{name} {value}" for name, value in about.items()) + "."]
    lines.append(
        f"Equal to the last bit in both forms at width {OVERRIDES['hidden_size']}: {same_at_base(forms)} rates."
    )
    for form, found in forms.items():
        moved, between = found["best_moved_log2"], found["optimum_moved_log2"]
        optimum = "" if between is None else f", the optimum between the rates by {between:+.2f}"
        seeds = f"{found['measured']}, mean over {len(found['seeds'])} seed(s)"
        lines.append(f"\n**{form}**: the best rate moves by {moved:+g} factors of 2{optimum} ({seeds})\n")
        lines += table(found)
    print("\n".join(lines))
    page = out.with_suffix(".md")
    before, rest = page.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    page.write_text("\n".join([before + MARKS[0], *lines, MARKS[1] + after]), encoding="utf-8")


if __name__ == "__main__":
    main()
