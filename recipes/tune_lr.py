"""Find the learning rate on narrow proxies of a run, under the run's own recipe; muP carries it to the run's width.

    python recipes/tune_lr.py --config my_run.yaml --widths 64 128 --learning_rates 1e-3 2e-3 4e-3 8e-3 --seeds 2 \\
        --output_dir runs/tune --json tune.json --png tune.png

All other flags are those of pretrain.py, and so is each trial: data, batch, schedule and depth are the run's. Width
(all widths in proportion), learning rate and seed are the trial's, which is scored at its end only. Each has a folder,
output_dir/width-64/lr-0.002/seed-42, with its log.txt and a trial.yaml that pretrain.py runs alone. Under `accelerate
launch` all ranks run the trials one after another. The same command goes on with a sweep that was stopped; with more
rates or seeds it runs those only. Of a finished trial all but trial.yaml and outcome.json may be deleted.

The muP base is the run's, else the smallest proxy. `--standard` is the control: no muP, one rate for all parameters.
A short run prefers higher rates than a long one: give the trials the run's own length where you can.
Exit status 0: a rate was chosen; 1: the best one is at an edge of the grid, and the rates to add are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pretrain
from hfpretrain.arguments import ModelArguments, PretrainArguments, parse
from hfpretrain.data.sources import SourceError
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.launch_checks import close_process_group
from hfpretrain.mup.transfer import Point, Transfer
from hfpretrain.training.run_length import derive
from hfpretrain.training.sweep import from_first_rank, run_trials
from hfpretrain.training.trials import Trial, changed_settings, check_logging, plan_trials, read_outcomes


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    # 1. Which trials, and everything about them that cannot be.
    options, run_flags = read(argv)
    trials, rank = plan(options, run_flags)

    # 2. Run those that are not done.
    run_trials(trials, pretrain.main, rank=rank)

    # 3. What they say.
    found, transfer = summarise(trials, standard=options.standard)
    if rank == 0:
        print(f"\n{found['form']}, {found['measured']} in nats, seeds {found['seeds']}\n")
        print(f"{transfer}\n\n{verdict(found)}")
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if options.png:
            draw([found], options.png)
    return found


def plan(options: argparse.Namespace, run_flags: list[str]) -> tuple[list[Trial], int]:
    """(the trials in their order, this process's rank).

    Raises:
        ConfigError: everything that cannot be about the run, the sweep or the trials that are there already.
    """
    model_args, data_args, args = parse(run_flags)
    run = derive(args, data_args, world_size=args.world_size)
    refuse(check(options, model_args, args) + check_logging(data_args, args, run))
    trials = plan_trials(
        model_args,
        data_args,
        args,
        widths=options.widths,
        learning_rates=options.learning_rates,
        seeds=options.seeds,
        standard=options.standard,
    )
    refuse(from_first_rank(changed_settings(trials)))
    return trials, args.process_index


def read(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """(this recipe's flags, those of pretrain.py)."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", required=True, help="hidden sizes of the proxies")
    parser.add_argument("--learning_rates", type=float, nargs="+", required=True, help="in factors of 2, 3 or more")
    parser.add_argument("--seeds", type=int, default=1, help="trials of each: the run's seed and those after it [1]")
    parser.add_argument("--standard", action="store_true", help="without muP: the control")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw loss against rate (needs matplotlib)")
    return parser.parse_known_args(argv)


def check(options: argparse.Namespace, model_args: ModelArguments, args: PretrainArguments) -> list[Problem]:
    """Everything about the sweep that cannot be."""
    problems = []

    def add(what: str, given: Any, remedy: str) -> None:
        problems.append(Problem(what, str(given), "command line", remedy))

    if min(options.widths) < 1 or len(set(options.widths)) < len(options.widths):
        add("widths are whole numbers of at least 1, each once", options.widths, "such as --widths 64 128")
    rates = options.learning_rates
    if len(set(rates)) < max(len(rates), 3) or not all(0 < rate < math.inf for rate in rates):
        what = "a best rate needs worse ones on both sides: three rates above 0 or more, each once"
        add(what, rates, "such as --learning_rates 1e-3 2e-3 4e-3 8e-3")
    if options.seeds < 1:
        add("no trial without a seed", options.seeds, "--seeds 1 or more")
    if model_args.model_name_or_path:
        add("stored weights have one width", model_args.model_name_or_path, "config_name or model_type")
    if args.resume_from_checkpoint != "auto":
        add("trials go on from their own checkpoints", args.resume_from_checkpoint, "leave resume_from_checkpoint out")
    if args.preflight_only:
        remedy = "pretrain.py --preflight_only, with the run's files or with a trial.yaml"
        add("a sweep has no preflight of its own", "preflight_only", remedy)
    if args.push_to_hub:
        add("trials are no models to publish", "push_to_hub", "leave push_to_hub out")
    if options.png:
        with contextlib.suppress(ImportError):
            import matplotlib  # noqa: F401

            return problems
        add("--png needs matplotlib", "it is not installed", "pip install -e '.[plot]', or leave --png out")
    return problems


def summarise(trials: Sequence[Trial], *, standard: bool) -> tuple[dict[str, Any], Transfer]:
    """All numbers of a finished sweep, JSON-able, and the curves behind them."""
    outcomes = read_outcomes(trials)
    points = [Point(t.width, t.learning_rate, t.seed, o.nats) for t, o in zip(trials, outcomes, strict=True)]
    transfer = Transfer.of(points)
    base = {name: trials[0].settings.get(name) for name in ("mup_base_width", "mup_base_config")}
    about = {
        "form": "standard" if standard else "muP",
        "mup": {name: value for name, value in base.items() if value},
        "measured": next((outcome.measured for outcome in outcomes if outcome.measured), "no loss, all diverged,"),
        "seeds": sorted({trial.seed for trial in trials}),
        "parameters": {t.width: o.parameters for t, o in zip(trials, outcomes, strict=True)},
    }
    return about | transfer.as_dict(), transfer


def verdict(found: Mapping[str, Any]) -> str:
    """The lines to paste, or what is missing for them."""
    choice = found["choice"]
    if choice is None:
        rates = " ".join(f"{rate:.4g}" for rate in sorted({r for width in found["widths"] for r in width["missing"]}))
        return f"no rate is chosen: repeat the command with these --learning_rates as well: {rates}"
    if found["form"] == "standard":
        return "the control: without muP the rate of a proxy is not that of a wider model, so there is nothing to paste"
    between = f"{choice['low']:.2g} to {choice['high']:.2g}, from width {choice['width']}"
    lines = [f"{name}: {json.dumps(value)}" for name, value in found["mup"].items()]
    return "\n".join(["for the run's YAML:", "", f"learning_rate: {choice['learning_rate']:.2g}   # {between}", *lines])


def draw(forms: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss against learning rate, a panel per form and a line per width; shaded: the seeds; crosses: the optima."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * len(forms), 4.8), layout="constrained")
    panels = figure.subplots(1, len(forms), sharey=True, squeeze=False)[0]
    for axes, found in zip(panels, forms, strict=True):
        for index, width in enumerate(found["widths"]):
            colour, optimum = f"C{index}", width["optimum"]
            rows = {row["learning_rate"]: row["by_seed"] for row in width["losses"] if None not in row["by_seed"]}
            mean = {rate: sum(losses) / len(losses) for rate, losses in rows.items()}
            axes.plot(list(mean), list(mean.values()), marker="o", color=colour, label=f"width {width['width']}")
            low, high = ([pick(losses) for losses in rows.values()] for pick in (min, max))
            axes.fill_between(list(rows), low, high, color=colour, alpha=0.25)
            if optimum is not None:
                at, factor = optimum["learning_rate"], 2.0 ** max(optimum["resolution"], optimum["stderr"] or 0.0)
                span = [[at - at / factor], [at * factor - at]]
                axes.errorbar(at, mean[width["best"]], xerr=span, fmt="x", color=colour, capsize=3)
        axes.set(title=found["form"], xlabel="learning rate" + (", at the base" if found["form"] == "muP" else ""))
        axes.set_xscale("log", base=2)
        axes.legend()
    panels[0].set_ylabel(f"{forms[0]['measured']} (nats)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    # DeepSpeed calls collectives by names that torch 2.13 calls old, once per bucket and step.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*torch\.distributed\.\w+` is deprecated")
    status: int | str
    try:
        status = 0 if main()["choice"] is not None else 1
    except (ConfigError, SourceError) as error:
        status = str(error) if os.environ.get("RANK", "0") == "0" else 1  # every rank found the same
    finally:
        close_process_group()
    sys.exit(status)
