"""Bits per byte and their intervals against closed forms, exact identities and simulations with a known truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hfpretrain.bpb import compare


def _documents(number: int, *, seed: int = 0, bits: float = 1.1) -> tuple[np.ndarray, np.ndarray]:
    """Documents of very different lengths; nats per byte scatter around `bits` bits, whatever the length."""
    generator = np.random.default_rng(seed)
    text_bytes = generator.gamma(1.5, 800.0, size=number).astype(np.int64) + 1
    return text_bytes * math.log(2) * bits * generator.gamma(25.0, 1 / 25.0, size=number), text_bytes


def test_one_bit_for_every_byte() -> None:
    text_bytes = np.array([3, 1, 0, 60])
    assert compare.bits_per_byte(math.log(2) * text_bytes, text_bytes) == pytest.approx(1, rel=1e-15)
    assert math.isnan(compare.bits_per_byte(np.zeros(2), np.zeros(2)))


def test_long_documents_weigh_more_and_a_mean_of_documents_is_another_number() -> None:
    nats, text_bytes = math.log(2) * np.array([8.0, 90.0, 0.0]), np.array([2, 90, 0])
    assert compare.bits_per_byte(nats, text_bytes) == pytest.approx(98 / 92)
    assert compare.mean_of_documents(nats, text_bytes) == pytest.approx((4 + 1) / 2)


def test_domains_add_up_to_the_whole() -> None:
    nats, text_bytes = _documents(50)
    tokens = text_bytes // 3
    whole, domains = compare.totals(nats, tokens, text_bytes, [f"d{n % 3}" for n in range(50)])
    assert list(domains) == ["d0", "d1", "d2"]
    for name in ("documents", "tokens", "text_bytes"):
        assert sum(getattr(one, name) for one in domains.values()) == getattr(whole, name)
    assert whole.nats == pytest.approx(sum(one.nats for one in domains.values()), rel=1e-14)
    weighted = sum(one.bpb * one.text_bytes for one in domains.values()) / whole.text_bytes
    assert whole.bpb == pytest.approx(weighted, rel=1e-12)
    assert whole.bpb == pytest.approx(whole.nats_per_token * whole.tokens_per_byte / math.log(2), rel=1e-12)
    assert domains["d1"].bpb == pytest.approx(compare.bits_per_byte(nats[1::3], text_bytes[1::3]), rel=1e-14)


def test_bootstrap_agrees_with_the_linearised_variance_of_a_ratio() -> None:
    """Cochran 1977, eq. 6.10: se(R) = sqrt(sum (x - R y)^2 / (n (n - 1))) / mean(y)."""
    nats, text_bytes = _documents(400)
    x = nats / math.log(2)
    ratio = x.sum() / text_bytes.sum()
    expected = math.sqrt(((x - ratio * text_bytes) ** 2).sum() / (400 * 399)) / text_bytes.mean()
    found = compare.interval(nats, text_bytes)
    assert found.value == pytest.approx(ratio, rel=1e-13)
    assert found.standard_error == pytest.approx(expected, rel=0.03)
    assert found.low == pytest.approx(ratio - 1.96 * expected, abs=0.1 * expected)
    assert found.high == pytest.approx(ratio + 1.96 * expected, abs=0.1 * expected)


def test_interval_holds_the_truth_about_95_times_in_100() -> None:
    held = 0
    for seed in range(400):
        found = compare.interval(*_documents(80, seed=seed), draws=1000, seed=seed)
        held += found.low <= 1.1 <= found.high
    assert 0.92 <= held / 400 <= 0.98  # two standard errors of a proportion of 0.95 are 0.022


def test_identical_models_differ_by_exactly_nothing() -> None:
    nats, text_bytes = _documents(30)
    pair = compare.paired(nats, nats.copy(), text_bytes)
    difference = pair.difference
    assert (difference.value, difference.low, difference.high, difference.standard_error) == (0, 0, 0, 0)
    assert (pair.better_documents, pair.equal_documents, pair.documents) == (0, 30, 30)
    assert not pair.decided


def test_pairs_draw_the_same_documents_for_both() -> None:
    nats, text_bytes = _documents(60)
    better = nats * 0.99
    better[:6] = nats[:6] * 1.01
    pair = compare.paired(nats, better, text_bytes)
    apart = compare._resampled(better, text_bytes, draws=500, seed=0) - compare._resampled(
        nats, text_bytes, draws=500, seed=0
    )
    together = compare._resampled(better - nats, text_bytes, draws=500, seed=0)
    np.testing.assert_allclose(together, apart, atol=1e-13)
    single = compare.interval(nats, text_bytes).standard_error
    assert pair.difference.standard_error < 0.2 * math.sqrt(2) * single
    assert pair.difference.value == pytest.approx(
        compare.bits_per_byte(better, text_bytes) - compare.bits_per_byte(nats, text_bytes), rel=1e-9
    )
    assert pair.better_documents == 54
    assert pair.decided
    turned = compare.paired(better, nats, text_bytes)
    assert turned.difference.low == pytest.approx(-pair.difference.high, rel=1e-9)
    assert turned.better_documents == 6


def test_documents_without_text_change_nothing() -> None:
    nats, text_bytes = _documents(25)
    with_empty = np.append(nats, [0.0, 0.0]), np.append(text_bytes, [0, 0])
    assert compare.interval(*with_empty) == compare.interval(nats, text_bytes)
    assert compare.mean_of_documents(*with_empty) == compare.mean_of_documents(nats, text_bytes)
    assert compare.paired(with_empty[0], with_empty[0] + 1, with_empty[1]).documents == 25


def test_one_document_has_no_interval() -> None:
    found = compare.interval(np.array([5.0, 0.0]), np.array([4, 0]))
    assert found.value == pytest.approx(5 / 4 / math.log(2))
    assert math.isnan(found.low)
    assert not compare.paired(np.array([5.0]), np.array([4.0]), np.array([4])).decided


def test_what_warns() -> None:
    assert compare.uniform_bound(tokens=30, text_bytes=60, vocabulary=256) == 4
    assert compare.sanity(1.0, 4.0) == []
    assert "trained on" in compare.sanity(0.29, 4.0)[0]
    assert "uniform guess" in compare.sanity(4.1, 4.0)[0]
    assert compare.warnings_about(np.full(20, 100)) == []
    few, large = compare.warnings_about(np.array([100, 0, 40]))
    assert "2 documents" in few
    assert "71%" in large
