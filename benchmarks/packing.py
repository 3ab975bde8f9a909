"""Packing side by side: ours, TRL's `pack_dataset` and a run_clm-style grouping, on the same tokenised documents.

    python benchmarks/packing.py                     # log-normal lengths, 500 tokens on average, 2048-token blocks
    python benchmarks/packing.py --dataset stdlib    # real text through the byte tokenizer

The peers rewrite the data into a new Arrow file; ours is an index over the file that is there, so its
reads are scattered. Everybody is therefore timed twice: until the blocks exist, and until each has also been read once,
in order, as int64 ("+ read"). Best of two runs each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from hfpretrain.data.collator import PackedBlocks
from hfpretrain.data.packing import PackedIndex, pack_best_fit, pack_concat
from memory_tokens import MemoryTokens

try:
    import trl.data_utils as trl_data
except ImportError:
    trl_data = None


@dataclass(frozen=True)
class Result:
    name: str
    seconds: float
    seconds_with_read: float
    blocks: int
    kept_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", nargs="+", help="real text instead of random tokens")
    parser.add_argument("--documents", type=int, default=40_000, help="random documents")
    parser.add_argument("--mean_tokens", type=float, default=500.0, help="mean length of random documents, in tokens")
    parser.add_argument("--sequence_length", type=int, default=2048, help="tokens per block")
    parser.add_argument("--index_documents", type=int, default=2_000_000, help="documents of the index-only timing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokens, lengths = _documents(arguments, Path(folder))
        print(f"{len(lengths):,} documents, {len(tokens):,} tokens, mean {lengths.mean():.0f}", end=", ")
        print(
            f"{(lengths > arguments.sequence_length).mean():.1%} longer than a block of {arguments.sequence_length}\n"
        )
        _print(
            _compare(tokens, lengths, arguments.sequence_length, Path(folder)), len(tokens), arguments.sequence_length
        )
    _index_alone(arguments)


def _random_lengths(documents: int, mean: float, seed: int) -> np.ndarray:
    """Log-normal with sigma 1, about the spread of web text; its mean is exp(mu + 1/2). Two tokens at least."""
    draws = np.random.default_rng(seed).lognormal(np.log(mean) - 0.5, 1.0, documents)
    return np.maximum(2, draws).astype(np.int64)


def _documents(arguments: argparse.Namespace, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    if arguments.dataset:
        from hfpretrain.data.documents import load_documents
        from hfpretrain.data.tokenizer import byte_tokenizer

        found, _, _ = load_documents(arguments.dataset, byte_tokenizer(), validation_fraction=0.0, cache_dir=folder)
        return np.array(found.tokens.read(0, len(found.tokens))), found.lengths
    lengths = _random_lengths(arguments.documents, arguments.mean_tokens, 0)
    return np.random.default_rng(1).integers(0, 2**16, int(lengths.sum()), dtype=np.uint16), lengths


def _compare(tokens: np.ndarray, lengths: np.ndarray, sequence_length: int, folder: Path) -> list[Result]:
    results = [
        _ours(name, pack, tokens, lengths, sequence_length)
        for name, pack in (("concat", pack_concat), ("best_fit", pack_best_fit))
    ]
    file = _as_arrow_file(tokens, lengths, folder)
    results.append(_peer("run_clm-style group_texts", file, folder, _group_texts(sequence_length)))
    if trl_data is None:
        print("TRL is not installed, so its rows are missing: pip install 'hfpretrain[bench]' (or pip install trl)\n")
        return results
    for strategy in ("wrapped", "bfd", "bfd_split"):

        def pack(data: datasets.Dataset, cache: str, strategy: str = strategy) -> datasets.Dataset:
            settings = {"cache_file_name": cache, "load_from_cache_file": False}
            return trl_data.pack_dataset(data, sequence_length, strategy, map_kwargs=settings)

        results.append(_peer(f"TRL pack_dataset {strategy}", file, folder, pack))
    return results


def _ours(
    name: str,
    pack: Callable[[np.ndarray, int], PackedIndex],
    tokens: np.ndarray,
    lengths: np.ndarray,
    sequence_length: int,
) -> Result:
    documents: Any = SimpleNamespace(tokens=MemoryTokens(tokens), end_id=0)

    def work() -> PackedIndex:
        return pack(lengths, sequence_length)

    def read(index: PackedIndex) -> None:
        blocks = PackedBlocks(documents, index)
        for block in range(index.num_blocks):
            blocks[block]

    index, alone, with_read = _timed(work, read)
    return Result(f"ours {name}", alone, with_read, index.num_blocks, index.num_tokens)


def _timed(work: Callable[[], Any], read: Callable[[Any], None]) -> tuple[Any, float, float]:
    """The outcome of the work, seconds of the work, seconds of work and reading: the better of two runs."""
    alone, together = [], []
    for _ in range(2):
        begin = time.perf_counter()
        outcome = work()
        alone.append(time.perf_counter() - begin)
        read(outcome)
        together.append(time.perf_counter() - begin)
    return outcome, min(alone), min(together)


def _as_arrow_file(tokens: np.ndarray, lengths: np.ndarray, folder: Path) -> str:
    """The same documents as the memory-mapped data set with an input_ids column that the peers take."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens.astype(np.int32)))
    table = pa.table({"input_ids": column})
    path = str(folder / "documents.arrow")
    with pa.ipc.new_stream(path, table.schema) as file:
        file.write_table(table, max_chunksize=1000)
    return path


