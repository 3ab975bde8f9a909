"""What a tokenizer loses is found, document by document; what it does not lose is not called lossy."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from hfpretrain.bpb.fidelity import encode, tokenizer_disagreement
from hfpretrain.data.tokenizer import byte_tokenizer
from hfpretrain.errors import ConfigError

KOREAN = unicodedata.normalize("NFD", "값과 뜻")
EDGES = {
    "CRLF": "a\r\nb\r\n",
    "line separator": "a\u2028b\x85c\x0cd",
    "byte order mark": "\ufeffa",
    "only a byte order mark": "\ufeff",
    "NUL": "a\0b",
    "emoji joined": "👩‍👩‍👧‍👦🏳️‍🌈",
    "Korean, decomposed": KOREAN,
    "empty": "",
    "one byte": "x",
    "spaces around": "  two  \n ",
    "special strings": "<|start|><|end|><s></s><|im_start|>",
}


def _spm(*, normalizer: Any = None, eats_space: bool = False) -> PreTrainedTokenizerFast:
    """SentencePiece's kind: spaces are U+2581, bytes without a token are spelled <0x0A>; a space is put in front."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "b",
        "two",
        "\u2581two",
    ]
    merges = [("\u2581", "two")]
    pieces = [*pieces, "t", "w", "o", "tw"]
    merges = [("t", "w"), ("tw", "o"), *merges]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if eats_space:  # puts a space only where there is none: "x" and " x" become the same
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always", split=False)
    else:
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        backend.normalizer = normalizers.Sequence([*([normalizer] if normalizer else []), *steps])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), _spm(), ByT5Tokenizer()], ids=["bytes", "spm", "slow"])
def test_edge_texts_come_back_byte_by_byte(tokenizer: Any) -> None:
    encoded = encode(tokenizer, list(EDGES.values()))
    assert encoded.lossy == [""] * len(EDGES)
    assert encoded.text_bytes.tolist() == [len(text.encode()) for text in EDGES.values()]
    assert not encoded.special_tokens.any()
    assert encoded.ids[list(EDGES).index("empty")].tolist() == []
    if tokenizer.vocab_size == 258:
        assert [row.tolist() for row in encoded.ids] == [list(text.encode()) for text in EDGES.values()]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("NFC", KOREAN, f"NFC: {len(KOREAN.encode()) - len('값과 뜻'.encode())} bytes less"),
        ("NFKC", "ﬁ", "NFKC: 1 byte less"),
        ("Lowercase", "Ab", "lower case: as many bytes, others"),
        ("StripAccents", "e\u0301a", "2 bytes less, from character 1 on: '\u0301a' became 'a'"),
    ],
)
def test_what_a_normaliser_changes_is_named(name: str, text: str, reason: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = getattr(normalizers, name)()
    encoded = encode(tokenizer, ["plain", text])
    assert encoded.lossy == ["", reason]
    assert encoded.text_bytes.tolist() == [5, len(text.encode())]


def test_an_eaten_space_is_lossy_and_one_that_only_decode_hides_is_not() -> None:
    encoded = encode(_spm(eats_space=True), [" a", "a", "  two", "a  b"])
    assert encoded.lossy == ["leading space eaten: 1 byte less", "", "", ""]
    assert encoded.decode_differs.tolist() == [
        0,
        0,
        1,
        0,
    ]  # "  two" has ids of its own, decode strips one of its spaces
    assert encoded.ids[0].tolist() == encoded.ids[1].tolist()


def test_bytes_without_a_token_and_unknown_tokens_are_counted() -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))  # no token for any other byte, and no unk
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    silent = encode(PreTrainedTokenizerFast(tokenizer_object=backend), ["ab", "a\x04b"])
    assert silent.lossy == ["", "1 byte less, from character 1 on: '\\x04b' became 'b'"]
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = encode(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]"), ["a", "a b c"])
    assert named.lossy == ["", "2 unknown tokens ([UNK])"]
    assert named.unknown_tokens.tolist() == [0, 2]


def test_texts_without_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 documents, number 1 first"):
        encode(byte_tokenizer(), ["fine", "a\ud800b"])


def test_another_pre_tokeniser_than_tokenizer_json_has_is_told(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_disagreement(tokenizer, list(EDGES.values())) is None
    path = tmp_path / "tokenizer.json"
    written = json.loads(path.read_text())
    written["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(written))
    told = tokenizer_disagreement(tokenizer, [" a", "a", "b"])
    assert told is not None
    assert "on 2 of 3 documents, number 1 first (4 tokens in all against 6)" in told
    assert tokenizer_disagreement(byte_tokenizer(), ["a"]) is None  # made here, there is no file


# -- real tokenizers, where they are at hand --------------------------------------------------------------------------

ASSETS = Path(os.environ.get("HFPRETRAIN_ASSETS", "no assets"))
needs_assets = pytest.mark.skipif(not (ASSETS / "tokenizers").is_dir(), reason="set HFPRETRAIN_ASSETS to try real ones")


def _real_texts() -> list[str]:
    """Every fifth language of the declaration of human rights, some Python documentation and short sayings: 347."""
    texts: list[str] = []
    for name, step, most in (("multi_udhr", 5, 107), ("en_python_docs", 5, 100), ("multi_fortunes", 600, 140)):
        lines = (ASSETS / "corpora" / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
        texts += [json.loads(line)["text"] for line in lines[::step] if line][:most]
    return texts


@needs_assets
@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "llama2", "llama3", "gemma3", "qwen3", "qwen_tiktoken", "deepseek_v3", "deepseek_pypi", "gpt4o"),
        *("claude", "mistral_tekken", "mistral_spm_v1"),
    ],
)
def test_real_tokenizers_lose_what_their_normaliser_loses_and_nothing_else(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tokenizers" / name)
    texts = _real_texts()
    encoded = encode(tokenizer, [*texts, *EDGES.values()])
    form = {"qwen3": "NFC", "claude": "NFKC"}.get(name)
    changed = [n for n, text in enumerate(texts) if form and unicodedata.normalize(form, text) != text]
    assert [n for n, reason in enumerate(encoded.lossy[: len(texts)]) if reason] == changed
    assert all(encoded.lossy[n].startswith("NF") for n in changed)
    assert len(changed) >= (6 if form else 0)
    edges = dict(zip(EDGES, encoded.lossy[len(texts) :], strict=True))
    assert [edge for edge, reason in edges.items() if reason] == (["Korean, decomposed"] if form else [])
    assert not encoded.special_tokens.any()
    assert tokenizer_disagreement(tokenizer, texts) is None


@needs_assets
def test_llama2_loaded_as_llama_tokenizer_eats_a_space() -> None:
    tokenizer = LlamaTokenizer.from_pretrained(ASSETS / "tokenizers" / "llama2")
    encoded = encode(tokenizer, [" leading space", "leading space", "  two", "plain <s> text"])
    assert encoded.lossy[0].startswith("leading space eaten: 1 byte less")
    assert encoded.lossy[1:3] == ["", ""]
