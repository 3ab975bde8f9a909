"""Tokenise once: sources -> memory-mapped tokens of two sets of documents, training and validation.

Every document is [start] + tokens + [end]. Tokens lie in Arrow files inside a cache entry whose name is a hash of all
that decides them (tokenizer, text, settings; not the number of processes). One process fills an entry while others wait
at a lock, and the file that says "complete" is written last, so a killed run leaves nothing that is taken for complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from hfpretrain.data.buffer import TokenBuffer, kept_rows, open_arrow, row_groups
from hfpretrain.data.sources import SourceError, Sources, content_key, find_sources
from hfpretrain.data.spans import plan_spans
from hfpretrain.data.tokenise import tokenise_spans
from hfpretrain.data.tokenizer import document_ids, tokenizer_content

logger = logging.getLogger(__name__)
_FORMAT = 1  # part of the cache key: raise it when what an entry holds changes
_MARKER = "complete.json"


@dataclass(frozen=True)
class Documents:
    """Tokenised documents of one split.

    Attributes:
        tokens: all documents one after another; len(tokens) is the number of input tokens.
        lengths: int64 [num_documents], tokens of each document, its start and end token included.
        text_bytes: int64 [num_documents], UTF-8 bytes of each original text.
        start_id, end_id: what each document begins and ends with.
        fingerprint: hash of everything that decides the tokens.
    """

    tokens: TokenBuffer = field(repr=False)
    lengths: np.ndarray = field(repr=False)
    text_bytes: np.ndarray = field(repr=False)
    start_id: int
    end_id: int
    fingerprint: str

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """int64 [num_documents], where each document begins in `tokens`."""
        starts: np.ndarray = np.cumsum(self.lengths) - self.lengths
        return starts

    def document(self, number: int) -> np.ndarray:
        """The tokens of one document, start and end token included."""
        return self.tokens.read(int(self.starts[number]), int(self.lengths[number]))


def shared_documents(these: Documents, others: Documents, *, most_reads: int = 200_000) -> int | None:
    """How many of these documents are, token by token, among the others; tokenised alike.

    Only documents with as many tokens and as many bytes are read. None: more than `most_reads` of them, too many to
    read for a note (10 million documents of some thousand bytes share both numbers with few; very short ones do not).
    """

    def sizes(documents: Documents) -> np.ndarray:
        packed: np.ndarray = documents.lengths.astype(np.uint64) << np.uint64(32) | documents.text_bytes.astype(
            np.uint64
        )
        return packed

    mine, theirs = sizes(these), sizes(others)
    alike = np.flatnonzero(np.isin(theirs, mine))
    candidates = np.flatnonzero(np.isin(mine, theirs[alike]))
    if len(alike) + len(candidates) > most_reads:
        return None
    known = {others.document(number).astype(np.int64).tobytes() for number in alike.tolist()}
    return sum(these.document(number).astype(np.int64).tobytes() in known for number in candidates.tolist())


@dataclass(frozen=True)
class DataReport:
    """What tokenising found, for the log and run.json. Tokens include start and end tokens; bytes are UTF-8."""

    train_documents: int
    train_tokens: int
    train_bytes: int
    validation_documents: int
    validation_tokens: int
    validation_bytes: int
    dropped_empty: int
    undecodable_files: int
    cache_hit: bool
    cache_path: Path
    fingerprint: str

    def validation_texts(self) -> Iterator[str]:
        """Original text of each validation document, in the order of the validation `Documents`."""
        for path in _complete_files(self.cache_path) or []:
            for batch in open_arrow(path).select(["validation", "text"]).to_batches():
                yield from batch.filter(batch["validation"])["text"].to_pylist()

    def __str__(self) -> str:
        return (
            f"training: {self.train_documents:,} documents, {self.train_tokens:,} tokens, {self.train_bytes:,} bytes; "
            f"validation: {self.validation_documents:,} documents, {self.validation_tokens:,} tokens, "
            f"{self.validation_bytes:,} bytes; dropped: {self.dropped_empty:,} empty documents, "
            f"{self.undecodable_files:,} files that are not UTF-8; "
            f"{'found in' if self.cache_hit else 'written to'} {self.cache_path}"
        )


def load_documents(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_column: str = "text",
    validation_fraction: float,
    cache_dir: Path,
    num_proc: int | None = None,
) -> tuple[Documents, Documents, DataReport]:
    """Training documents, validation documents and what was found; tokenised now or found in the cache.

    Args:
        sources: what `--dataset` names, see `sources.py`.
        tokenizer: a fast tokenizer with an end token. What it would add by itself, and special-token strings inside the
            text, have no effect: exactly one start and one end token are put around the plain text.
        text_column: column of jsonl, parquet and Arrow rows that holds the text.
        validation_fraction: probability in [0, 1) that a hash of its text sends a document to validation.
        cache_dir: where entries are kept; may be shared by any number of processes of one or more machines.
        num_proc: processes that tokenise; default one per usable CPU. It has no influence on the result.

    Raises:
        SourceError: a source or row that cannot be read (file, row and remedy in the message), or no document at all on
            a side that should have some.
        ConfigError: the tokenizer has no end token.
        ValueError: validation_fraction out of range; an id that the tokenizer does not have.
    """
    if not 0.0 <= validation_fraction < 1.0:
        raise ValueError(f"validation_fraction is {validation_fraction}; expected at least 0 and below 1")
    if num_proc is not None and num_proc < 1:
        raise ValueError(f"num_proc is {num_proc}; expected at least 1, or None for one process per CPU")
    start_id, end_id = document_ids(tokenizer)
    found = find_sources(sources)
    settings = {"format": _FORMAT, "text_column": text_column, "validation_fraction": validation_fraction}
    settings |= {"content": content_key(found, cache_dir=cache_dir), "tokenizer": tokenizer_content(tokenizer)}
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
    entry = Path(cache_dir) / "documents" / key
    entry.parent.mkdir(parents=True, exist_ok=True)
    files = _complete_files(entry)
    hit = files is not None
    if files is None:
        with _Lock(entry):
            files = _complete_files(entry)
            hit = files is not None  # another process was faster
            if files is None:
                files = _fill(entry, found, tokenizer, text_column, validation_fraction, num_proc)
    train, validation = (_split(files, flag, start_id, end_id, key) for flag in (False, True))
    rows = sum(open_arrow(path).num_rows for path in files)
    _check_split(rows, len(train), len(validation), validation_fraction)
    report = DataReport(
        train_documents=len(train),
        train_tokens=len(train.tokens),
        train_bytes=int(train.text_bytes.sum()),
        validation_documents=len(validation),
        validation_tokens=len(validation.tokens),
        validation_bytes=int(validation.text_bytes.sum()),
        dropped_empty=rows - len(train) - len(validation),
        undecodable_files=found.undecodable_files,
        cache_hit=hit,
        cache_path=entry,
        fingerprint=key,
    )
    return train, validation, report


def _check_split(rows: int, train: int, validation: int, validation_fraction: float) -> None:
    if not train + validation:
        raise SourceError(f"the data holds {rows} documents and all of them are empty")
    if not train or (validation_fraction and not validation):
        raise SourceError(
            f"of {train + validation} documents {train} are for training and {validation} for validation with "
            f"validation_fraction = {validation_fraction}; give more documents or "
            f"{'a smaller fraction' if not train else 'a larger fraction (0 for no validation at all)'}"
        )


def _split(files: Sequence[Path], validation: bool, start_id: int, end_id: int, key: str) -> Documents:
    tokens = TokenBuffer(files, validation=validation)
    sizes = [np.zeros(0, dtype=np.int64)]
    for path in files:
        for flags, text_bytes in row_groups(open_arrow(path), "validation", "text_bytes"):
            sizes.append(text_bytes.to_numpy()[kept_rows(flags, text_bytes, validation)])
    name = f"{key}-{'validation' if validation else 'train'}"
    return Documents(tokens, tokens.lengths, np.concatenate(sizes), start_id, end_id, name)


class _Lock:
    """A file lock beside the entry that says what it waits for."""

    def __init__(self, entry: Path) -> None:
        self._lock = FileLock(f"{entry}.lock")

    def __enter__(self) -> None:
        try:
            self._lock.acquire(timeout=2)
        except Timeout:
            logger.info("another process tokenises the same text; waiting for it (lock: %s)", self._lock.lock_file)
            self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def _complete_files(entry: Path) -> list[Path] | None:
    """The Arrow files of a complete entry, or None. An entry with a file missing or cut short is not complete."""
    try:
        marker = json.loads((entry / _MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    files = [entry / name for name in marker["files"]]
    sizes = [path.stat().st_size if path.exists() else None for path in files]
    return files if sizes == list(marker["files"].values()) else None


def _fill(
    entry: Path,
    found: Sources,
    tokenizer: PreTrainedTokenizerBase,
    text_column: str,
    validation_fraction: float,
    num_proc: int | None,
) -> list[Path]:
    """Tokenise into an empty entry and mark it complete."""
    shutil.rmtree(entry, ignore_errors=True)  # what a killed run left
    entry.mkdir()
    files = tokenise_spans(
        plan_spans(found),
        tokenizer,
        text_column=text_column,
        validation_fraction=validation_fraction,
        folder=entry,
        num_proc=num_proc,
    )
    marker = {"files": {path.name: path.stat().st_size for path in files}}
    unfinished = entry / f"{_MARKER}.unfinished"
    unfinished.write_text(json.dumps(marker), encoding="utf-8")
    os.replace(unfinished, entry / _MARKER)
    return files