def _peer(name: str, file: str, folder: Path, pack: Callable[[datasets.Dataset, str], datasets.Dataset]) -> Result:
    data = datasets.Dataset.from_file(file)
    cache = folder / "packed.arrow"

    def read(packed: datasets.Dataset) -> None:
        rows = packed.with_format("numpy", columns=["input_ids"], dtype=np.int64)
        for block in range(len(rows)):
            rows[block]

    packed, alone, with_read = _timed(lambda: pack(data, str(cache)), read)
    kept = sum(len(chunk.flatten()) for chunk in packed.data.column("input_ids").chunks)
    result = Result(name, alone, with_read, len(packed), kept)
    cache.unlink()
    return result


def _group_texts(sequence_length: int) -> Callable[[datasets.Dataset, str], datasets.Dataset]:
    """What run_clm-like scripts do: join the documents of 1000 rows, cut, leave out the rest of every 1000 rows."""

    def cut(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = [token for row in rows["input_ids"] for token in row]
        whole = len(joined) // sequence_length * sequence_length
        return {"input_ids": [joined[i : i + sequence_length] for i in range(0, whole, sequence_length)]}

    def pack(data: datasets.Dataset, cache: str) -> Any:
        return data.map(cut, batched=True, cache_file_name=cache, load_from_cache_file=False)

    return pack


def _print(results: list[Result], total: int, sequence_length: int) -> None:
    """Ratios are times over those of our best_fit, the slower of ours: above 1 means slower than ours."""
    ours = next(result for result in results if result.name == "ours best_fit")
    print(f"{'':26}{'tokens/s':>12}{'ratio':>9}{'+ read':>12}{'ratio':>9}{'blocks':>8}{'full':>10}{'tokens lost':>20}")
    for result in results:
        full = result.kept_tokens / (result.blocks * sequence_length) if result.blocks else 0.0
        lost = total - result.kept_tokens
        print(
            f"{result.name:26}{total / result.seconds / 1e6:>10,.1f} M{result.seconds / ours.seconds:>8.2f}x"
            f"{total / result.seconds_with_read / 1e6:>10,.1f} M"
            f"{result.seconds_with_read / ours.seconds_with_read:>8.2f}x"
            f"{result.blocks:>8,}{full:>10.3%}{lost:>12,}{lost / total:>8.2%}"
        )


def _index_alone(arguments: argparse.Namespace) -> None:
    """The index of a corpus of a size at which it matters, best of three."""
    lengths = _random_lengths(arguments.index_documents, arguments.mean_tokens, 2)
    print(f"\nindex alone: {len(lengths):,} documents, {int(lengths.sum()):,} tokens")
    for name, pack in (("concat", pack_concat), ("best_fit", pack_best_fit)):
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            index = pack(lengths, arguments.sequence_length)
            seconds.append(time.perf_counter() - begin)
        speed = lengths.sum() / min(seconds) / 1e6
        print(f"  {name:9} {speed:>8,.0f} M tokens/s (target 500), {min(seconds):.3f} s, full {index.utilisation:.4%}")


if __name__ == "__main__":
    main()
