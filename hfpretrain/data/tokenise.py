"""Spans of text -> Arrow files of tokens, in parallel through `datasets.Dataset.map`.

The rows that are mapped are pointers to spans, so texts are read where they are tokenised, and nothing but tokens (and
the text of held-out documents) is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from hfpretrain.data.sources import SourceError
from hfpretrain.data.spans import SPAN_BYTES, Span, encoded_text, in_validation, read_span, where
from hfpretrain.data.tokenizer import document_ids

_BATCH_BYTES = 1 << 20  # text per call of the tokenizer: its intermediate objects take about 100 bytes per token
_MOST_TOKENS = 2**31 - 1  # of one unit of work: Arrow's list offsets are 32 bits wide


def tokenise_spans(
    spans: Sequence[Span],
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_column: str,
    validation_fraction: float,
    folder: Path,
    num_proc: int | None,
) -> list[Path]:
    """Write Arrow files with the columns tokens (list of uint16 or uint32, start and end token included), text_bytes,
    validation and text (null on the training side), one row per document. An empty document leaves a row with
    text_bytes = 0 and no tokens, so that it can be counted.

    Returns:
        The files, in the order of the documents.

    Raises:
        SourceError: a row that cannot be read, or a text that makes a special token (file and row in the message).
        ValueError: an id that the tokenizer does not have.
    """
    units = [json.dumps([asdict(span) for span in unit]) for unit in _units(spans)]
    workers = min(num_proc or _usable_cpus(), len(units))
    width = "uint16" if len(tokenizer) <= 2**16 else "uint32"
    features = datasets.Features(
        tokens=datasets.List(datasets.Value(width)),
        text_bytes=datasets.Value("int64"),
        validation=datasets.Value("bool"),
        text=datasets.Value("string"),
    )
    pointers = datasets.Dataset.from_dict({"spans": units})
    tokenised = pointers.map(
        tokenise_unit,
        batched=True,
        batch_size=1,
        fn_kwargs={
            "settings": encoder_settings(tokenizer),
            "text_column": text_column,
            "validation_fraction": validation_fraction,
            "alone": workers == 1,
        },
        remove_columns=["spans"],
        features=features,
        cache_file_name=str(folder / "tokens.arrow"),
        load_from_cache_file=False,
        num_proc=workers if workers > 1 else None,
        new_fingerprint=folder.name,
        desc=f"tokenising ({workers} processes, units of {SPAN_BYTES >> 20} MiB)",
    )
    return [Path(entry["filename"]) for entry in tokenised.cache_files]


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _units(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Small text files together, so that a unit is worth a process's while; other spans have their size already."""
    unit: list[Span] = []
    size = 0
    for span in spans:
        unit.append(span)
        size += span.stop - span.start if span.kind == "text" else SPAN_BYTES
        if size >= SPAN_BYTES:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def encoder_settings(tokenizer: PreTrainedTokenizerBase) -> str:
    """What a process needs to tokenise like all others, as JSON: picklable, and a key for its copy of the backend."""
    start_id, end_id = document_ids(tokenizer)
    # The unknown token is an honest outcome of tokenising; every other special token would be a boundary that is none.
    special = {i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id} | {start_id, end_id}
    return json.dumps(
        {
            "backend": tokenizer.backend_tokenizer.to_str(),
            "start_id": start_id,
            "end_id": end_id,
            "special": sorted(special),
            "entries": len(tokenizer),
        }
    )


class Encoder:
    """Text -> [start] + tokens + [end], on a private copy of the tokenizer's backend so that no setting leaks."""

    def __init__(self, settings: str) -> None:
        given = json.loads(settings)
        self._backend = Tokenizer.from_str(given["backend"])
        self._backend.encode_special_tokens = True  # "<|endoftext|>" in a document is thirteen characters of text
        self._backend.no_truncation()
        self._backend.no_padding()
        self.entries: int = given["entries"]
        self.dtype = np.dtype(np.uint16 if self.entries <= 2**16 else np.uint32)
        self._start = np.array([given["start_id"]], dtype=np.int64)
        self._end = np.array([given["end_id"]], dtype=np.int64)
        self._is_special = np.zeros(max(self.entries, *(i + 1 for i in given["special"])), dtype=bool)
        self._is_special[given["special"]] = True

    def __call__(self, texts: Sequence[str], names: Sequence[str]) -> list[np.ndarray]:
        """One array per text; `names` are only for messages."""
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._document(np.array(e.ids, dtype=np.int64), name) for e, name in zip(encoded, names, strict=True)]

    def _document(self, ids: np.ndarray, name: str) -> np.ndarray:
        if len(ids) and int(ids.max()) >= self.entries:
            raise ValueError(
                f"{name}: the tokenizer gave id {ids.max()} but has {self.entries} entries (ids 0 to "
                f"{self.entries - 1}); its files do not belong together, save it again"
            )
        if self._is_special[ids].any():
            token = int(ids[self._is_special[ids]][0])
            raise SourceError(
                f"{name}: the plain text gives the special token {token} ({self._backend.id_to_token(token)!r}), which "
                "would look like a document boundary. This tokenizer cannot spell that string out: remove it from the "
                "text or use another tokenizer."
            )
        return np.concatenate((self._start, ids, self._end)).astype(self.dtype)


@lru_cache(maxsize=1)
def _encoder(settings: str) -> Encoder:
    return Encoder(settings)


def tokenise_unit(
    pointers: dict[str, list[str]], *, settings: str, text_column: str, validation_fraction: float, alone: bool
) -> pa.Table:
    """The function that is mapped: one unit of spans -> a table of its documents."""
    if not alone:  # one of several processes: each of them starting a thread per CPU would only get in the others' way
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = _encoder(settings)
    tokens: list[np.ndarray] = []
    sizes: list[int] = []
    held_out: list[str | None] = []
    for texts, names, encoded in _batches(pointers["spans"][0], text_column):
        for text, data, ids in zip(texts, encoded, encoder(texts, names), strict=True):
            tokens.append(ids if data else ids[:0])
            sizes.append(len(data))
            held_out.append(text if data and in_validation(data, validation_fraction) else None)
    lengths = np.array([len(ids) for ids in tokens], dtype=np.int64)
    if int(lengths.sum()) > _MOST_TOKENS:
        raise SourceError(f"{names[-1]}: {lengths.sum():,} tokens in one piece of work; cut the file into documents")
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    values = np.concatenate(tokens) if tokens else np.zeros(0, dtype=encoder.dtype)
    return pa.table(
        {
            "tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)),
            "text_bytes": pa.array(sizes, pa.int64()),
            "validation": pa.array([text is not None for text in held_out], pa.bool_()),
            "text": pa.array(held_out, pa.string()),
        }
    )


def _batches(unit: str, text_column: str) -> Iterator[tuple[list[str], list[str], list[bytes]]]:
    """Texts, their names and their UTF-8 bytes, about _BATCH_BYTES at a time."""
    texts: list[str] = []
    names: list[str] = []
    encoded: list[bytes] = []
    size = 0
    for span in (Span(**fields) for fields in json.loads(unit)):
        for row, text in read_span(span, text_column=text_column):
            texts.append(text)
            names.append(where(span.path, row))
            encoded.append(encoded_text(text, span.path, row))
            size += len(encoded[-1])
            if size >= _BATCH_BYTES:
                yield texts, names, encoded
                texts, names, encoded, size = [], [], [], 0
    if texts:
        yield texts, names, encoded
