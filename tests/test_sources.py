"""What `--dataset` names, and the messages for the rows that every large corpus has somewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hfpretrain.data import sources, spans
from hfpretrain.data.sources import SourceError, content_key, find_sources
from hfpretrain.data.spans import iter_texts, plan_spans, read_span

TEXTS = ["first line\nsecond line", "zwölf", "", "\ufeffwith a mark\r\n"]


def read(name: str | Path, text_column: str = "text") -> list[str]:
    found = plan_spans(find_sources([str(name)]))
    return [text for span in found for _, text in read_span(span, text_column=text_column)]


def test_all_kinds_of_files_give_the_same_texts(tmp_path: Path) -> None:
    table = pa.table({"id": list(range(4)), "text": TEXTS})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    with pa.ipc.new_file(str(tmp_path / "file.arrow"), table.schema) as file:
        file.write_table(table)
    with pa.ipc.new_stream(str(tmp_path / "stream.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(json.dumps({"text": text}).encode() for text in TEXTS))
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_bytes(text.encode())
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    split = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})})
    split.save_to_disk(str(tmp_path / "saved_splits"))
    for name in ("a.parquet", "file.arrow", "stream.arrow", "a.jsonl", "*.txt", "saved", "saved_splits"):
        assert read(tmp_path / name) == TEXTS, name


@pytest.mark.parametrize("span_bytes", [1, 7, 64, 1000])
def test_jsonl_spans_read_every_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, span_bytes: int) -> None:
    texts = [str(i) * (i % 13) for i in range(60)]
    file = tmp_path / "a.jsonl"
    file.write_text("\n\n".join(json.dumps({"text": text}) for text in texts))  # blank lines are no rows
    monkeypatch.setattr(spans, "SPAN_BYTES", span_bytes)
    assert read(file) == texts


def test_hub_names_go_through_load_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder))
    asked: list[Any] = []

    def load_dataset(*arguments: Any, **keywords: Any) -> datasets.Dataset:
        asked.append((arguments, keywords))
        return datasets.load_from_disk(str(folder))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("owner/name:config") == TEXTS
    assert asked == [(("owner/name", "config"), {"split": "train"})]

    def unreachable(*arguments: Any, **keywords: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(SourceError, match=r"no such file or folder here.*no route"):
        read("owner/nmae")


def test_stdlib_is_the_interpreters_own_files() -> None:
    found = find_sources(["stdlib"])
    paths = [file.path for file in found.files]
    assert json.__file__ in paths
    assert paths == sorted(paths)
    assert not any("site-packages" in path for path in paths)
    assert len(paths) > 300


BAD_ROWS = [
    (b'{"text": "\xff\xfe"}', r"row 3: not valid UTF-8 at byte 10"),
    (b'{"content": "x", "id": 1}', r"row 3: no column 'text'; its columns are \['content', 'id'\]"),
    (b'{"text": null}', r"row 3: column 'text' holds NoneType, expected text"),
    (b'{"text": "x"', r"row 3: not valid JSON"),
    (b'["x"]', r"row 3: a JSON list"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
@pytest.mark.parametrize("span_bytes", [8, 1 << 20])
def test_a_bad_jsonl_row_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: bytes, message: str, span_bytes: int
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + row + b"\n")  # a blank line counts, as in an editor
    monkeypatch.setattr(spans, "SPAN_BYTES", span_bytes)
    with pytest.raises(SourceError, match=r"a\.jsonl, " + message):
        read(file)


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n{"text": "a\\ud800"}\n')
    with pytest.raises(SourceError, match=r"a\.jsonl, row 2: character 1 is a lone surrogate \(U\+D800\)"):
        list(iter_texts([str(file)]))


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"good\xff")
    with pytest.raises(SourceError, match=r"bad\.txt, row 1: not valid UTF-8 at byte 4"):
        read(tmp_path / "bad.txt")
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"good", b"\xff"], pa.binary()).buffers())
    with pa.ipc.new_stream(str(tmp_path / "bad.arrow"), pa.schema({"text": pa.string()})) as stream:
        stream.write_table(pa.table({"text": broken}))
    with pytest.raises(SourceError, match=r"bad\.arrow, row 2: not valid UTF-8 at byte 0"):
        read(tmp_path / "bad.arrow")
    pq.write_table(pa.table({"content": ["x"], "text": [1]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a\.parquet: no column 'body'; its columns are \['content', 'text'\]"):
        read(tmp_path / "a.parquet", "body")
    with pytest.raises(SourceError, match="row 1: column 'text' holds int"):
        read(tmp_path / "a.parquet")


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(SourceError, match="no file matches"):
        find_sources([str(tmp_path / "*.jsonl")])
    with pytest.raises(SourceError, match="no file matches"):
        find_sources([str(tmp_path / "typo.txt")])
    with pytest.raises(SourceError, match=r"cannot tell how to read .*a\.csv; known endings"):
        find_sources([str(tmp_path / "a.csv")])
    with pytest.raises(SourceError, match=r"not one that Dataset\.save_to_disk wrote"):
        find_sources([str(tmp_path)])
    with pytest.raises(SourceError, match="named twice"):
        find_sources([str(tmp_path / "a.txt"), str(tmp_path / "*.txt")])
    with pytest.raises(SourceError, match="no data source"):
        find_sources([])


def test_content_key_reads_a_file_again_only_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    os.utime(file, (1_000_000_000, 1_000_000_000))
    hashed: list[str] = []
    original = sources._hash_file

    def counting(path: str) -> str:
        hashed.append(path)
        return original(path)

    monkeypatch.setattr(sources, "_hash_file", counting)
    found = find_sources([str(file)])
    keys = [content_key(found, cache_dir=tmp_path / "cache") for _ in range(3)]
    assert len(set(keys)) == 1
    assert len(hashed) == 1
    file.write_text("two")
    assert content_key(found, cache_dir=tmp_path / "cache") != keys[0]


def test_tokenizer_texts_leave_out_validation_and_stop_in_time(tmp_path: Path) -> None:
    texts = [f"text {i:04}" for i in range(1000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    name = str(tmp_path / "a.jsonl")
    assert list(iter_texts([name])) == texts
    kept = list(iter_texts([name], validation_fraction=0.5))
    assert 400 < len(kept) < 600
    assert len(list(iter_texts([name], max_bytes=90))) == 10
