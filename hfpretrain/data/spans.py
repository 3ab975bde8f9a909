"""Files cut into spans, and spans read document by document, by whichever process gets them.

Messages name the file and the row, because a corpus with one broken line in ten million is the normal case.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from hfpretrain.data.sources import SourceError, Sources, find_sources, open_table

SPAN_BYTES = 1 << 20  # text of one unit of work: large enough to hide its overhead, small enough to share out evenly


@dataclass(frozen=True)
class Span:
    """Consecutive documents of one file: bytes (text, jsonl), row groups (parquet) or rows (arrow) [start, stop)."""

    kind: str
    path: str
    start: int
    stop: int


def plan_spans(sources: Sources) -> list[Span]:
    """Files -> spans of about SPAN_BYTES, in order. A text file is one span however long it is: it is one document."""
    spans: list[Span] = []
    for file in sources.files:
        size = Path(file.path).stat().st_size
        if file.kind == "text":
            bounds = [0, size]
        elif file.kind == "jsonl":
            bounds = [*range(0, size, SPAN_BYTES), size]
        elif file.kind == "parquet":
            bounds = list(range(_open_parquet(file.path).num_row_groups + 1))
        else:
            table = open_table(file.path)
            rows_per_span = max(1, table.num_rows * SPAN_BYTES // max(1, table.nbytes))
            bounds = [*range(0, table.num_rows, rows_per_span), table.num_rows]
        spans += [Span(file.kind, file.path, low, high) for low, high in pairwise(bounds)]
    return spans


def read_span(span: Span, *, text_column: str) -> Iterator[tuple[int, str]]:
    """(row number from 0, text) of every document of a span, empty ones too; errors as in `read_columns`."""
    for row, values in read_columns(span, {"text_column": text_column}):
        yield row, values[0]


def read_columns(span: Span, columns: Mapping[str, str]) -> Iterator[tuple[int, list[str]]]:
    """(row number from 0, values) of every document of a span.

    Args:
        columns: flag that names it -> column, in the order of the values. "text_column" stands for all of a text file,
            and must hold text; other columns may hold whole numbers too, which become text.

    Raises:
        SourceError: text that is not valid UTF-8, a row that is no JSON object, lacks a column or holds something else
            there. The message names the file and the row, counted from 1, the columns there are, and the flag.
    """
    if span.kind == "text":
        missing = [f"--{flag} {column}" for flag, column in columns.items() if flag != "text_column"]
        if missing:
            raise SourceError(f"{span.path}: a text file has no columns; leave out {' and '.join(missing)}")
        yield 0, [_decoded(Path(span.path).read_bytes(), span.path, 0)]
    elif span.kind == "jsonl":
        yield from _read_jsonl(span, columns)
    else:
        yield from _read_columnar(span, columns)


def where(path: str, row: int) -> str:
    """How messages name a document."""
    return f"{path}, row {row + 1}"


def _decoded(data: bytes, path: str, row: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{where(path, row)}: not valid UTF-8 at byte {error.start} ({data[error.start : error.start + 4]!r}). "
            "Convert it to UTF-8 or remove it; bytes are never replaced silently."
        ) from error


def _read_jsonl(span: Span, columns: Mapping[str, str]) -> Iterator[tuple[int, list[str]]]:
    with open(span.path, "rb") as file:
        if span.start:  # a line belongs to the span in which it begins
            file.seek(span.start - 1)
            file.readline()
        first_row: int | None = None
        lines = 0
        while file.tell() < span.stop and (line := file.readline()):
            if line.strip():
                try:
                    yield lines, _json_values(line, columns)
                except _BadRowError as bad:
                    first_row = _lines_before(span) if first_row is None else first_row
                    row = first_row + lines
                    if bad.undecodable:
                        _decoded(line, span.path, row)
                    raise SourceError(f"{where(span.path, row)}: {bad}") from bad
            lines += 1


class _BadRowError(ValueError):
    def __init__(self, message: str, *, undecodable: bool = False) -> None:
        super().__init__(message)
        self.undecodable = undecodable


def _json_values(line: bytes, columns: Mapping[str, str]) -> list[str]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRowError("not valid UTF-8", undecodable=True) from error
    except ValueError as error:
        raise _BadRowError(f"not valid JSON ({error}); a jsonl file has one JSON object per line") from error
    if not isinstance(row, dict):
        raise _BadRowError(
            f"a JSON {type(row).__name__}, expected an object with a {next(iter(columns.values()))!r} column"
        )
    for flag, column in columns.items():
        if column not in row:
            raise _BadRowError(_no_column(flag, column, row))
    return [_as_text(flag, column, row[column]) for flag, column in columns.items()]


def _no_column(flag: str, column: str, names: Iterable[str]) -> str:
    return f"no column {column!r}; its columns are {sorted(names)}. Name one with --{flag}."


def _as_text(flag: str, column: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if flag != "text_column" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise _BadRowError(f"column {column!r} holds {type(value).__name__}, expected text")


def _lines_before(span: Span) -> int:
    """Lines that begin before the span: only counted for a message, so that reading in parallel needs no first pass."""
    left, count, last = span.start, 0, b"\n"
    with open(span.path, "rb") as file:
        while left and (chunk := file.read(min(left, 1 << 22))):
            count += chunk.count(b"\n")
            left -= len(chunk)
            last = chunk[-1:]
    return count + (last != b"\n")


@lru_cache(maxsize=8)
def _open_parquet(path: str) -> pq.ParquetFile:
    return pq.ParquetFile(path, memory_map=True)


def _read_columnar(span: Span, columns: Mapping[str, str]) -> Iterator[tuple[int, list[str]]]:
    if span.kind == "parquet":
        parquet = _open_parquet(span.path)
        names = parquet.schema_arrow.names
        row = sum(parquet.metadata.row_group(group).num_rows for group in range(span.start))
    else:
        names, row = open_table(span.path).column_names, span.start
    for flag, column in columns.items():
        if column not in names:
            raise SourceError(f"{span.path}: {_no_column(flag, column, names)}")
    wanted = list(dict.fromkeys(columns.values()))  # one column may have two uses
    if span.kind == "parquet":
        batches = parquet.iter_batches(row_groups=range(span.start, span.stop), columns=wanted, batch_size=1024)
    else:
        part = open_table(span.path).select(wanted).slice(span.start, span.stop - span.start)
        batches = iter(part.to_batches(max_chunksize=1024))
    for batch in batches:
        for values in zip(*(batch.column(column) for column in columns.values()), strict=True):
            cells = zip(columns.items(), values, strict=True)
            yield row, [_cell_text(flag, column, value, span.path, row) for (flag, column), value in cells]
            row += 1


def _cell_text(flag: str, column: str, value: pa.Scalar, path: str, row: int) -> str:
    try:
        return _as_text(flag, column, value.as_py())
    except UnicodeDecodeError:
        return _decoded(value.as_buffer().to_pybytes(), path, row)
    except _BadRowError as bad:
        raise SourceError(f"{where(path, row)}: {bad}") from bad


def iter_texts(
    names: Sequence[str], *, text_column: str = "text", validation_fraction: float = 0.0, max_bytes: int | None = None
) -> Iterator[str]:
    """Training texts (those not in the validation split), to train a tokenizer on.

    Args:
        names: what `--dataset` names.
        max_bytes: stop after this much UTF-8 text. Spans are then taken in a fixed shuffled order, so that what is read
            comes from everywhere and not only from the first files.
    """
    spans = plan_spans(find_sources(names))
    if max_bytes is not None:
        random.Random(0).shuffle(spans)
    read = 0
    for span in spans:
        for row, text in read_span(span, text_column=text_column):
            encoded = encoded_text(text, span.path, row)
            if encoded and not in_validation(encoded, validation_fraction):
                yield text
                read += len(encoded)
                if max_bytes is not None and read >= max_bytes:
                    return


def encoded_text(text: str, path: str, row: int) -> bytes:
    r"""UTF-8 bytes of a document. JSON can smuggle in halves of surrogate pairs ("\ud800") that are no text.

    Raises:
        SourceError: such a half.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SourceError(
            f"{where(path, row)}: character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X}), "
            "which is not text and has no UTF-8 form. Repair or remove the document."
        ) from error


def in_validation(encoded: bytes, validation_fraction: float) -> bool:
    """Whether a document is held out: a hash of its text alone decides, so equal texts are on the same side."""
    return xxhash.xxh3_64_intdigest(encoded, seed=0x5EED) < validation_fraction * 2.0**64
