"""The coordinate check on every causal architecture that can be built small, with muP and without: a table.

    python benchmarks/mup_architectures.py --output docs/mup_architectures.md
    python benchmarks/mup_architectures.py --only llama gpt2

Widths, steps and learning rate are the same for all. What is not flat with one seed is measured again with four, and
that counts. One line of JSON is added to `--results` as soon as an architecture is done: the same command continues a
run that was stopped, and makes the table of these lines.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import torch
import transformers
from transformers import logging

from architectures import time_limit
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.mup.coord_check import LEARNING_RATE, ROWS, TOKENS, CoordCheck, coord_check
from hfpretrain.mup.infer import study
from hfpretrain.mup.slopes import FLAT, FLAT_CHANGE
from hfpretrain.mup.width import hidden_size, scale_width
from hfpretrain.small_models import NotBuildable, causal_model_types, tiny_config, tiny_model
from machine import describe_machine

WIDTHS, STEPS, MORE_SEEDS = (64, 128, 256), 4, 4
CPU_SECONDS = 300  # for one architecture


EXPLANATION = f"""
Every causal architecture of the installed transformers, in its smallest form: widths {", ".join(map(str, WIDTHS))}
({min(WIDTHS)} is the base), {STEPS} AdamW steps of {LEARNING_RATE} on {ROWS} rows of {TOKENS} random tokens, float32,
one seed; what is not flat then is measured again with {MORE_SEEDS} seeds, and that counts. The same for all. One by
itself, with every slope: `python recipes/coord_check.py --model_type NAME --widths {" ".join(map(str, WIDTHS))}`.

- *Size*: the steepest slope of log2 mean |x| of a module's output against log2 width after the last step; *change*: of
  what the steps changed about it. Both ways count where the output has a dimension that grows; where not (logits,
  router scores, low ranks), upwards only. A module that is fed with such scores and nothing else answers downwards for
  its own part: what it is fed with is taken off.
- *flat*: less than {FLAT} in size and {FLAT_CHANGE} in change, for every module; a rate or an initialisation that is
  wrong by sqrt(width) shows 0.5. *Refused*: muP does not know how, and says so before a run.
- *Without muP*: the steepest of either slope with the architecture's own initialisation and one learning rate for all
  widths. This negative control must not be flat.

What this check cannot see: whether the best learning rate is the same (few steps, random tokens, no schedule); weight
decay (none here; `tests/test_mup_apply.py`) and Adam's epsilon (1e-12 here; `tests/test_mup_gradients.py`); parameters
that a forward pass of text does not use, such as image encoders; one bad layer among many of its kind, because they are
averaged; bare tensors inside of a module, except by what it returns; a readout that is too small; dimensions other than
the last; other depths, head sizes and numbers of experts; and what is named as too noisy.

What is behind those that are not flat:

- `dory` normalises to length 1: its residual stream is 1/sqrt(width) by construction, and so is all that is made of it,
  at every size and change alike. The check has no unit of its own for that. Its head takes the power out again.
- `xlstm` starts its gates at zero: they are their change and nothing else. At these widths that is mostly the sum of
  what {ROWS * TOKENS} tokens ask for independently, which falls with 1/sqrt(width); with 12 tokens the same slopes
  are -0.09 (`python recipes/coord_check.py --model_type xlstm --widths 64 128 256 --rows 1 --tokens 12 --seeds 2`).
- Probably, not isolated by an experiment: `roc_bert` puts embeddings of pronunciation and shape, which do not grow,
  beside those that do, and one rule cannot hold for both parts of its fan-in; `longcat_flash` has experts that hand on
  what they get, 500 times as large as what the others give, so that the size is the share of tokens that is sent to
  them, a few choices at random.
