"""Text -> ids, and what a tokenizer loses on the way: lost text is text that need not be predicted.

Bytes are those of the original text, never of what `decode` makes of the ids.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from hfpretrain.errors import Problem, refuse

_BATCH_BYTES = 1 << 20  # text per call of the tokenizer: its intermediate objects take about 100 bytes per token


@dataclass(frozen=True)
class Encoded:
    """Documents as ids, one element per document.

    Attributes:
        ids: int64 [tokens] each, without any token that the tokenizer would add.
        text_bytes: int64 [documents], UTF-8 bytes of the original text.
        lossy: "" where the ids say exactly what the text said, else what was lost.
        unknown_tokens: int64 [documents], ids of the unknown token.
        special_tokens: int64 [documents], ids of special tokens (not the unknown one): a string in the text such as
            "<|endoftext|>" that this tokenizer cannot spell out. Such documents are lossy.
        decode_differs: int64 [documents], 1 where `decode` gives another text although the ids are faithful (it eats a
            space that they hold).
    """

    ids: list[np.ndarray]
    text_bytes: np.ndarray
    lossy: list[str]
    unknown_tokens: np.ndarray
    special_tokens: np.ndarray
    decode_differs: np.ndarray


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Encoded:
    """Encode every text as plain text and compare what its ids decode to with the text.

    A text that does not come back is lossy if another text has the same ids (the decoded one, for instance: the ids
    cannot tell the two apart), or if its tokens, written one after another, are not the text.

    Raises:
        ConfigError: texts that have no UTF-8 bytes (lone surrogates); a tokenizer that puts its start token before a
            text although it was told not to.
    """
    refuse(_surrogates(texts))
    text_bytes = np.array([len(text.encode("utf-8")) for text in texts], dtype=np.int64)
    unknown = tokenizer.unk_token_id
    special = np.array(sorted(_special_ids(tokenizer) - {unknown}), dtype=np.int64)
    ids: list[np.ndarray] = []
    decoded: list[str] = []
    for batch in _batches(texts, text_bytes):
        found = _ids(tokenizer, batch)
        ids += [np.array(row, dtype=np.int64) for row in found]
        decoded += _decoded(tokenizer, found)
    refuse(_start_added(tokenizer, texts, ids))
    specials = np.array([int(np.isin(row, special).sum()) for row in ids], dtype=np.int64)
    unknowns = np.array([0 if unknown is None else int((row == unknown).sum()) for row in ids], dtype=np.int64)
    lossy = []
    differs = np.zeros(len(texts), dtype=np.int64)
    for number, (text, row, back) in enumerate(zip(texts, ids, decoded, strict=True)):
        reasons = []
        if specials[number]:
            reasons.append(_counted(int(specials[number]), "special token in place of text"))
        if unknowns[number] and (unknown_text := tokenizer.unk_token) and back != text:
            reasons.append(_counted(int(unknowns[number]), f"unknown token ({unknown_text})"))
        if back != text and not reasons:
            reasons = _what_is_lost(tokenizer, text, row, back)
            differs[number] = not reasons
        lossy.append("; ".join(reasons))
    return Encoded(ids, text_bytes, lossy, unknowns, specials, differs)


def tokenizer_disagreement(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> str | None:
    """Where the tokenizer's ids differ from those of its own tokenizer.json on these texts; None if they do not.

    transformers 5 rebuilds the pipeline of some tokenizer classes and then ignores what tokenizer.json says
    (transformers#45920): a text is cut as the model never saw it. None also where there is no tokenizer.json.
    """
    path = tokenizer_json(str(tokenizer.name_or_path))
    if path is None:
        return None
    own = Tokenizer.from_file(str(path))
    own.encode_special_tokens = True
    own.no_truncation()
    own.no_padding()
    different: list[int] = []
    ours = theirs = 0
    for number, text in enumerate(texts):
        loaded = _ids(tokenizer, [text])[0]
        written = own.encode(text, add_special_tokens=False).ids
        ours, theirs = ours + len(loaded), theirs + len(written)
        if loaded != written:
            different.append(number)
    if not different:
        return None
    return (
        f"{type(tokenizer).__name__} gives other ids than its own tokenizer.json on {len(different)} of {len(texts)} "
        f"documents, number {different[0]} first ({ours:,} tokens in all against {theirs:,}): the model was trained on "
        "those of tokenizer.json"
    )


def tokenizer_json(name: str) -> Path | None:
    """tokenizer.json of a folder, or of a hub name as it lies in the cache; None if there is none."""
    if Path(name).is_dir():
        path = Path(name) / "tokenizer.json"
        return path if path.exists() else None
    try:
        found = cached_file(name, "tokenizer.json", local_files_only=True)
    except (OSError, ValueError):  # not in the cache, or no name of a repository
        return None
    return Path(found) if found else None


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Special-token strings inside the text are spelled out; nothing is added, nothing is cut."""
    found: list[list[int]] = tokenizer(
        list(texts),
        add_special_tokens=False,
        split_special_tokens=True,
        truncation=False,
        padding=False,
        return_attention_mask=False,
        verbose=False,
    )["input_ids"]
    return found


def _decoded(tokenizer: Any, ids: Sequence[Sequence[int]]) -> list[str]:
    decode = tokenizer.decode
    return [decode(row, skip_special_tokens=False, clean_up_tokenization_spaces=False) if row else "" for row in ids]


def _batches(texts: Sequence[str], text_bytes: np.ndarray) -> list[list[str]]:
    """Texts in turn, about `_BATCH_BYTES` at a time."""
    batches: list[list[str]] = []
    size = _BATCH_BYTES
    for text, more in zip(texts, text_bytes.tolist(), strict=True):
        if size >= _BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += more
    return batches


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return set(tokenizer.all_special_ids) | {int(number) for number, token in added.items() if token.special}


def _surrogates(texts: Sequence[str]) -> list[Problem]:
    bad = [number for number, text in enumerate(texts) if any("\ud800" <= character <= "\udfff" for character in text)]
    if not bad:
        return []
    what = "a lone surrogate has no UTF-8 bytes, so there is nothing to measure bits per byte against"
    given = f"{len(bad)} documents, number {bad[0]} first"
    return [Problem(what, given, "data", "decode the source as UTF-8, or remove these documents")]


def _start_added(tokenizer: Any, texts: Sequence[str], ids: Sequence[np.ndarray]) -> list[Problem]:
    start = tokenizer.bos_token_id
    if start is None:
        return []
    pairs = zip(texts, ids, strict=True)
    bad = [
        n for n, (text, row) in enumerate(pairs) if len(row) and row[0] == start and _begins_otherwise(text, tokenizer)
    ]
    if not bad:
        return []
    what = "the tokenizer puts its start token before a text although add_special_tokens is false; it would be scored"
    given = f"{type(tokenizer).__name__}, {len(bad)} documents, number {bad[0]} first"
    return [Problem(what, given, "tokenizer", "a fast tokenizer of this model (one that has a tokenizer.json)")]


def _begins_otherwise(text: str, tokenizer: Any) -> bool:
    """Some tokenizers cannot spell out a start token that the text itself begins with: that is counted, not refused."""
    start = tokenizer.bos_token
    same_as_unknown = tokenizer.bos_token_id == tokenizer.unk_token_id
    return not text.lstrip().startswith(start) and not same_as_unknown


def _what_is_lost(tokenizer: Any, text: str, ids: np.ndarray, decoded: str) -> list[str]:
    """[] if the ids hold all of the text and only `decode` does not show it."""
    (again,) = _ids(tokenizer, [decoded])
    same_ids = again == ids.tolist()
    if not same_ids and _spelled(tokenizer, ids) in (text.encode("utf-8"), b" " + text.encode("utf-8")):
        return []
    return [_difference(text, decoded)]


def _spelled(tokenizer: Any, ids: np.ndarray) -> bytes | None:
    """The bytes that the tokens write one after another; None where they are of neither known kind.

    Byte-level vocabularies write a byte as one character, SentencePiece's write a space as U+2581 and a byte that has
    no token as <0x0A>.
    """
    tokens = tokenizer.convert_ids_to_tokens(ids.tolist())
    if any(token is None for token in tokens):
        return None
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    if all(set(token) <= alphabet for token in tokens):
        values = _byte_values()
        return bytes(values[character] for token in tokens for character in token)
    parts = []
    for token in tokens:
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        parts.append(bytes([int(token[3:5], 16)]) if is_byte else token.replace("\u2581", " ").encode("utf-8"))
    return b"".join(parts)


def _byte_values() -> dict[str, int]:
    """Character that byte-level tokenizers write -> the byte: printable Latin-1 for itself, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _difference(text: str, decoded: str) -> str:
    """What turned the text into the decoded one, by name where it has one."""
    for name, changed in (
        ("leading space eaten", text.removeprefix(" ")),
        ("leading whitespace eaten", text.lstrip()),
        ("whitespace at an end eaten", text.strip()),
        ("lower case", text.lower()),
        *((form, unicodedata.normalize(form, text)) for form in ("NFC", "NFKC", "NFD", "NFKD")),
    ):
        if changed == decoded:
            return f"{name}: {_byte_change(text, decoded)}"
    pairs = zip(text, decoded, strict=False)
    first = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(text), len(decoded)))
    there, here = text[first : first + 12], decoded[first : first + 12]
    return f"{_byte_change(text, decoded)}, from character {first} on: {there!r} became {here!r}"


def _byte_change(text: str, decoded: str) -> str:
    change = len(decoded.encode("utf-8", errors="surrogatepass")) - len(text.encode("utf-8"))
    if not change:
        return "as many bytes, others"
    return f"{_counted(abs(change), 'byte')} {'more' if change > 0 else 'less'}"


def _counted(number: int, name: str) -> str:
    head, _, rest = name.partition(" token")
    if rest or name.endswith(" token"):
        return f"{number} {head} token{'' if number == 1 else 's'}{rest}"
    return f"{number:,} {name}{'' if number == 1 else 's'}"
