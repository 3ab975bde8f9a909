"""Find the learning rate on narrow proxies of a run, under the run's own recipe; muP carries it to the run's width.

    python recipes/tune_lr.py --config my_run.yaml --widths 64 128 --learning_rates 1e-3 2e-3 4e-3 8e-3 --seeds 2 \\
        --output_dir runs/tune --json tune.json --png tune.png

All other flags are those of pretrain.py, and so is each trial: data, batch, schedule and depth are the run's, only width
(all widths in proportion), learning rate and seed differ. Under `accelerate launch` all ranks run the trials one after
another. Each has a folder, output_dir/width-64/lr-0.002/seed-42, with its log.txt and a trial.yaml that pretrain.py runs
alone. The same command goes on with a sweep that was stopped, and with more rates or seeds it runs those only.

The muP base is the run's, else the smallest proxy. `--standard` is the control: no muP, one rate for all parameters.
A short proxy run prefers higher rates than a long one: give the trials the run's own length where you can.
Exit status 0: a rate was chosen; 1: the best rate is at an edge of the grid, and the rates to add are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pretrain
from hfpretrain.arguments import parse
from hfpretrain.data.sources import SourceError
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.launch_checks import close_process_group
from hfpretrain.mup.transfer import Curve, Point, choose, curves, moved_log2, regret, vertex_moved_log2
from hfpretrain.preflight import check_start
from hfpretrain.training.spikes import ConsecutiveSpikesError
from hfpretrain.training.step import NonFiniteLossError
from hfpretrain.training.trials import Trial, changed_settings, plan_trials, read_outcome, record_outcome


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    # 1. Which trials; everything about them that cannot be.
    options, run_flags = read(argv)
    model_args, data_args, args = parse(run_flags)
    problems = check(options, model_args, args)
    run = check_start(data_args, args)
    if not (data_args.validation_fraction or data_args.eval_data) and args.logging_steps > run.num_steps / 10:
        what = "nothing is held out, and the training loss of the last tenth is not logged by itself"
        given = f"logging_steps={args.logging_steps:g} of {run.num_steps} steps"
        problems.append(Problem(what, given, "logging", f"logging_steps of at most {run.num_steps // 10 or 'fewer'}"))
    refuse(problems)
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

    # 2. Run those that are not done.
    run_trials(trials, is_first_rank=args.process_index == 0)

    # 3. What they say.
    found = summarise(trials, standard=options.standard)
    if args.process_index == 0:
        print(report(found))
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if options.png:
            draw({"standard" if options.standard else "muP": found}, options.png)
    return found


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


def check(options: argparse.Namespace, model_args: Any, args: Any) -> list[Problem]:
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
        what = "a sweep has no preflight of its own"
        add(
            what,
            "preflight_only",
            "pretrain.py --preflight_only, with the trial.yaml of a trial or with the run's files",
        )
    if options.png:
        with contextlib.suppress(ImportError):
            import matplotlib  # noqa: F401

            return problems
        add("--png needs matplotlib", "it is not installed", "pip install -e '.[plot]', or leave --png out")
    return problems


# --- trials -----------------------------------------------------------------------------------------------------------


def run_trials(trials: Sequence[Trial], *, is_first_rank: bool = True) -> None:
    """Run those that are not done, on all ranks alike; a trial that diverges is done, too.

    Raises:
        SystemExit: a trial was stopped; the same command goes on.
    """
    todo = from_first_rank([number for number, trial in enumerate(trials) if not trial.done])
    seconds: dict[int, list[float]] = {}
    if is_first_rank:
        print(f"sweep     {len(trials)} trials, {len(trials) - len(todo)} of them done", flush=True)
    for position, number in enumerate(todo):
        trial, started = trials[number], time.monotonic()
        if is_first_rank:
            trial.write()
        from_first_rank(None)  # the others wait for the file
        diverged = run_trial(trial)
        outcome = from_first_rank(record_outcome(trial, diverged=diverged) if is_first_rank else None)
        if outcome is None:
            raise SystemExit(f"{trial} was stopped; the same command goes on")
        seconds.setdefault(trial.width, []).append(time.monotonic() - started)
        if is_first_rank:
            said = f"diverged: {outcome.why}" if outcome.loss is None else f"{outcome.loss:.4f} nats"
            left = remaining_seconds([trials[later].width for later in todo[position + 1 :]], seconds)
            print(f"{position + 1:4} of {len(todo)}  {trial}: {said}; about {left / 60:.0f} min left", flush=True)


def run_trial(trial: Trial) -> str:
    """The trial through pretrain.py, its output in log.txt; why it diverged, or ""."""
    rank, on_terminate = os.environ.get("RANK", "0"), signal.getsignal(signal.SIGTERM)
    try:
        with output_in(trial.folder / ("log.txt" if rank == "0" else f"log-rank-{rank}.txt")):
            pretrain.main(["--config", str(trial.folder / "trial.yaml")])
    except (NonFiniteLossError, ConsecutiveSpikesError) as error:  # on all ranks alike
        return str(error)
    finally:
        signal.signal(signal.SIGTERM, on_terminate)  # a run that ends early leaves its own
        gc.collect()  # trainers and models hold one another
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return ""


@contextlib.contextmanager
def output_in(path: Path) -> Iterator[None]:
    """Everything that is written to the terminal, by libraries too, goes to the end of a file instead."""
    sys.stdout.flush(), sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        for descriptor, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


def from_first_rank(value: Any) -> Any:
    """Rank 0's value, on every rank: what it read from a disk, the others might read a moment later."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def remaining_seconds(widths: Sequence[int], seconds: Mapping[int, Sequence[float]]) -> float:
    """Of trials of these widths, by the mean of those that ran; a width of which none ran takes as long as the widest."""
    means = {width: sum(took) / len(took) for width, took in seconds.items()}
    return sum(means.get(width, max(means.values())) for width in widths)


