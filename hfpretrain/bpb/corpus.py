"""Text to score: documents with an id, a domain and exactly the characters that stand in their files."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from hfpretrain.data.sources import SourceError, SourceFile, Sources, find_sources
from hfpretrain.data.spans import Span, encoded_text, plan_spans, read_columns
from hfpretrain.errors import Problem, refuse

_SHOWN = 5  # duplicate ids that a message names


@dataclass(frozen=True)
class Corpus:
    """Documents in the order of their sources.

    Attributes:
        ids: one per document, all different.
        domains: what each document is counted under.
        texts: as they stand in the files: no line end, mark or code point is changed.
        fingerprint: hash over ids and texts in their order; two results with the same one are about the same text.
    """

    ids: list[str]
    domains: list[str]
    texts: list[str] = field(repr=False)
    fingerprint: str

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.ids)

    @cached_property
    def text_bytes(self) -> np.ndarray:
        """int64 [num_documents], UTF-8 bytes of each text."""
        return np.array([len(text.encode()) for text in self.texts], dtype=np.int64)

    def only(self, kept: np.ndarray) -> Corpus:
        """The documents where `kept` (bool [num_documents]) is true, with a fingerprint of their own."""
        ids, domains, texts = (
            [item for item, keep in zip(items, kept.tolist(), strict=True) if keep]
            for items in (self.ids, self.domains, self.texts)
        )
        return Corpus(ids, domains, texts, _fingerprint(ids, texts))


def read_corpus(
    names: Sequence[str],
    *,
    text_column: str = "text",
    domain_column: str | None = None,
    id_column: str | None = None,
) -> Corpus:
    """Read everything that `names` says into memory.

    Args:
        names: what `--dataset` takes (`hfpretrain.data.sources`): files, globs, save_to_disk folders, hub
            names, stdlib. Of a table each row is a document, of text files each file.
        domain_column: column that holds the domain. Default: the name of the source, without folder and ending where
            that is enough to tell it from the others.
        id_column: column that holds the id. Default: the file, seen from the folder that all files share, and the row
            counted from 1, so that the same files elsewhere have the same ids.

    Raises:
        ConfigError: a source that cannot be found, the first broken row of every file, ids that occur more than once,
            and a corpus without a single byte: all at once.
    """
    problems: list[Problem] = []
    found = _find(names, problems)
    paths = [file.path for files in found.values() for file in files]
    shared = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    domains, ids, texts = [], [], []
    for name, files in found.items():
        for file in files:
            for row, text, domain, identity in _rows(file, text_column, domain_column, id_column, problems):
                ids.append(f"{os.path.relpath(file.path, shared)}:{row + 1}" if identity is None else identity)
                domains.append(name if domain is None else domain)
                texts.append(text)
    twice = [identity for identity, count in Counter(ids).items() if count > 1]
    if twice:
        listed = ", ".join(twice[:_SHOWN]) + (", ..." if len(twice) > _SHOWN else "")
        what = f"{len(twice)} ids belong to more than one document, so per-document results could not be matched"
        remedy = "make them unique, or leave --id_column out: file and row are the id then"
        problems.append(Problem(what, listed, f"id_column {id_column}", remedy))
    if not problems and not any(texts):
        what = "there is no text to score: bits per byte need at least one byte"
        problems.append(Problem(what, " ".join(names), "data", "name files with text in them"))
    refuse(problems)
    return Corpus(ids, domains, texts, _fingerprint(ids, texts))


def _find(names: Sequence[str], problems: list[Problem]) -> dict[str, list[SourceFile]]:
    """Short name of each source -> its files."""
    stems = Counter(Path(name).stem for name in names)
    found: dict[str, list[SourceFile]] = {}
    named: dict[str, str] = {}
    for name in names:
        try:
            files = list(find_sources([name]).files)
        except SourceError as error:
            problems.append(_problem(error, name))
            continue
        for file in files:
            if file.path in named:
                what = f"{file.path} is named twice; its text would count double"
                problems.append(Problem(what, f"{named[file.path]} and {name}", "data", "name it once"))
            named[file.path] = name
        is_file = len(files) == 1 and Path(name).is_file() and stems[Path(name).stem] == 1
        found[Path(name).stem if is_file else name] = files
    if not names:
        remedy = "--data FILE ..., in the forms that --dataset takes"
        problems.append(Problem("no text to score is named", "nothing", "data", remedy))
    return found


def _rows(
    file: SourceFile, text_column: str, domain_column: str | None, id_column: str | None, problems: list[Problem]
) -> Iterator[tuple[int, str, str | None, str | None]]:
    """(row, text, domain, id) of every document of a file, up to its first broken row, which becomes a problem."""
    columns = {"text_column": text_column}
    columns |= {"domain_column": domain_column} if domain_column else {}
    columns |= {"id_column": id_column} if id_column else {}
    try:
        for span in _whole(file):
            for row, values in read_columns(span, columns):
                for value in values:
                    encoded_text(value, file.path, row)
                value_of = dict(zip(columns, values, strict=True))
                yield row, values[0], value_of.get("domain_column"), value_of.get("id_column")
    except SourceError as error:
        problems.append(_problem(error, file.path))


def _whole(file: SourceFile) -> list[Span]:
    """The file as one span, so that rows are counted from its beginning; none where it is empty."""
    spans = plan_spans(Sources((file,)))
    return [Span(file.kind, file.path, spans[0].start, spans[-1].stop)] if spans else []


def _problem(error: SourceError, given: str) -> Problem:
    return Problem(str(error), given, "data", "correct it, or leave this source out")


def _fingerprint(ids: Sequence[str], texts: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for item in (piece for pair in zip(ids, texts, strict=True) for piece in pair):
        encoded = item.encode("utf-8")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()
