"""What is wrong with the text of a run: before anything of it is read, and once its documents are counted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from hfpretrain.arguments import DataArguments, PretrainArguments
from hfpretrain.data.documents import DataReport, Documents, shared_documents
from hfpretrain.data.packing import PackedIndex
from hfpretrain.data.sources import SourceError, Sources, find_sources, is_local
from hfpretrain.data.spans import plan_spans, read_span
from hfpretrain.errors import ConfigError, Problem
from hfpretrain.training.evaluation import METRICS
from hfpretrain.training.run_length import RunLength, source_of
from hfpretrain.verdicts import Verdicts

# Muennighoff et al. 2023 (arXiv:2305.16264): up to about 4 epochs, repeated text is worth nearly as much as new text.
EPOCHS_WORTH_REPEATING = 4


def check_sources(data_args: DataArguments, args: PretrainArguments) -> list[Problem]:
    """Training data that is not there, of an unknown kind, named twice, or without the text column in its first row.

    Only what lies here is looked at: hub data would have to be downloaded first, and the standard library is there.
    """
    problems = []
    local = [name for name in data_args.dataset if name != "stdlib" and is_local(name)]
    for name in local:
        try:
            _read_one(find_sources([name]), data_args.text_column)
        except (SourceError, OSError) as error:
            problems.append(text_problem(error, [name], args))
    if not problems and local:
        try:
            find_sources(local)
        except SourceError as error:
            problems.append(text_problem(error, local, args))
    return problems


def text_problem(error: Exception, names: Iterable[str], args: PretrainArguments) -> Problem:
    """An error of `hfpretrain.data` about these sources as a problem with the run."""
    remedy = "correct the path, the file or the column that the message names"
    return Problem(f"the text cannot be read: {error}", " ".join(names), source_of(args, "dataset"), remedy)


@contextmanager
def reading(names: Iterable[str], args: PretrainArguments) -> Iterator[None]:
    """Errors of these sources become a `ConfigError` with their problem."""
    try:
        yield
    except SourceError as error:
        raise ConfigError([text_problem(error, names, args)]) from error


def _read_one(sources: Sources, text_column: str) -> None:
    """Read the first row of the first file that has columns."""
    for span in plan_spans(sources):
        if span.kind != "text":
            next(read_span(span, text_column=text_column), None)
            return


def check_eval_data(data_args: DataArguments, args: PretrainArguments) -> list[Problem]:
    """Entries that are no name=source, names that are given twice or would be read as another metric, no such data."""
    problems = []
    seen: set[str] = set()
    for entry in data_args.eval_data:
        name, equals, source = entry.partition("=")
        what = ""
        remedy = "name=source, the name of letters, digits and - . _, such as wiki=wiki/*.jsonl"
        if not (equals and source and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)):
            what = "a held-out set is written name=source"
        elif name in seen:
            what, remedy = f"two held-out sets have the name {name}", "one name for each; one source may be a glob"
        elif name in METRICS:
            what = f"a held-out set named {name} would be logged as eval_{name}, which is a metric already"
            remedy = f"another name than {', '.join(METRICS)}"
        else:
            try:
                find_sources([source])
            except SourceError as error:
                what = f"this held-out data cannot be found: {str(error).removeprefix(f'{source}: ')}"
                remedy = "correct the source; it is one that --dataset takes"
        seen.add(name)
        if what:
            problems.append(Problem(what, entry, source_of(args, "eval_data"), remedy))
    return problems


def judge_text(
    verdicts: Verdicts,
    report: DataReport,
    texts: tuple[Documents, Documents, Mapping[str, Documents]],
    index: PackedIndex,
    *,
    run: RunLength,
    data_args: DataArguments,
    args: PretrainArguments,
) -> None:
    """What was tokenised and packed: is it enough, how often is it repeated, is held-out text trained on?

    Args:
        texts: the training documents, those held out of them, and the sets of `eval_data` by name.

    Raises:
        ConfigError: there is not even one row, so that nothing else about the run can be judged.
    """
    train, held_out, named = texts
    verdicts.ok("data", _describe(report))
    verdicts.problem(
        "data",
        check_amount(
            num_blocks=index.num_blocks, num_validation_documents=len(held_out), data_args=data_args, args=args
        ),
    )
    if index.num_blocks:
        epochs = run.ramp.total_rows / index.num_blocks
        used = f"{data_args.packing}: {index.num_blocks:,} rows, {index.utilisation:.2%} of their positions used"
        found = f"{used}; the run is {epochs:.2f} epochs of {index.num_blocks * run.sequence_length:,} tokens"
        if epochs > EPOCHS_WORTH_REPEATING:
            what = f"repeats teach less beyond about {EPOCHS_WORTH_REPEATING} (Muennighoff et al. 2023)"
            verdicts.note("packing", f"{found}; {what}", remedy="more text, or fewer total_tokens")
        else:
            verdicts.ok("packing", found)
    else:
        verdicts.refuse()
    for line in _overlap_notes(train, named):
        verdicts.note("data", line)


def _describe(report: DataReport) -> str:
    trained = f"{report.train_documents:,} documents, {report.train_tokens:,} tokens, {report.train_bytes:,} bytes"
    held_out = f"{report.validation_documents:,}, {report.validation_tokens:,}, {report.validation_bytes:,}"
    left_out = f"{report.dropped_empty:,} empty, {report.undecodable_files:,} not UTF-8"
    cached = "found in the cache" if report.cache_hit else "put into the cache"
    return f"{trained} to train on; {held_out} held out; left out {left_out}; {cached}"


def check_amount(
    *, num_blocks: int, num_validation_documents: int, data_args: DataArguments, args: PretrainArguments
) -> list[Problem]:
    """Too little text for one row, or none held out.

    Args:
        num_blocks: rows in one epoch of the training data.
        num_validation_documents: documents held out.
    """
    problems = []
    if num_blocks == 0:
        what = "the training data does not fill one row"
        remedy = "more data, or a shorter sequence_length"
        source = source_of(args, "sequence_length")
        problems.append(Problem(what, f"sequence_length={data_args.sequence_length}", source, remedy))
    evaluates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
    if num_validation_documents == 0 and not data_args.eval_data and evaluates:
        what = "evaluation is asked for, but the hash held out no document"
        given = f"validation_fraction={data_args.validation_fraction}"
        remedy = "a larger validation_fraction, or eval_strategy: no"
        problems.append(Problem(what, given, source_of(args, "validation_fraction"), remedy))
    return problems


def _overlap_notes(train: Documents, named: Mapping[str, Documents]) -> list[str]:
    """A line for each held-out set that shares documents with the training data, or of which it was not counted."""
    notes = []
    for name, documents in named.items():
        shared = shared_documents(documents, train)
        if shared is None:
            notes.append(f"eval_data {name}: too large to look for its documents in the training data")
        elif shared:
            notes.append(f"eval_data {name}: {shared:,} of its {len(documents):,} documents are training data as well")
    return notes
