"""Texts come out of every kind of file exactly as they went in, and everything that is wrong is said at once."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hfpretrain.bpb.corpus import read_corpus
from hfpretrain.errors import ConfigError

TEXTS = [
    "one\r\ntwo\rthree\n",  # line ends of three systems
    "a\u2028b\u2029c\x85d\x0ce",  # what str.splitlines would cut at
    "\ufeffa byte order mark",
    "nul \x00 and bell \x07",
    "family \U0001f468\u200d\U0001f469\u200d\U0001f467",  # joined by zero-width joiners
    "\u1112\u1161\u11ab\u1100\u1173\u11af",  # Korean in decomposed letters
    " leading, trailing ",
    "",
    "x",
]
BYTES = [len(text.encode("utf-8")) for text in TEXTS]


def _write(folder: Path, kind: str) -> str:
    table = pa.table({"text": TEXTS, "lang": [f"l{n % 2}" for n in range(len(TEXTS))], "number": range(len(TEXTS))})
    if kind == "txt":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_bytes(text.encode("utf-8"))
        return str(folder / "*.txt")
    if kind == "jsonl":
        (folder / "a.jsonl").write_text("\n\n".join(map(json.dumps, table.to_pylist())), newline="\n")
        return str(folder / "a.jsonl")
    if kind == "jsonl_raw":  # U+2028 and others unescaped inside a line
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist())
        (folder / "a.jsonl").write_bytes("".join(lines).encode("utf-8"))
        return str(folder / "a.jsonl")
    if kind == "parquet":
        pq.write_table(table, folder / "a.parquet", row_group_size=4)
        return str(folder / "a.parquet")
    datasets.Dataset.from_list(table.to_pylist()).save_to_disk(folder / "saved")
    return str(folder / "saved")


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl_raw", "parquet", "saved"])
def test_every_character_survives(kind: str, tmp_path: Path) -> None:
    corpus = read_corpus([_write(tmp_path, kind)])
    assert corpus.texts == TEXTS
    assert corpus.text_bytes.tolist() == BYTES
    assert len(set(corpus.ids)) == len(corpus) == len(TEXTS)


def test_columns_name_domains_and_ids(tmp_path: Path) -> None:
    for kind in ("jsonl", "parquet"):
        corpus = read_corpus([_write(tmp_path, kind)], domain_column="lang", id_column="number")
        assert corpus.ids == [str(n) for n in range(len(TEXTS))]
        assert corpus.domains == [f"l{n % 2}" for n in range(len(TEXTS))]
    kept = corpus.only(corpus.text_bytes > 10)
    assert kept.ids == [str(n) for n, size in enumerate(BYTES) if size > 10]
    assert kept.fingerprint != corpus.fingerprint


def test_default_ids_and_domains_do_not_depend_on_the_folder(tmp_path: Path) -> None:
    found = []
    for name in ("here", "there"):
        for inner in ("x", "y"):
            (tmp_path / name / inner).mkdir(parents=True)
            (tmp_path / name / inner / "a.jsonl").write_text('{"text": "p"}\n\n{"text": "q"}\n')
        (tmp_path / name / "b.txt").write_text("r")
        found.append(read_corpus([str(tmp_path / name / part) for part in ("x/a.jsonl", "y/a.jsonl", "b.txt")]))
    here, there = found
    assert here.ids == ["x/a.jsonl:1", "x/a.jsonl:3", "y/a.jsonl:1", "y/a.jsonl:3", "b.txt:1"]  # lines
    assert here.domains[-1] == "b"
    assert len(set(here.domains[:4])) == 2  # two files of one name are two sources
    assert here.fingerprint == there.fingerprint
    (tmp_path / "there" / "b.txt").write_text("s")
    changed = read_corpus([str(tmp_path / "there" / part) for part in ("x/a.jsonl", "y/a.jsonl", "b.txt")])
    assert changed.fingerprint != here.fingerprint


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text('{"text": "a", "id": 1}\n{"text": "b", "id": 1}\n{"text": "c", "id": 2}\n')
    (tmp_path / "half.jsonl").write_text('{"text": "a", "id": 3}\n{"text": "\\ud800", "id": 4}\n')
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "a", "id": 5}\n{"text": "\xe9", "id": 6}\n')
    (tmp_path / "other.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "plain.txt").write_text("a")
    names = ["good.jsonl", "half.jsonl", "latin.jsonl", "other.jsonl", "plain.txt", "nothing.jsonl", "*.jsonl"]
    with pytest.raises(ConfigError) as caught:
        read_corpus([str(tmp_path / name) for name in names], id_column="id")
    text = str(caught.value)
    for expected in (
        "half.jsonl, row 2: character 0 is a lone surrogate",
        "latin.jsonl, row 2: not valid UTF-8 at byte 10",
        "other.jsonl, row 1: no column 'text'; its columns are ['body']. Name one with --text_column.",
        "plain.txt: a text file has no columns; leave out --id_column id",
        "nothing.jsonl: no file matches",
        "good.jsonl is named twice",
        "ids belong to more than one document",
    ):
        assert expected in text, expected


def test_one_broken_column_or_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "lang": null}\n')
    with pytest.raises(ConfigError, match=r"row 1: column 'lang' holds NoneType, expected text"):
        read_corpus([str(tmp_path / "a.jsonl")], domain_column="lang")
    with pytest.raises(ConfigError, match=r"no column 'where'.*--domain_column"):
        read_corpus([str(tmp_path / "a.jsonl")], domain_column="where")
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "nothing.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no text to score"):
        read_corpus([str(tmp_path / "empty.jsonl"), str(tmp_path / "nothing.jsonl")])
    with pytest.raises(ConfigError, match="no text to score is named"):
        read_corpus([])
    pq.write_table(pa.table({"text": ["a"], "n": [1.5]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="column 'n' holds float"):
        read_corpus([str(tmp_path / "a.parquet")], id_column="n")