# --- what they say ----------------------------------------------------------------------------------------------------


def summarise(trials: Sequence[Trial], *, standard: bool) -> dict[str, Any]:
    """All numbers of a finished sweep, JSON-able; a loss is None where the trial diverged."""
    outcomes = [read_outcome(trial) for trial in trials]
    if len(fingerprints := {outcome.data_fingerprint for outcome in outcomes}) > 1:
        what = "trials in this folder were trained on different data, so they cannot be compared"
        remedy = "another --output_dir for today's data"
        refuse([Problem(what, f"fingerprints {sorted(fingerprints)}", str(trials[0].folder), remedy)])
    points = [Point(t.width, t.learning_rate, t.seed, o.nats) for t, o in zip(trials, outcomes, strict=True)]
    found, base = curves(points), trials[0].settings
    choice = choose(found)
    return {
        "form": "standard" if standard else "muP",
        "mup": {name: base[name] for name in ("mup_base_width", "mup_base_config") if name in base},
        "measured": next((outcome.measured for outcome in outcomes if outcome.measured), "nothing: all diverged"),
        "seeds": sorted({trial.seed for trial in trials}),
        "widths": [width_numbers(curve, found[-1], trials, outcomes) for curve in found],
        "best_moved_log2": moved_log2(found),
        "optimum_moved_log2": vertex_moved_log2(found),
        "choice": None if choice is None else vars(choice),
    }


def width_numbers(curve: Curve, widest: Curve, trials: Sequence[Trial], outcomes: Sequence[Any]) -> dict[str, Any]:
    finite = {rate: tuple(x if math.isfinite(x) else None for x in row) for rate, row in curve.losses.items()}
    optimum, lost = curve.optimum, regret(curve, widest)
    return {
        "width": curve.width,
        "parameters": next(o.parameters for t, o in zip(trials, outcomes, strict=True) if t.width == curve.width),
        "losses": [
            {"learning_rate": rate, "by_seed": row, "spread": curve.spread(rate)} for rate, row in finite.items()
        ],
        "best": curve.best,
        "add": list(curve.missing()),
        "optimum": None if optimum is None else {**vars(optimum), "learning_rate": optimum.learning_rate},
        "regret_at_widest": lost if lost is not None and math.isfinite(lost) else None,
    }


