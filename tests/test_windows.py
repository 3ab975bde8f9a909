"""Documents cut into windows: every token once, as much context as fits, and lm-eval's windows at full stride."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest

from hfpretrain.bpb.windows import NO_TARGET, Windows, cut_windows, dealt

LENGTH = 6
COUNTS = [0, 1, 2, LENGTH - 1, LENGTH, LENGTH + 1, 2 * LENGTH, 2 * LENGTH + 1, 3 * LENGTH + 4]


def _scored(windows: Windows) -> list[tuple[int, int]]:
    """(document, stream position) of everything that is scored, in order."""
    rows = zip(*(getattr(windows, name).tolist() for name in ("document", "stop", "scored")), strict=True)
    return [(document, position) for document, stop, scored in rows for position in range(stop - scored, stop)]


@pytest.mark.parametrize(
    ("count", "stride", "expected"),  # (start, stop, scored) of each window, by hand
    [
        (0, 6, []),
        (1, 6, [(0, 1, 1)]),
        (6, 6, [(0, 6, 6)]),
        (7, 6, [(0, 6, 6), (1, 7, 1)]),
        (12, 6, [(0, 6, 6), (6, 12, 6)]),
        (13, 6, [(0, 6, 6), (6, 12, 6), (7, 13, 1)]),
        (13, 3, [(0, 6, 6), (3, 9, 3), (6, 12, 3), (7, 13, 1)]),
        (8, 1, [(0, 6, 6), (1, 7, 1), (2, 8, 1)]),
    ],
)
def test_windows_by_hand(count: int, stride: int, expected: list[tuple[int, int, int]]) -> None:
    windows = cut_windows(np.array([count]), max_length=LENGTH, stride=stride)
    found = zip(windows.start.tolist(), windows.stop.tolist(), windows.scored.tolist(), strict=True)
    assert list(found) == expected


@pytest.mark.parametrize("has_prefix", [True, False])
@pytest.mark.parametrize("stride", range(1, LENGTH + 1))
def test_every_token_once_with_as_much_context_as_fits(stride: int, has_prefix: bool) -> None:
    windows = cut_windows(np.array(COUNTS), max_length=LENGTH, stride=stride, has_prefix=has_prefix)
    unpredicted = 0 if has_prefix else 1
    assert _scored(windows) == [(d, p) for d, count in enumerate(COUNTS) for p in range(count - unpredicted)]
    assert windows.num_scored == sum(max(count - unpredicted, 0) for count in COUNTS)
    assert (windows.lengths == np.minimum(windows.stop, LENGTH)).all()  # full, or from the beginning of the document
    context = [
        position - start + 1
        for start, stop, scored in zip(windows.start, windows.stop, windows.scored, strict=True)
        for position in range(stop - scored, stop)
    ]
    assert windows.mean_context == pytest.approx(sum(context) / len(context), rel=1e-12)


def _slice(stream: np.ndarray, _: int, start: int, stop: int) -> np.ndarray:
    return stream[start:stop]


def test_full_stride_is_lm_evals_rolling_windows() -> None:
    """Written from the description of lm-eval 0.4.13's windows with context_len 1: inputs and targets are equal."""
    for count in range(1, 40):
        stream = [-1, *range(count)]
        expected, predicted = [], 0
        while predicted < count:
            new = min(LENGTH, count - predicted)
            end = predicted + new  # tokens predicted after this window
            inputs = stream[max(end - LENGTH, 0) : end] if predicted else stream[:new]
            expected.append((inputs, list(range(predicted, end))))
            predicted = end
        windows = cut_windows(np.array([count]), max_length=LENGTH)
        read = partial(_slice, np.array(stream))
        found = []
        for number in range(len(windows)):
            inputs, targets = windows.filled(np.array([number]), read, padding_id=-7)
            found.append((inputs[0].tolist(), targets[0][targets[0] != NO_TARGET].tolist()))
        assert found == expected


def test_batches_hold_every_window_once_and_little_padding() -> None:
    counts = np.random.default_rng(0).integers(0, 40, size=200)
    windows = cut_windows(counts, max_length=LENGTH * 4)
    for rows, least in itertools.product((1, 3, 8), (0, 64)):
        batches = windows.batches(rows=rows, least_positions=least)
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(windows)))
        assert max(map(len, batches)) <= rows
        for batch in batches:
            lengths = windows.lengths[batch]
            assert lengths.max() == lengths[0]
            if least == 0:
                assert lengths.min() >= lengths.max() * 7 / 8
    assert len(windows.batches(rows=8)) < len(windows.batches(rows=8, least_positions=0))
    assert len(windows.batches(rows=8)) == math.ceil(len(windows) / 8)
    assert cut_windows(np.array([0, 0]), max_length=4).batches(rows=2) == []


def test_all_ranks_make_the_same_number_of_forwards() -> None:
    batches = [np.array([number]) for number in range(7)]
    for world_size in (1, 2, 3, 8):
        shares = [list(dealt(batches, rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert {len(share) for share in shares} == {math.ceil(7 / world_size)}
        assert sorted(int(batch[0]) for share in shares for batch, counts in share if counts) == list(range(7))


@pytest.mark.parametrize(("max_length", "stride"), [(0, None), (4, 0), (4, 5), (4, -1)])
def test_impossible_windows_are_refused_with_the_range(max_length: int, stride: int | None) -> None:
    with pytest.raises(ValueError, match="expected"):
        cut_windows(np.array([3]), max_length=max_length, stride=stride)
