"""Read the noise scale off finished runs, and what it says of the batch; or measure the critical batch by branching.

    python recipes/critical_batch.py runs/small runs/large --png noise.png --json noise.json
    python recipes/critical_batch.py --probe runs/large/checkpoint-4000 --probe_factors 1 2 4 --probe_tokens 16Mi

The first reads what `--log_noise_scale` logged: a table over tokens, what the run's batch costs if the noise scale is
the critical batch, a law over sizes, and a ramp to paste. That the noise scale is the critical batch is disputed
(McCandlish et al. 2018 find it so, Merrill et al. 2025 orders of magnitude too low on OLMo), so the ramp is a proposal.
The second measures: branches at 1, 2, 4, ... times the batch, learning rate by the square-root rule, each in a folder
beside the run, which stays as it is. The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hfpretrain.arguments.types import token_count
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.planning.batch_laws import power_law_through, steps_ratio, tokens_ratio
from hfpretrain.planning.critical_batch import (
    Reading,
    largest_harmless,
    loss_after,
    proposed_ramp,
    readings,
    settled_noise_scale,
)
from hfpretrain.training.branch import branch_point
from hfpretrain.training.checkpoints import TRAINER_STATE, latest_checkpoint

RECIPE = Path(__file__).with_name("pretrain.py")
TABLE_LINES = 12


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="output_dir of runs with --log_noise_scale")
    parser.add_argument("--png", type=Path, help="draw it (needs matplotlib: pip install -e '.[plot]')")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--probe", type=Path, help="a checkpoint to branch from")
    parser.add_argument("--probe_factors", type=int, nargs="+", default=[1, 2, 4], help="times its batch [1 2 4]")
    parser.add_argument("--probe_tokens", type=token_count, help="tokens of each branch: 16M, 16Mi")
    parser.add_argument("--launch", default="", help="'accelerate launch --config_file ...' where the run needs one")
    args = parser.parse_args(argv)
    if bool(args.runs) == bool(args.probe) or (args.probe and args.probe_tokens is None):
        parser.error("give run folders, or --probe CHECKPOINT with --probe_tokens")
    if args.probe:
        found = probe(args.probe, args.probe_factors, args.probe_tokens, shlex.split(args.launch))
    else:
        found = report(args.runs)
        if args.png:
            draw(found, args.png)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2, default=vars) + "\n")


# --- what was logged --------------------------------------------------------------------------------------------------


def read_run(folder: Path) -> dict[str, Any]:
    """A run's size and readings, from its trainer_state.json or, if it is not done, its newest checkpoint's."""
    checkpoint = latest_checkpoint(folder)
    states = [folder / TRAINER_STATE, *([checkpoint / TRAINER_STATE] if checkpoint else [])]
    state, record = next((path for path in states if path.is_file()), None), folder / "run.json"
    if state is None or not record.is_file():
        what = "no run of recipes/pretrain.py with a log is there yet"
        refuse([Problem(what, str(folder), "command line", "an output_dir with run.json and a checkpoint")])
    assert state is not None
    facts, lines = json.loads(record.read_text()), readings(json.loads(state.read_text())["log_history"])
    if settled_noise_scale(lines) is None:
        what = "no log line has a noise scale"
        remedy = "train with --log_noise_scale 1, in two micro-batches a step or more"
        refuse([Problem(what, str(state), "command line", remedy)])
    plan = {name: facts["plan"][name] for name in ("sequence_length", "world_size")}
    return {"run": str(folder), "parameters": facts["model_parameters"], **plan, "readings": lines}


def report(folders: Sequence[Path]) -> dict[str, Any]:
    """Print the tables of all runs; return every number."""
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        lines: list[Reading] = run["readings"]
        print(f"\n{run['run']}: {run['parameters']:,} parameters; tokens are input positions")
        print(f"{'tokens':>14} {'loss':>8} {'batch':>11} {'noise scale':>13} {'+-':>11} {'S/Smin':>8} {'E/Emin':>8}")
        defined = [line for line in lines if line.noise_scale_tokens is not None]
        for line in defined[:: max(len(defined) // TABLE_LINES, 1)]:
            scale, batch = float(line.noise_scale_tokens or 0), line.batch_tokens
            costs = f"{steps_ratio(batch, scale):8.2f} {tokens_ratio(batch, scale):8.2f}"
            print(f"{line.tokens:14,} {line.loss:8.4f} {batch:11,} {scale:13,.0f} {line.stderr_tokens:11,.0f} {costs}")
        run["noise_scale_tokens"], run["stderr_tokens"] = settled_noise_scale(lines) or (0.0, 0.0)
        stages = proposed_ramp(lines, sequence_length=run["sequence_length"], smallest_rows=run["world_size"])
        run["proposed_ramp"] = ",".join(f"{tokens:_}:{batch:_}" for tokens, batch in stages)
        print(
            f"noise scale over the last quarter {run['noise_scale_tokens']:,.0f} +- {run['stderr_tokens']:,.0f} tokens"
        )
        print(f"a proposal, no more (see --help): --batch_ramp {run['proposed_ramp'] or 'none: too few readings'}")
    found: dict[str, Any] = {"runs": runs}
    points = [(run["parameters"], run["noise_scale_tokens"]) for run in runs]
    if len({size for size, _ in points}) > 1:
        free, root = power_law_through(points, None), power_law_through(points)
        found["law"] = {"scale": free.scale, "exponent": free.exponent, "scale_of_root": root.scale}
        print(f"\nover sizes: B = {free.scale:.4g} N^{free.exponent:.3f}; with N^0.5: {root.scale:.4g} N^0.5")
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    """Noise scale over tokens, the hyperbola with each run's batch, and the law over sizes."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        what, remedy = "--png needs matplotlib", "pip install -e '.[plot]', or leave --png out"
        refuse([Problem(what, "it is not installed", "command line", remedy)])
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    over_tokens, hyperbola, sizes = figure.subplots(1, 3)
    curve = [10 ** (step / 20) for step in range(-40, 41)]  # batch over critical batch
    hyperbola.plot([tokens_ratio(x, 1) for x in curve], [steps_ratio(x, 1) for x in curve], color="grey")
    for run in found["runs"]:
        lines = [line for line in run["readings"] if line.noise_scale_tokens is not None]
        x, y = [line.tokens for line in lines], [line.noise_scale_tokens for line in lines]
        (drawn,) = over_tokens.plot(x, y, label=f"{run['run']} ({run['parameters']:,})")
        high = [2 * line.noise_scale_tokens - line.least for line in lines]
        over_tokens.fill_between(x, [line.least for line in lines], high, alpha=0.2)
        over_tokens.plot(x, [line.batch_tokens for line in lines], ":", color=drawn.get_color())
        batch, scale = lines[-1].batch_tokens, run["noise_scale_tokens"]
        hyperbola.plot(tokens_ratio(batch, scale), steps_ratio(batch, scale), "o", label=f"batch {batch:,}")
        sizes.plot(run["parameters"], scale, "o")
    if "law" in found:
        x = sorted(run["parameters"] for run in found["runs"])
        sizes.plot(x, [found["law"]["scale"] * n ** found["law"]["exponent"] for n in x], label="fit")
        sizes.plot(x, [found["law"]["scale_of_root"] * n**0.5 for n in x], "--", label="N^0.5")
        sizes.legend()
    over_tokens.set(yscale="log", xlabel="tokens", ylabel="tokens", title="noise scale (dotted: batch)")
    hyperbola.set(xscale="log", yscale="log", xlabel="E/Emin", ylabel="S/Smin", title="if it is the critical batch")
    sizes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="tokens", title="over sizes")
    over_tokens.legend()
    hyperbola.legend()
    figure.savefig(path)


