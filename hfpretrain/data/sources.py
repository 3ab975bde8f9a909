"""What `--dataset` names: files of text, found, and fingerprinted by content (`spans.py` reads them).

A source is "stdlib" (the Python files of the running interpreter's own standard library), text files (one file = one
document), jsonl, parquet or Arrow files, globs of those, a folder written by `Dataset.save_to_disk`, or a hub data set
("owner/name" or "owner/name:config"; its "train" split). All of them end as a list of local files.
"""

from __future__ import annotations

import glob
import json
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import datasets
import pyarrow as pa
import xxhash

_KINDS = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".py"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
    ".arrow": "arrow",
}


class SourceError(ValueError):
    """A source that cannot be found or read; says which file and row, and what to do."""


@dataclass(frozen=True)
class SourceFile:
    """One local file and how to read it: kind is "text", "jsonl", "parquet" or "arrow"."""

    kind: str
    path: str


@dataclass(frozen=True)
class Sources:
    """All files in their order, and how many standard-library files were left out because they are not UTF-8."""

    files: tuple[SourceFile, ...]
    undecodable_files: int = 0


def find_sources(names: Sequence[str]) -> Sources:
    """`--dataset` entries -> files.

    Raises:
        SourceError: nothing is found under a name, its kind is unknown, or two names give the same file.
    """
    files: list[SourceFile] = []
    undecodable = 0
    for name in names:
        if name == "stdlib":
            found, undecodable = _stdlib()
        elif is_local(name):
            found = _local(name)
        else:
            found = _hub(name)
        files += found
    if not files:
        raise SourceError("no data source was named; give --dataset stdlib, files, a folder or a hub name")
    seen: set[str] = set()
    for file in files:
        if file.path in seen:
            raise SourceError(f"{file.path} is named twice in --dataset {' '.join(names)}; its text would count double")
        seen.add(file.path)
    return Sources(tuple(files), undecodable)


def is_local(name: str) -> bool:
    """Whether a name can only mean files here, so that nothing needs to be downloaded to look for them."""
    path = Path(name)
    is_path = path.is_absolute() or name.startswith(".") or len(path.parts) > 2  # the hub's are owner/name
    return glob.has_magic(name) or path.exists() or path.suffix in _KINDS or is_path


def _stdlib() -> tuple[list[SourceFile], int]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[SourceFile] = []
    undecodable = 0
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages", "__pycache__"} & set(path.relative_to(root).parts):
            continue
        try:
            path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # a few test files of Python itself are broken on purpose
            undecodable += 1
        else:
            files.append(SourceFile("text", str(path)))
    return files, undecodable


def _local(name: str) -> list[SourceFile]:
    if Path(name).is_dir():
        return _saved_to_disk(Path(name))
    paths = sorted(path for path in glob.glob(name, recursive=True) if Path(path).is_file())
    if not paths and Path(name).is_file():
        paths = [name]  # a file whose own name contains [ or *
    if not paths:
        raise SourceError(f"{name}: no file matches, seen from {Path.cwd()}")
    unknown = [path for path in paths if Path(path).suffix not in _KINDS]
    if unknown:
        raise SourceError(
            f"{name}: cannot tell how to read {unknown[0]}; known endings: {' '.join(sorted(_KINDS))}"
            " (compressed files: decompress them first)"
        )
    return [SourceFile(_KINDS[Path(path).suffix], str(Path(path).resolve())) for path in paths]


def _saved_to_disk(folder: Path) -> list[SourceFile]:
    splits = folder / "dataset_dict.json"
    if splits.exists():
        names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
        if "train" not in names:
            raise SourceError(
                f"{folder} holds the splits {names} and no 'train'; name one of its folders: {folder}/{names[0]}"
            )
        folder = folder / "train"
    state = folder / "state.json"
    if not state.exists():
        raise SourceError(
            f"{folder} is a folder but not one that Dataset.save_to_disk wrote (no state.json); "
            f"name its files with a glob, such as '{folder}/**/*.txt'"
        )
    data = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
    return [SourceFile("arrow", str((folder / entry["filename"]).resolve())) for entry in data]


def _hub(name: str) -> list[SourceFile]:
    repository, _, config = name.partition(":")
    try:
        data = datasets.load_dataset(repository, config or None, split="train")
    except Exception as error:
        raise SourceError(
            f"{name}: no such file or folder here, and the hub data set could not be loaded "
            f"({type(error).__name__}: {error}). A configuration is named as owner/name:config."
        ) from error
    paths = [entry["filename"] for entry in data.cache_files]
    rows = sum(open_table(path).num_rows for path in paths)
    if rows != len(data):  # a data set that is a selection of its files' rows: never seen for a whole split
        raise SourceError(f"{name}: its files hold {rows} rows but its train split {len(data)}; save_to_disk it first")
    return [SourceFile("arrow", path) for path in paths]


def content_key(sources: Sources, *, cache_dir: Path) -> str:
    """A hash of the contents of all files in their order; paths and dates do not count.

    Hashes are remembered in cache_dir under (path, size, time of change), so that a second start reads nothing.
    """
    memory = _HashMemory(Path(cache_dir) / "content_hashes.jsonl")
    digest = xxhash.xxh3_128()
    for file in sources.files:
        digest.update(f"{file.kind} {memory.hash_of(file.path)}\n".encode())
    memory.save()
    return digest.hexdigest()


class _HashMemory:
    """(path, size, mtime) -> content hash, kept in an append-only file. A torn line is ignored: it is hashed again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[tuple[str, int, int], str] = {}
        self.new: list[str] = []
        if path.exists():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    name, size, mtime, value = json.loads(line)
                except ValueError:
                    continue
                self.known[name, size, mtime] = value

    def hash_of(self, path: str) -> str:
        state = Path(path).stat()
        key = (path, state.st_size, state.st_mtime_ns)
        value = self.known.get(key)
        if value is None:
            value = _hash_file(path)
            # A file changed twice within the clock's resolution keeps size and mtime: fresh files are not remembered.
            if time.time_ns() - state.st_mtime_ns > 2_000_000_000:
                self.known[key] = value
                self.new.append(json.dumps([*key, value]))
        return value

    def save(self) -> None:
        if self.new:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n".join(["", *self.new, ""]))


def _hash_file(path: str) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


@lru_cache(maxsize=8)
def open_table(path: str) -> pa.Table:
    """An Arrow file in either of its two formats, memory-mapped."""
    source = pa.memory_map(path)
    try:
        return pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_file(source).read_all()
