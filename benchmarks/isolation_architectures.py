"""What keeps the documents of a row apart on every causal architecture that can be built small: a table.

python benchmarks/isolation_architectures.py [--only llama gpt2 ...] [--output docs/isolation_architectures.md]

Beside what `separate` decides, an independent comparison is made: packed documents against each of them in a forward
of its own, by a copy of the model with its own attention. Where it contradicts the choice, that is a silent leak.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, logging

from hfpretrain.attention import register_torch_varlen, varlen_attentions
from hfpretrain.data.collator import PackedCollator
from hfpretrain.data.isolation import ways
from hfpretrain.loss.forward import LogitsForward
from hfpretrain.small_models import VOCABULARY, NotBuildable, causal_model_types, tiny_config, tiny_model
from hfpretrain.training.separation import Separation, separate
from machine import describe_machine

ROW = 32  # tokens
ROWS = ((9, 14, 3, 6), (5, 16, 4))  # lengths of the documents; the second row has padding at its end
WINDOW = 6  # less than most documents, so that a lost or added window shows
WINDOW_NAMES = ("sliding_window", "local_attention", "attention_chunk_size")
SELECTED = 24  # tokens an index selects to attend to: more than a document has, less than a row
TOLERANCE = 1e-3  # largest difference over the standard deviation of the logits
Documents = Sequence[Sequence[np.ndarray]]


@dataclass(frozen=True)
class Row:
    """One line of the table; differences are the largest of a logit, over the standard deviation of the logits.

    Attributes:
        resets_only: difference to separate forwards with position_ids and the model's own attention.
        resets_verdict: what `measure_leak` makes of that.
        chosen, own: the way chosen among all, and among those that keep the model's own attention.
        difference, own_difference: to separate forwards, by that way; above TOLERANCE: a silent leak.
        unseparated: the same where documents are not told apart at all; must be large.
        reason: why no way was found.
    """

    model_type: str
    chosen: str
    reason: str = ""
    resets_only: float = math.nan
    resets_verdict: str = ""
    difference: float = math.nan
    own: str = ""
    own_difference: float = math.nan
    unseparated: float = math.nan

    @property
    def violations(self) -> list[str]:
        """Ways that were chosen although packed documents differ from separate ones."""
        pairs = ((self.chosen, self.difference), (self.own, self.own_difference))
        return [
            way for way, difference in pairs if way not in ("", "refused", "not built") and not difference <= TOLERANCE
        ]


def narrow_model(model_type: str) -> PreTrainedModel:
    """The tiny model with windows that are narrower than the documents; raises NotBuildable.

    Where an index selects the tokens to attend to (deepseek_v32), it selects all of a document: a selection among them
    is by scores of which many are exactly 0 in a new model, and the shape of the tensor, no neighbour, breaks the tie.
    """
    model, config = tiny_model(model_type), tiny_config(model_type)
    if not _narrow(config):
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.config.use_cache = False
    return model


def _narrow(config: PreTrainedConfig) -> bool:
    """Set every window of `config` and of its parts to WINDOW, index_topk to SELECTED; whether there was one."""
    found = False
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            found |= _narrow(value)
        elif name in WINDOW_NAMES and isinstance(value, int) and value > WINDOW:
            setattr(config, name, WINDOW)
            found = True
        elif name == "index_topk" and isinstance(value, int):
            setattr(config, name, SELECTED)
            found = True
    return found


def random_documents(lengths: Sequence[Sequence[int]]) -> Documents:
    generator = np.random.default_rng(7)
    return [[generator.integers(8, VOCABULARY, size=length) for length in row] for row in lengths]


def logits_of(model: PreTrainedModel, batch: Mapping[str, Any]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits: Tensor = LogitsForward(model)(model, inputs).logits
    return logits


def packed(model: PreTrainedModel, rows: Documents, collator: PackedCollator) -> list[Tensor]:
    """Logits of every document, [tokens, V] each, of one batch of these rows."""
    length = ROW if collator.mechanism != "single" else max(len(row[0]) for row in rows)
    blocks = []
    for row in rows:
        tokens = np.concatenate([*row, np.zeros(length, dtype=np.int64)])[:length]
        blocks.append({"input_ids": tokens, "piece_lengths": [len(document) for document in row]})
    logits = logits_of(model, collator(blocks)).reshape(len(rows), length, -1)
    ends = [np.cumsum([len(document) for document in row]) for row in rows]
    return [
        logits[i, end - len(document) : end]
        for i, row in enumerate(rows)
        for end, document in zip(ends[i], row, strict=True)
    ]


@torch.no_grad()
def difference_to_separate(
    model: PreTrainedModel, reference: PreTrainedModel, collator: PackedCollator, batches: Sequence[Documents]
) -> float:
    """Largest difference between a document in its row and in a forward of its own, over the logits' std."""
    worst = 0.0
    for rows in batches:
        documents = [document for row in rows for document in row]
        alone = [logits_of(reference, {"input_ids": torch.from_numpy(document)[None]})[0] for document in documents]
        apart = torch.stack([(a - b).abs().max() for a, b in zip(packed(model, rows, collator), alone, strict=True)])
        worst = max(worst, float(apart.max() / torch.cat(alone).std()))
    return worst


