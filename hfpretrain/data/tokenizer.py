"""The tokenizer of a run: the byte tokenizer, one trained here, or any fast tokenizer from a folder or the hub."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hfpretrain.errors import ConfigError, Problem

START_TOKEN = "<|start|>"
END_TOKEN = "<|end|>"
_TRAINED_FORMAT = 1  # part of the cache key of trained tokenizers: raise it when the way of training changes


def load_tokenizer(name: str, *, texts: Iterable[str] | None, cache_dir: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that `--tokenizer_name` asks for.

    Args:
        name: "bytes" (256 bytes + start + end, id of a byte = its value), "train:<size>" (byte-level BPE of exactly
            <size> entries with start and end among them, trained on `texts`, cached under the content of the texts),
            or what `AutoTokenizer.from_pretrained` takes: a folder or a hub name.
        texts: what a "train:" tokenizer is trained on; read once. Not touched otherwise.
        cache_dir: where trained tokenizers are kept.

    Raises:
        ConfigError: the size is not a number or too small for the bytes and the two special tokens; the texts are too
            small for it; there are no texts; the tokenizer is not a fast one or has no end-of-text token.
    """
    if name == "bytes":
        return byte_tokenizer()
    if name.startswith("train:"):
        return _trained(_size(name), texts, cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(name)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise _problem(
            "the tokenizer has no `tokenizers` backend; texts could not be tokenised in bulk",
            f"{name} ({type(tokenizer).__name__})",
            "use a tokenizer that has a tokenizer.json (a fast tokenizer), or train one: --tokenizer_name train:32768",
        )
    document_ids(tokenizer)
    return tokenizer


@dataclass(frozen=True)
class UntrainedTokenizer:
    """What is known of a "train:<size>" tokenizer before there is text to train it on.

    Attributes:
        size: entries, which is its `len`.
        bos_token_id, eos_token_id: the trainer puts the special tokens first, in this order.
    """

    size: int
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: None = None

    def __len__(self) -> int:
        return self.size


def tokenizer_beforehand(name: str, *, cache_dir: Path) -> PreTrainedTokenizerFast | UntrainedTokenizer:
    """`load_tokenizer` without text: of one that is to be trained, what is known of it already. Same errors."""
    if name.startswith("train:"):
        return UntrainedTokenizer(_size(name))
    return load_tokenizer(name, texts=None, cache_dir=cache_dir)


def document_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """(start_id, end_id): what every document begins and ends with: BOS, or EOS where there is no BOS; and EOS.

    Raises:
        ConfigError: the tokenizer has no end-of-text token, so a model could never learn to stop.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise _problem(
            "the tokenizer has no end-of-text token (eos_token), so documents could not be told apart",
            str(tokenizer.name_or_path or type(tokenizer).__name__),
            "give it one and save it: tokenizer.add_special_tokens({'eos_token': '<|endoftext|>'}); "
            "tokenizer.save_pretrained(folder); then --tokenizer_name folder",
        )
    start = tokenizer.bos_token_id
    return int(end if start is None else start), int(end)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, id = the byte's value; 256 = start, 257 = end. Needs no text to exist."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    vocabulary |= {START_TOKEN: 256, END_TOKEN: 257}
    return _wrapped(Tokenizer(models.BPE(vocab=vocabulary, merges=[])))


def _byte_characters() -> list[str]:
    """The character that ByteLevel writes for each byte: printable Latin-1 for itself, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """A byte-level backend with the two special tokens in its vocabulary -> a transformers tokenizer."""
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([START_TOKEN, END_TOKEN])
    # Prompts get the start token that every training document had: tokenizer("text") is what the model was trained on.
    start = backend.token_to_id(START_TOKEN)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{START_TOKEN} $A", pair=f"{START_TOKEN} $A {START_TOKEN} $B", special_tokens=[(START_TOKEN, start)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=START_TOKEN,
        eos_token=END_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def _size(name: str) -> int:
    text = name.removeprefix("train:").replace("_", "").replace(",", "")
    size = int(text) if text.isdecimal() else 0
    if size < 258:
        raise _problem(
            "train:<size> needs a whole number of entries, at least 258 (256 bytes and two special tokens)",
            name,
            "for example --tokenizer_name train:8192",
        )
    return size


def _trained(size: int, texts: Iterable[str] | None, cache_dir: Path) -> PreTrainedTokenizerFast:
    if texts is None:
        raise _problem(
            "there is no text to train a tokenizer on", f"train:{size}", "give a dataset, or name a tokenizer"
        )
    kept = list(texts)  # read once: the key needs all of it before training may need all of it
    digest = hashlib.blake2b(f"{_TRAINED_FORMAT} {size}".encode(), digest_size=16)
    for text in kept:
        encoded = text.encode("utf-8")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    folder = Path(cache_dir) / "tokenizers" / f"bpe{size}-{digest.hexdigest()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
            try:
                _train(size, kept).save_pretrained(unfinished)
                os.replace(unfinished, folder)  # appears complete or not at all
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def _train(size: int, texts: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[START_TOKEN, END_TOKEN],
        initial_alphabet=sorted(_byte_characters()),  # every byte, so that no text is unknown
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer, length=len(texts))
    if backend.get_vocab_size() != size:
        raise _problem(
            f"the text has only enough repetition for a vocabulary of {backend.get_vocab_size()}",
            f"train:{size} on {len(texts)} documents",
            f"ask for train:{backend.get_vocab_size()} or less, or give more text",
        )
    return _wrapped(backend)


def tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything about a tokenizer that decides which ids a text becomes, as one string.

    That is vocabulary, merges, normaliser, pre-tokeniser, added tokens, start and end ids; not truncation and padding,
    which tokenizers pick up in use.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend.pop("truncation", None)
    backend.pop("padding", None)
    backend.pop("post_processor", None)  # adds special tokens only; documents get theirs from `document_ids`
    return json.dumps({"backend": backend, "ids": document_ids(tokenizer), "entries": len(tokenizer)}, sort_keys=True)


def _problem(what: str, given: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(what=what, given=given, source="tokenizer_name", remedy=remedy)])