def report(found: Mapping[str, Any]) -> str:
    """For people: a table per width, how far the best rate moves, and what to paste."""
    lines = [f"\n{found['form']}, {found['measured']} in nats, seeds {found['seeds']}"]
    for width in found["widths"]:
        lines.append(f"\nwidth {width['width']}, {width['parameters']:,} parameters")
        for row in width["losses"]:
            losses = [math.inf if loss is None else loss for loss in row["by_seed"]]
            spread = "" if row["spread"] is None else f" +- {row['spread']:.4f}"
            mark = "  <- best" if row["learning_rate"] == width["best"] and not math.isinf(sum(losses)) else ""
            each = "".join(f"{loss:9.4f}" for loss in losses)
            lines.append(f"{row['learning_rate']:12.4g}{each}   mean {sum(losses) / len(losses):.4f}{spread}{mark}")
        if width["add"]:
            rates = " ".join(f"{rate:.4g}" for rate in width["add"])
            lines.append(f"   not bracketed: the best rate is at an edge; extend --learning_rates by {rates}")
        else:
            best = width["optimum"]
            noise = "" if best["stderr"] is None else f", {best['stderr']:.2f} of it from the seeds"
            error = max(best["resolution"], best["stderr"] or 0.0)
            lines.append(f"   optimum {best['learning_rate']:.4g}, uncertain by 2^{error:.2f}{noise}")
    return "\n".join(lines + verdict(found))


def verdict(found: Mapping[str, Any]) -> list[str]:
    narrow, wide = found["widths"][0]["width"], found["widths"][-1]["width"]
    lines = []
    if narrow != wide:
        moved, between = found["best_moved_log2"], found["optimum_moved_log2"]
        exact = "" if between is None else f" (optimum between the rates: {between:+.2f})"
        lines.append(f"\nfrom width {narrow} to {wide} the best rate moves by {moved:+.2f} factors of 2{exact}")
        for width in found["widths"][:-1]:
            if width["regret_at_widest"] is not None:
                lines.append(
                    f"the best rate of width {width['width']} costs {width['regret_at_widest']:.4f} nats at {wide}"
                )
    choice = found["choice"]
    if choice is None:
        rates = sorted({rate for width in found["widths"] for rate in width["add"]})
        each = " ".join(f"{rate:.4g}" for rate in rates)
        lines.append(f"\nno rate is chosen: repeat the command with these --learning_rates as well: {each}")
    elif found["form"] == "standard":
        lines.append(
            "\nthe control: without muP the rate of a proxy is not the rate of a wider model; nothing to paste"
        )
    else:
        within = f"{choice['low']:.2g} to {choice['high']:.2g}"
        lines.append(f"\nfor the run's YAML:\n\nlearning_rate: {choice['learning_rate']:.2g}   # {within}")
        lines += [f"{name}: {json.dumps(value)}" for name, value in found["mup"].items()]
    return lines


def draw(forms: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Loss against learning rate, a line per width with the span of its seeds, a panel per form; optima as crosses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * len(forms), 4.8), layout="constrained")
    panels = figure.subplots(1, len(forms), sharey=True, squeeze=False)[0]
    for axes, (name, found) in zip(panels, forms.items(), strict=True):
        for index, width in enumerate(found["widths"]):
            colour = f"C{index}"
            rows = [row for row in width["losses"] if None not in row["by_seed"]]
            rates = [row["learning_rate"] for row in rows]
            means = [sum(row["by_seed"]) / len(row["by_seed"]) for row in rows]
            axes.plot(rates, means, marker="o", color=colour, label=f"width {width['width']}")
            low, high = ([pick(row["by_seed"]) for row in rows] for pick in (min, max))
            axes.fill_between(rates, low, high, color=colour, alpha=0.25)
            best = means[rates.index(width["best"])] if width["best"] in rates else None
            if width["optimum"] is not None and best is not None:
                error = 2.0 ** max(width["optimum"]["resolution"], width["optimum"]["stderr"] or 0.0)
                at = width["optimum"]["learning_rate"]
                axes.errorbar(at, best, xerr=[[at - at / error], [at * error - at]], fmt="x", color=colour, capsize=3)
        axes.set(title=name, xlabel="learning rate" + (" at the base width" if name == "muP" else ""))
        axes.set_xscale("log", base=2)
        axes.legend()
    panels[0].set_ylabel(f"{next(iter(forms.values()))['measured']} (nats)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    # DeepSpeed calls collectives by names that torch 2.13 calls old, once per bucket and step.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*torch\.distributed\.\w+` is deprecated")
    try:
        status = 0 if main()["choice"] is not None else 1
    except (ConfigError, SourceError) as error:
        status = str(error) if os.environ.get("RANK", "0") == "0" else 1  # every rank found the same
    finally:
        close_process_group()
    sys.exit(status)