# --- a measurement ----------------------------------------------------------------------------------------------------


def probe(checkpoint: Path, factors: list[int], tokens: int, launch: list[str]) -> dict[str, Any]:
    """Train the branches that are not done, one after another; print and return their losses after the same tokens."""
    point = branch_point(checkpoint, factors=factors, tokens=tokens)
    if point.world_size > 1 and not launch:
        what = f"the run had {point.world_size} processes, and its checkpoint may need as many"
        refuse([Problem(what, "no --launch", "command line", "--launch 'accelerate launch --config_file FILE ...'")])
    parent = checkpoint.resolve().parent
    losses, measured = {}, "held-out loss"
    for factor in sorted(factors):
        folder = parent.with_name(f"{parent.name}-probe") / f"{checkpoint.name}-{tokens}-x{factor}"
        if not (folder / TRAINER_STATE).exists():  # written when a run is done
            folder.mkdir(parents=True, exist_ok=True)
            settings = folder / "branch.yaml"
            settings.write_text(yaml.safe_dump(point.branch(factor, tokens=tokens, output_dir=folder)))
            subprocess.run([*(launch or [sys.executable]), str(RECIPE), "--config", str(settings)], check=True)
        if not (folder / TRAINER_STATE).exists():
            sys.exit(f"the branch {folder} was stopped; the same command goes on")
        log = json.loads((folder / TRAINER_STATE).read_text())["log_history"]
        evaluations = [line["eval_loss"] for line in log if "eval_loss" in line]
        if evaluations:
            losses[factor] = evaluations[-1]
        else:
            losses[factor] = loss_after(readings(log), point.tokens + tokens // 2)
            measured = "training loss over the second half"
    print(f"\n{tokens:,} tokens from {checkpoint}, {measured}:")
    print(f"{'factor':>7} {'batch':>12} {'learning rate':>14} {'steps':>9} {'loss':>9}")
    for factor, loss in losses.items():
        batch = factor * point.batch_tokens
        print(f"{factor:7} {batch:12,} {point.at_batch(factor):14.3e} {tokens // batch:9,} {loss:9.4f}")
    best = largest_harmless(losses)
    more = ", the largest tried: there may be more" if best == max(losses) else ""
    print(f"k* = {best}{more}: at most 0.01 nats above every smaller batch, {best * point.batch_tokens:,} tokens")
    return {"losses": losses, "largest_harmless": best, "critical_batch_tokens": best * point.batch_tokens}


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(str(error))