"""


@dataclass(frozen=True)
class Row:
    """One architecture.

    Attributes:
        verdict: flat, not flat, refused (by muP), not built, or failed.
        reason: why it is none of the first; where it is not flat, everything that is not.
        size, change, control: the steepest slope of size and of change with muP and of either without, with its layer.
        control_verdict: of the standard parametrisation.
        made_with: widths, steps and so on.
    """

    model_type: str
    verdict: str
    made_with: str
    reason: str = ""
    tied: bool = False
    seeds: int = 1
    size: str = ""
    change: str = ""
    control: str = ""
    control_verdict: str = ""
    cpu_seconds: float = 0.0


def made_with() -> str:
    return f"widths {WIDTHS}, {STEPS} steps of {LEARNING_RATE}, transformers {transformers.__version__}"


def examine(model_type: str) -> Row:
    """Build, check with muP and without; whatever happens is a row."""
    start = time.process_time()
    try:
        with time_limit(CPU_SECONDS, of_cpu=True):
            tiny_model(model_type)
            config = tiny_config(model_type)
            seen = study(scale_width(config, Fraction(min(WIDTHS), hidden_size(config))))
            check = coord_check(config, widths=WIDTHS, steps=STEPS, seen=seen)
            if check.fault:
                check = coord_check(config, widths=WIDTHS, steps=STEPS, seeds=MORE_SEEDS, seen=seen)
            control = coord_check(config, widths=WIDTHS, steps=STEPS, standard=True, seen=seen)
    except NotBuildable as error:
        return Row(model_type, "not built", made_with(), one_line(error))
    except ConfigError as error:
        return Row(model_type, "refused", made_with(), "; ".join(map(in_short, error.problems)))
    except Exception as error:  # a row of the table, whatever an architecture's code raises
        return Row(model_type, "failed", made_with(), f"{type(error).__name__}: {one_line(error)}")
    return Row(
        model_type,
        check.verdict,
        made_with(),
        reason=faults(check),
        tied=check.tied,
        seeds=check.seeds,
        size=steepest(check, (0,)),
        change=steepest(check, (1,)),
        control=steepest(control, (0, 1)),
        control_verdict=control.verdict,
        cpu_seconds=time.process_time() - start,
    )


def steepest(check: CoordCheck, which: Sequence[int]) -> str:
    """The steepest slope, of size (0) or change (1), as far as it counts (see `Slope.steepness`), and its layer."""
    measured = [(s, i) for s in check.slopes for i in which if s.measured]
    worst, index = max(measured, key=lambda pair: pair[0].steepness[pair[1]])
    upwards = worst.steepness[index] == (worst.size, worst.change)[index]
    return f"{worst.steepness[index] * (1 if upwards else -1):+.2f} {worst.kind}"


def faults(check: CoordCheck) -> str:
    bad = [f"{s.kind} {s.size:+.2f} / {s.change:+.2f}" for s in check.slopes if not s.flat]
    noisy = [f"{s.kind} {s.size:+.2f} +- {s.errors[0]:.2f}" for s in check.slopes if not s.measured]
    return ", ".join(bad) + (f"{'; ' if bad else ''}too noisy to tell: {', '.join(noisy)}" if noisy else "")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def in_short(problem: Problem) -> str:
    return f"{' '.join(problem.what.split())}: {' '.join(problem.given.split())[:160]}; remedy: {problem.remedy}"


def read(results: Path) -> dict[str, Row]:
    """The rows of an earlier run by model type; refused where they were made otherwise than these would be."""
    if not results.exists():
        return {}
    rows = {row.model_type: row for row in (Row(**json.loads(line)) for line in results.read_text().splitlines())}
    if others := {row.made_with for row in rows.values()} - {made_with()}:
        what, remedy = "these results were made with other settings", "another file, or delete this one"
        refuse([Problem(what, "; ".join(sorted(others)), f"--results {results}", remedy)])
    return rows


def write(rows: Sequence[Row], output: Path, command: str) -> None:
    machine = ", ".join(f"{name}: {value}" for name, value in describe_machine(["torch", "transformers"]).items())
    lines = [
        "# Coordinate check of muP, architecture by architecture",
        "",
        f"Made by `{command}` ({machine}).",
        "",
        *EXPLANATION.strip().splitlines(),
        "",
        *summary(rows),
        "",
        "| model type | verdict | tied | seeds | size | change | without muP | what is not flat, or why not |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        measured = row.verdict in ("flat", "not flat")
        tied, seeds = ("yes" if row.tied else "no", str(row.seeds)) if measured else ("", "")
        cells = (row.model_type, row.verdict, tied, seeds, row.size, row.change, row.control, row.reason)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    output.write_text("\n".join(lines) + "\n")


def summary(rows: Sequence[Row]) -> list[str]:
    """How many of each; and whether the check without muP fails, as it must."""
    measured = [row for row in rows if row.control]
    fails = [row for row in measured if row.control_verdict == "not flat"]
    passes = ", ".join(row.model_type for row in measured if row not in fails)
    missing = sorted(set(causal_model_types()) - {row.model_type for row in rows})
    return [
        "- Verdicts: " + "; ".join(f"{name}: {n}" for name, n in Counter(row.verdict for row in rows).most_common()),
        f"- Without muP the same check says not flat on {len(fails)} of {len(measured)}"
        + (f"; flat: {passes}" if passes else ""),
        *([f"- Not run: {len(missing)} of {len(causal_model_types())}: {', '.join(missing)}"] if missing else []),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=None, metavar="MODEL_TYPE", help="default: all")
    parser.add_argument("--results", type=Path, default=None, help="lines of JSON, read and added to; default: none")
    parser.add_argument("--output", type=Path, default=None, help="Markdown file; default: print only")
    asked = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    done = {} if asked.results is None else read(asked.results)
    for model_type in asked.only or causal_model_types():
        if model_type in done:
            continue
        row = done[model_type] = examine(model_type)
        if asked.results is not None:
            with asked.results.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{model_type:28} {row.verdict:9} {row.size} | {row.change} | without {row.control} | {row.reason} | "
            f"{row.cpu_seconds:.1f} s, peak {peak_mib:.0f} MiB",
            flush=True,
        )
    rows = [done[name] for name in sorted(done)]
    print("\n".join(summary(rows)))
    if asked.output is not None:
        write(rows, asked.output, f"python benchmarks/{Path(__file__).name} --output {asked.output}")


if __name__ == "__main__":
    main()
