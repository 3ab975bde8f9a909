"""Which positions are targets, where documents begin, and the variable-length layout, all written out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hfpretrain.data.collator import PackedBlocks, PackedCollator
from hfpretrain.data.order import BlockOrder
from hfpretrain.data.packing import pack_best_fit, pack_concat

ROWS: list[dict[str, Any]] = [
    {"input_ids": [10, 11, 12, 13, 14, 15], "piece_lengths": [4, 2]},  # full
    {"input_ids": np.array([20, 21, 22, 2, 2, 2]), "piece_lengths": np.array([1, 2])},  # three of padding
]


def test_targets_and_positions_by_hand() -> None:
    batch = PackedCollator()(ROWS)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13, 14, 15], [20, 21, 22, 2, 2, 2]]
    assert batch["labels"].tolist() == [[-100, 11, 12, 13, -100, 15], [-100, -100, 22, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 0, 1, 0, 1, 2]]
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert int((batch["labels"] != -100).sum()) == 5


def test_without_isolation_only_the_positions_go() -> None:
    with_isolation, without = PackedCollator()(ROWS), PackedCollator(None)(ROWS)
    assert set(without) == {"input_ids", "labels"}
    assert torch.equal(with_isolation["labels"], without["labels"])


def test_varlen_is_the_same_rows_behind_one_another() -> None:
    rows, flat = PackedCollator()(ROWS), PackedCollator("varlen")(ROWS)
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(flat[name], rows[name].reshape(1, -1))
    assert flat["cu_seq_lens_q"].tolist() == [0, 4, 6, 7, 9, 12]
    assert flat["cu_seq_lens_k"].tolist() == [0, 4, 6, 7, 9, 12]
    assert flat["cu_seq_lens_q"].dtype == torch.int32
    assert (flat["max_length_q"], flat["max_length_k"]) == (4, 4)
    assert type(flat["max_length_q"]) is int


def test_a_row_of_padding_alone_has_no_target() -> None:
    batch = PackedCollator()([{"input_ids": [2, 2, 2], "piece_lengths": []}])
    assert int((batch["labels"] != -100).sum()) == 0
    assert batch["position_ids"].tolist() == [[0, 1, 2]]


def test_inputs_are_not_shared_with_labels_or_the_caller() -> None:
    row: dict[str, Any] = {"input_ids": np.array([1, 2, 3]), "piece_lengths": [3]}
    batch = PackedCollator()([row])
    batch["labels"][0, 1] = 99
    batch["input_ids"][0, 2] = 77
    assert batch["input_ids"].tolist() == [[1, 2, 77]]
    assert row["input_ids"].tolist() == [1, 2, 3]


def test_impossible_rows_are_refused() -> None:
    collator = PackedCollator()
    with pytest.raises(ValueError, match="no block"):
        collator([])
    with pytest.raises(ValueError, match=r"rows of \[2, 3\]"):
        collator([{"input_ids": [1, 2], "piece_lengths": [2]}, {"input_ids": [1, 2, 3], "piece_lengths": [3]}])
    with pytest.raises(ValueError, match="row 0 has piece_lengths"):
        collator([{"input_ids": [1, 2], "piece_lengths": [3]}])
    with pytest.raises(ValueError, match="at least 1 token"):
        collator([{"input_ids": [1, 2], "piece_lengths": [0, 2]}])
    with pytest.raises(ValueError, match="expected one of varlen, position_ids"):
        PackedCollator("flash")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of mechanism 'mask' only"):
        PackedCollator("varlen", windows=3)
    with pytest.raises(ValueError, match=r"rows of \[2\] pieces"):
        PackedCollator("single")([{"input_ids": [1, 2], "piece_lengths": [1, 1]}])


def test_the_mask_shows_each_token_its_own_document_up_to_itself() -> None:
    rows = [{"input_ids": [5, 6, 7, 8, 9, 2], "piece_lengths": [2, 3]}]  # two documents and one padding token
    mask = PackedCollator("mask")(rows)["attention_mask"]
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert mask.shape == (1, 1, 6, 6)
    assert mask[0, 0].int().tolist() == expected
    by_kind = PackedCollator("mask", windows={"full_attention": None, "sliding_attention": 2})(rows)["attention_mask"]
    assert torch.equal(by_kind["full_attention"], mask)
    expected[4][2] = 0  # the third token of its document is two away from the first
    assert by_kind["sliding_attention"][0, 0].int().tolist() == expected
    assert torch.equal(PackedCollator("mask", windows=2)(rows)["attention_mask"], by_kind["sliding_attention"])
    added = PackedCollator("mask", additive=True)(rows)["attention_mask"]
    assert torch.equal(added == 0, mask)
    assert (added[~mask] == torch.finfo(torch.float32).min).all()


def test_seq_idx_numbers_the_pieces_of_each_row() -> None:
    assert PackedCollator("seq_idx")(ROWS)["seq_idx"].dtype == torch.int32
    rows = [{"input_ids": [5, 6, 7], "piece_lengths": [2, 1]}, {"input_ids": [5, 6, 7], "piece_lengths": [1, 1]}]
    assert PackedCollator("seq_idx")(rows)["seq_idx"].tolist() == [[0, 0, 1], [0, 1, 2]]


def test_single_rows_are_cut_to_the_longest() -> None:
    rows = [{"input_ids": [5, 6, 2, 2], "piece_lengths": [2]}, {"input_ids": [5, 6, 7, 2], "piece_lengths": [3]}]
    batch = PackedCollator("single")(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 2], [5, 6, 7]]
    assert batch["labels"].tolist() == [[-100, 6, -100], [-100, 6, 7]]
    assert set(batch) == {"input_ids", "labels"}  # positions are left to the model: there is nothing to tell it


def documents(lengths: list[int]) -> Any:
    """Token i of the buffer is 100 + i."""
    flat = np.arange(100, 100 + sum(lengths), dtype=np.uint16)

    class Buffer:
        def __len__(self) -> int:
            return len(flat)

        def read(self, start: int, length: int) -> np.ndarray:
            return flat[start : start + length]

    return SimpleNamespace(tokens=Buffer(), lengths=np.array(lengths), end_id=7)


def test_packed_blocks_read_what_the_index_says() -> None:
    docs = documents([3, 2, 4])
    concat = PackedBlocks(docs, pack_concat(docs.lengths, 4))
    assert [concat[i]["input_ids"].tolist() for i in range(2)] == [[100, 101, 102, 103], [104, 105, 106, 107]]
    assert [concat[i]["piece_lengths"].tolist() for i in range(2)] == [[3, 1], [1, 3]]
    best_fit = PackedBlocks(docs, pack_best_fit(docs.lengths, 5))
    assert len(best_fit) == 2
    assert [best_fit[i]["input_ids"].tolist() for i in range(2)] == [[105, 106, 107, 108, 7], [100, 101, 102, 103, 104]]
    assert best_fit[0]["input_ids"].dtype == np.int64
    with pytest.raises(IndexError):
        best_fit[2]


def test_packed_blocks_follow_an_order_beyond_the_first_epoch() -> None:
    docs = documents([4] * 6)
    index, order = pack_concat(docs.lengths, 4), BlockOrder(6, 1)
    ordered, plain = PackedBlocks(docs, index, order), PackedBlocks(docs, index)
    for i in range(15):
        assert ordered[i]["input_ids"].tolist() == plain[order.block_at(i)]["input_ids"].tolist()


def test_an_index_of_other_documents_is_refused() -> None:
    docs = documents([3, 2, 4])
    with pytest.raises(ValueError, match="covers 5 tokens but the documents have 9"):
        PackedBlocks(docs, pack_concat(np.array([3, 2]), 4))
    with pytest.raises(ValueError, match="order has 3 blocks"):
        PackedBlocks(docs, pack_concat(docs.lengths, 4), BlockOrder(3, 0))