def examine(model_type: str) -> Row:
    """Build, decide, compare; a model that cannot be built small is listed as such."""
    try:
        model = narrow_model(model_type)
    except NotBuildable as error:
        return Row(model_type, "not built", " ".join(str(error).split())[:120])
    reference, untouched = copy.deepcopy(model), copy.deepcopy(model)
    rows = random_documents(ROWS)
    batches = ([rows[0]], rows)
    found = _separate(model, varlen_attentions())
    own = _separate(untouched, ())

    def difference(of: PreTrainedModel, collator: PackedCollator) -> float:
        try:
            return difference_to_separate(of, reference, collator, batches)
        except Exception:
            return math.nan

    resets = next(line for line in own.tried if line.startswith("by position_ids"))
    row = Row(
        model_type,
        chosen=str(found.way or ""),
        resets_only=difference(reference, PackedCollator("position_ids")),
        resets_verdict="isolated" if "do not see each other" in resets else "leak" if "see each" in resets else "fails",
        difference=difference(model, found.way.collator()) if found.way else math.nan,
        own=str(own.way or ""),
        own_difference=difference(untouched, own.way.collator()) if own.way else math.nan,
        unseparated=difference(reference, PackedCollator(None)),
    )
    single, reason = _single(reference) if found.way is None or own.way is None else (math.nan, "")
    name = "refused" if reason else "single"
    if own.way is None:
        row = replace(row, own=name, own_difference=single)
    return row if found.way else replace(row, chosen=name, difference=single, reason=reason)


def _separate(model: PreTrainedModel, attentions: Sequence[str]) -> Separation:
    return separate(
        ways(model.config, attentions=attentions, attn_implementation=None, sequence_length=ROW),
        model,
        wrapped=model,
        logits=lambda wrapped, batch: logits_of(model, batch),
        device=torch.device("cpu"),
    )


def _single(model: PreTrainedModel) -> tuple[float, str]:
    """Difference of one document a row, padded in one batch, to separate forwards; and why that is none."""
    rows = [[document] for row in random_documents(ROWS) for document in row]
    try:
        worst = difference_to_separate(model, model, PackedCollator("single"), [rows])
    except Exception as error:
        return math.nan, f"single: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
    if worst <= TOLERANCE:
        return worst, ""
    if (ahead := _sees_ahead(model)) > TOLERANCE:
        return worst, f"not causal: a last token changes earlier logits by {ahead:.0e} of their std"
    return worst, f"single differs from a document alone by {worst:.0e} of the logits' std; {_why(model)}"


@torch.no_grad()
def _why(model: PreTrainedModel) -> str:
    tokens = torch.from_numpy(random_documents([[9]])[0][0])[None]
    alone, placed = logits_of(model, {"input_ids": tokens}), {"position_ids": torch.arange(9)[None]}
    apart = float((alone - logits_of(model, {"input_ids": tokens} | placed)).abs().max() / alone.std())
    return "its own positions do not start at 0" if apart > TOLERANCE else "padding after a document counts"


