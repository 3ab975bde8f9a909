"""The three ways to a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from hfpretrain.data import tokenizer as module
from hfpretrain.data.tokenizer import END_TOKEN, START_TOKEN, byte_tokenizer, document_ids, load_tokenizer
from hfpretrain.errors import ConfigError

TEXT = "def f(x):\n\treturn 'zwölf' + x  # \x00 日本 🎈\r\n"
CORPUS = [f"def function_{i}(argument): return argument + {i}\n" * 3 for i in range(200)]


def test_byte_tokenizer_ids_are_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes", texts=None, cache_dir=tmp_path)
    assert len(tokenizer) == 258
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    assert [tokenizer.convert_ids_to_tokens(i) for i in (256, 257)] == [START_TOKEN, END_TOKEN]
    assert document_ids(tokenizer) == (256, 257)
    assert tokenizer("a")["input_ids"] == [256, 97]  # a prompt begins as every training document did
    assert len({*module._byte_characters()}) == 256


def test_trained_tokenizer_has_exactly_the_size_and_loses_nothing(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("train:300", texts=iter(CORPUS), cache_dir=tmp_path)
    assert len(tokenizer) == 300
    ids = tokenizer(CORPUS[0], add_special_tokens=False)["input_ids"]
    assert len(ids) < len(CORPUS[0].encode()) / 2
    assert tokenizer.decode(tokenizer(TEXT, add_special_tokens=False)["input_ids"]) == TEXT
    assert document_ids(tokenizer) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert START_TOKEN in tokenizer.get_vocab()
    assert END_TOKEN in tokenizer.get_vocab()


def test_trained_tokenizer_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []
    original = module._train

    def counting(size: int, texts: list[str]) -> PreTrainedTokenizerFast:
        trained.append(size)
        return original(size, texts)

    monkeypatch.setattr(module, "_train", counting)
    first = load_tokenizer("train:300", texts=CORPUS, cache_dir=tmp_path)
    second = load_tokenizer("train:300", texts=CORPUS, cache_dir=tmp_path)
    assert trained == [300]
    assert first.get_vocab() == second.get_vocab()
    load_tokenizer("train:301", texts=CORPUS, cache_dir=tmp_path)
    load_tokenizer("train:300", texts=CORPUS[1:], cache_dir=tmp_path)
    assert trained == [300, 301, 300]


def test_a_folder_is_loaded_and_texts_are_left_alone(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "saved")

    def texts() -> Iterator[str]:
        raise AssertionError("read without need")
        yield ""

    tokenizer = load_tokenizer(str(tmp_path / "saved"), texts=texts(), cache_dir=tmp_path)
    assert tokenizer("ab")["input_ids"] == [256, 97, 98]


def test_no_end_token_is_refused_with_a_remedy(tmp_path: Path) -> None:
    backend = byte_tokenizer().backend_tokenizer
    without = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=START_TOKEN)  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match=r"no end-of-text token[\s\S]*add_special_tokens"):
        document_ids(without)
    without.save_pretrained(tmp_path / "saved")
    with pytest.raises(ConfigError, match="no end-of-text token"):
        load_tokenizer(str(tmp_path / "saved"), texts=None, cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["train:", "train:big", "train:257", "train:-5"])
def test_impossible_sizes_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 258"):
        load_tokenizer(name, texts=CORPUS, cache_dir=tmp_path)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ask for train:\d+ or less"):
        load_tokenizer("train:50_000", texts=CORPUS, cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="no text to train"):
        load_tokenizer("train:300", texts=None, cache_dir=tmp_path)
    assert not list((tmp_path / "tokenizers").glob("bpe*[!k]"))  # nothing but the lock is left
