"""Tokenise once: what a document becomes, what is refused, and when the cache is a hit."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hfpretrain.data import tokenise
from hfpretrain.data.collator import PackedBlocks, PackedCollator
from hfpretrain.data.documents import DataReport, Documents, load_documents, shared_documents
from hfpretrain.data.packing import pack_best_fit
from hfpretrain.data.sources import SourceError
from hfpretrain.data.tokenizer import END_TOKEN, START_TOKEN, byte_tokenizer

START, END = 256, 257
Load = Callable[..., tuple[Documents, Documents, DataReport]]


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    os.utime(path, (1_000_000_000, 1_000_000_000))  # old enough for its content hash to be remembered
    return path


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def call(*sources: Path | str, **settings: Any) -> tuple[Documents, Documents, DataReport]:
        settings = {"tokenizer": byte_tokenizer(), "validation_fraction": 0.0, "num_proc": 1, **settings}
        return load_documents([str(source) for source in sources], cache_dir=tmp_path / "cache", **settings)

    return call


def texts_of(documents: Documents) -> list[str]:
    """Bytes tokenizer: the tokens between start and end are the bytes of the text."""
    contents = [documents.document(i) for i in range(len(documents))]
    assert all(c[0] == START and c[-1] == END and c[1:-1].max(initial=0) < 256 for c in contents)
    return [bytes(c[1:-1].astype(np.uint8)).decode("utf-8") for c in contents]


TEXTS = ["first", "zwölf Boxkämpfer", f"a {START_TOKEN} in the {END_TOKEN} text", "", "last\n"]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_document_is_start_text_end(load: Load, tmp_path: Path, num_proc: int) -> None:
    files = [write_jsonl(tmp_path / "a.jsonl", TEXTS), write_jsonl(tmp_path / "b.jsonl", ["again"])]
    documents, validation, report = load(*files, num_proc=num_proc)
    kept = [text for text in [*TEXTS, "again"] if text]
    assert texts_of(documents) == kept
    assert documents.text_bytes.tolist() == [len(text.encode()) for text in kept]
    assert documents.lengths.tolist() == [len(text.encode()) + 2 for text in kept]
    assert documents.starts.tolist() == np.cumsum([0, *documents.lengths[:-1]]).tolist()
    assert documents.tokens.dtype == np.uint16
    assert len(documents.tokens) == report.train_tokens == int(documents.lengths.sum())
    assert (report.train_documents, report.dropped_empty, report.undecodable_files) == (5, 1, 0)
    assert (len(validation), len(validation.tokens), list(report.validation_texts())) == (0, 0, [])


def backend(**parts: Any) -> Tokenizer:
    tokenizer = byte_tokenizer().backend_tokenizer
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def fast(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]


def test_what_a_tokenizer_adds_by_itself_has_no_effect(load: Load, tmp_path: Path) -> None:
    eager = processors.TemplateProcessing(
        single=f"{START_TOKEN} {START_TOKEN} $A {END_TOKEN}", special_tokens=[(START_TOKEN, START), (END_TOKEN, END)]
    )
    tokenizer = fast(backend(post_processor=eager), bos_token=START_TOKEN, eos_token=END_TOKEN, pad_token=END_TOKEN)
    tokenizer("warm up", truncation=True, max_length=3, padding="max_length")  # leaves its mark on the backend
    assert tokenizer("ab")["input_ids"] == [START, START, 97, 98, END]
    documents, _, _ = load(write_jsonl(tmp_path / "a.jsonl", TEXTS), tokenizer=tokenizer)
    assert texts_of(documents) == [text for text in TEXTS if text]
    assert tokenizer(END_TOKEN, add_special_tokens=False)["input_ids"] == [END]  # the caller's own is as it was


def test_without_bos_the_end_token_serves_as_both(load: Load, tmp_path: Path) -> None:
    tokenizer = fast(backend(), eos_token=END_TOKEN)
    documents, _, _ = load(write_jsonl(tmp_path / "a.jsonl", ["ab"]), tokenizer=tokenizer)
    assert documents.tokens.read(0, 4).tolist() == [END, 97, 98, END]
    assert (documents.start_id, documents.end_id) == (END, END)


def test_a_special_token_that_cannot_be_spelt_out_is_refused(load: Load, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = fast(words, eos_token="<eos>", unk_token="<unk>")
    with pytest.raises(SourceError, match=r"a\.jsonl, row 2: the plain text gives the special token 0 \('<eos>'\)"):
        load(write_jsonl(tmp_path / "a.jsonl", ["a b", "a <eos> a"]), tokenizer=tokenizer)


def test_large_vocabularies_need_four_bytes(load: Load, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<eos>": 0, **{f"w{i}": i for i in range(1, 70_000)}}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = fast(words, eos_token="<eos>")
    documents, _, _ = load(write_jsonl(tmp_path / "a.jsonl", ["w1 w69999"]), tokenizer=tokenizer)
    assert documents.tokens.dtype == np.uint32
    assert documents.tokens.read(0, 4).tolist() == [0, 1, 69_999, 0]


def test_validation_is_chosen_by_text_alone(load: Load, tmp_path: Path) -> None:
    texts = [f"document number {i}" for i in range(400)]
    shuffled = texts[::-1] + texts[:50]  # another order, and some texts twice
    split = {}
    for name, rows, num_proc in (("a", texts, 1), ("b", shuffled, 1), ("c", shuffled, 2)):
        halves = [write_jsonl(tmp_path / f"{name}{i}.jsonl", rows[i::2]) for i in (0, 1)]
        train, validation, report = load(*halves, validation_fraction=0.25, num_proc=num_proc)
        assert list(report.validation_texts()) == texts_of(validation)
        assert sorted(texts_of(train) + texts_of(validation)) == sorted(rows)
        split[name] = (set(texts_of(train)), set(texts_of(validation)))
        assert not split[name][0] & split[name][1]
    assert split["a"] == split["b"] == split["c"]
    assert 70 <= len(split["a"][1]) <= 130  # 100 expected, standard deviation 8.7


def test_reads_anywhere_equal_the_flat_tokens(load: Load, tmp_path: Path) -> None:
    texts = [f"{i} " * (i % 7 + 1) for i in range(3000)]  # more rows than one record batch of the file
    train, validation, _ = load(write_jsonl(tmp_path / "a.jsonl", texts), validation_fraction=0.3, num_proc=2)
    rng = np.random.default_rng(0)
    for documents in (train, validation):
        flat = np.concatenate([documents.document(i) for i in range(len(documents))])
        assert len(flat) == len(documents.tokens)
        for _ in range(200):
            start = int(rng.integers(0, len(flat)))
            length = int(rng.integers(0, min(3000, len(flat) - start) + 1))
            assert np.array_equal(documents.tokens.read(start, length), flat[start : start + length])
        with pytest.raises(IndexError):
            documents.tokens.read(len(flat) - 1, 2)
        again = pickle.loads(pickle.dumps(documents))
        assert np.array_equal(again.tokens.read(5, 100), flat[5:105])


def test_reads_do_not_copy(load: Load, tmp_path: Path) -> None:
    documents, _, _ = load(write_jsonl(tmp_path / "a.jsonl", ["some text"]))
    view = documents.tokens.read(1, 4)
    assert np.shares_memory(view, documents.tokens.read(2, 4))
    assert not view.flags.writeable


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that went through the tokenizer in this process."""
    seen: list[str] = []
    original = tokenise.Encoder.__call__

    def counting(self: tokenise.Encoder, texts: Sequence[str], names: Sequence[str]) -> list[np.ndarray]:
        seen.extend(texts)
        return original(self, texts, names)

    monkeypatch.setattr(tokenise.Encoder, "__call__", counting)
    return seen