@torch.no_grad()
def _sees_ahead(model: PreTrainedModel) -> float:
    """Largest change of a logit by the last token of the row, at all positions before it."""
    tokens = torch.from_numpy(random_documents([[ROW]])[0][0])[None]
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 17) % VOCABULARY
    logits, others = (logits_of(model, {"input_ids": ids})[:, :-1] for ids in (tokens, changed))
    return float((logits - others).abs().max() / logits.std())


def write(rows: Sequence[Row], output: Path, command: str) -> None:
    machine = ", ".join(f"{name}: {value}" for name, value in describe_machine(["torch", "transformers"]).items())
    lines = [
        "# What keeps packed documents apart, architecture by architecture",
        "",
        f"Made by `{command}` ({machine}).",
        "",
        f"Every causal architecture of the installed transformers that can be built small: rows of {ROW} tokens,",
        f"windows of {WINDOW}, float32, CPU. *Difference*: the largest of a logit between documents packed into",
        "rows and the same documents each in a forward of its own by the model's own attention, over the logits'",
        f"standard deviation; up to {TOLERANCE:g} is rounding. *position_ids only*: positions that restart and nothing",
        "else, and what is measured of it at the start of a run. *Chosen*: the first way that isolates; `single` (one",
        "document a row) where none does, `refused` where that differs as well. *Own attention only*: where",
        "`torch_varlen` is not tried.",
        "",
        *_summary(rows),
        "",
        "| model type | position_ids only | chosen | difference | own attention only | why refused |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        resets = f"{row.resets_verdict} {_number(row.resets_only)}".strip()
        own = row.own if row.own == row.chosen else f"{row.own} {_number(row.own_difference)}"
        cells = (row.model_type, resets, row.chosen, _number(row.difference), own, row.reason.replace("|", "/"))
        lines.append("| " + " | ".join(cells) + " |")
    output.write_text("\n".join(lines) + "\n")


def _summary(rows: Sequence[Row]) -> list[str]:
    """Counts of each way, silent leaks, and how often the comparison finds documents that nobody kept apart."""
    built = [row for row in rows if row.chosen != "not built"]
    controls = [row for row in built if not math.isnan(row.unseparated)]
    blind = [row.model_type for row in controls if row.unseparated <= TOLERANCE]
    silent = [f"{row.model_type} ({', '.join(row.violations)})" for row in rows if row.violations]
    counts = (Counter(row.chosen for row in rows), Counter(row.own for row in built))
    return [
        "- Chosen: " + "; ".join(f"{way}: {number}" for way, number in counts[0].most_common()),
        "- Own attention only: " + "; ".join(f"{way}: {number}" for way, number in counts[1].most_common()),
        f"- Silent leaks (chosen, and yet not as separate forwards): {len(silent)} {', '.join(silent)}".rstrip(),
        f"- Control: without resets, {len(controls) - len(blind)} of {len(controls)} are found to leak"
        + (f"; not: {', '.join(blind)}" if blind else ""),
    ]


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=None, help="model types; default: all")
    parser.add_argument("--output", type=Path, default=None, help="Markdown file; default: print only")
    asked = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    register_torch_varlen()
    rows = []
    for model_type in asked.only or causal_model_types():
        start = time.perf_counter()
        rows.append(row := examine(model_type))
        print(
            f"{model_type:28} {row.chosen:24} {row.difference:8.1e} own {row.own:12} {row.own_difference:8.1e} "
            f"resets {row.resets_verdict:8} {row.resets_only:8.1e} none {row.unseparated:8.1e} "
            f"{time.perf_counter() - start:5.1f} s {row.reason}{' SILENT LEAK !!!' if row.violations else ''}",
            flush=True,
        )
    print("\n".join(_summary(rows)))
    if asked.output is not None:
        write(rows, asked.output, f"python benchmarks/{Path(__file__).name} --output {asked.output}")


if __name__ == "__main__":
    main()