def test_a_second_call_tokenises_nothing(load: Load, tmp_path: Path, tokenised: list[str]) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first, _, report = load(file)
    assert (len(tokenised), report.cache_hit) == (5, False)
    second, _, report = load(file, num_proc=2)  # the number of processes is not part of the key
    assert (len(tokenised), report.cache_hit) == (5, True)
    assert first.fingerprint == second.fingerprint
    moved = file.rename(tmp_path / "elsewhere.jsonl")
    assert load(moved)[2].cache_hit  # content counts, not names


def test_other_content_is_a_miss(load: Load, tmp_path: Path, tokenised: list[str]) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["one"])
    load(file)
    other = fast(backend(), eos_token=END_TOKEN)  # differs in its start token only
    documents, _, report = load(file, tokenizer=other)
    assert not report.cache_hit
    assert documents.document(0)[0] == END
    file.write_text(json.dumps({"text": "two"}) + "\n")  # same size
    documents, _, report = load(file)
    assert not report.cache_hit
    assert texts_of(documents) == ["two"]
    assert tokenised == ["one", "one", "two"]


def test_a_damaged_entry_is_made_again(load: Load, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    _, _, report = load(file)
    arrow = next(report.cache_path.glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    documents, _, report = load(file)
    assert not report.cache_hit
    assert len(documents) == 4


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from hfpretrain.data import documents, tokenise
from hfpretrain.data.tokenizer import byte_tokenizer
folder, mode = Path(sys.argv[1]), sys.argv[2]
original = tokenise.Encoder.__call__
def counting(self, texts, names):
    with open(folder / "calls", "a") as file:
        file.write("call\\n")
    time.sleep(0.5)  # so that the other process surely arrives in between
    return original(self, texts, names)
tokenise.Encoder.__call__ = counting
if mode == "killed":
    documents.os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)  # files written, marker not
train, _, report = documents.load_documents(
    [str(folder / "a.jsonl")], byte_tokenizer(), validation_fraction=0.0, cache_dir=folder / "cache", num_proc=1
)
print(len(train), report.cache_hit)
"""


def start(folder: Path, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), mode]
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_two_processes_tokenise_once(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    processes = [start(tmp_path, "normal") for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert sorted(out.split() for out, _ in outputs) == [["4", "False"], ["4", "True"]], outputs
    assert (tmp_path / "calls").read_text().count("call") == 1


def test_a_killed_run_leaves_no_false_cache(load: Load, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    killed = start(tmp_path, "killed")
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert list((tmp_path / "cache" / "documents").glob("*/*.arrow"))  # it came as far as the files
    documents, _, report = load(file)
    assert not report.cache_hit
    assert texts_of(documents) == [text for text in TEXTS if text]


def test_splits_without_documents_are_refused(load: Load, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="all of them are empty"):
        load(write_jsonl(tmp_path / "a.jsonl", ["", ""]))
    with pytest.raises(
        SourceError, match=r"0 for validation with validation_fraction = 0\.001; give more documents or a"
    ):
        load(write_jsonl(tmp_path / "b.jsonl", ["one"]), validation_fraction=0.001)
    with pytest.raises(ValueError, match="validation_fraction is 1"):
        load(tmp_path / "b.jsonl", validation_fraction=1)


def test_a_stock_trainer_trains_on_packed_blocks(load: Load, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    documents, _, _ = load(write_jsonl(tmp_path / "a.jsonl", ["abababab" * 4, "abab" * 7] * 20))
    blocks = PackedBlocks(documents, pack_best_fit(documents.lengths, 64))
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=15,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=blocks, data_collator=PackedCollator())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(np.log(258), abs=0.5)
    assert losses[-1] < 3.0


def test_documents_in_two_sets_are_counted(tmp_path: Path, load: Any) -> None:
    """Only equal texts count, not equal lengths; "ab" is there twice and its copy elsewhere counts once."""
    train, _, _ = load(write_jsonl(tmp_path / "train.jsonl", ["ab", "cd", "efg", "ab", "long text"]))
    other, _, _ = load(write_jsonl(tmp_path / "other.jsonl", ["ab", "dc", "gfe", "long text", "new"]))
    assert shared_documents(other, train) == 2
    assert shared_documents(train, other) == 3
    assert shared_documents(other, train, most_reads=3) is None
    assert shared_documents(train, train) == 5
