"""The stop-watch counts steps only, and MFU is FLOPs over peak under both conventions."""

from __future__ import annotations

import pytest

from hfpretrain.training.throughput import Throughput


def test_rates_are_counts_over_step_time_without_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 100.0, 102.0])  # two steps of two seconds, 88 seconds of evaluation between them
    monkeypatch.setattr("hfpretrain.training.throughput.time.perf_counter", lambda: next(clock))
    throughput = Throughput(world_size=2, peak_flops=1e6)
    for _ in range(2):
        throughput.start_step()
        throughput.end_step(input_tokens=800, target_tokens=700, flops_full=2e6, flops_causal=1e6)
    metrics = throughput.drain()
    assert metrics["input_tokens_per_second"] == 1600 / 4
    assert metrics["target_tokens_per_second"] == 1400 / 4
    assert metrics["step_seconds"] == 2.0
    assert metrics["mfu_full"] == pytest.approx(4e6 / (1e6 * 2 * 4))
    assert metrics["mfu_causal"] == pytest.approx(2e6 / (1e6 * 2 * 4))
    assert throughput.drain() == {}


def test_unknown_device_gives_no_mfu() -> None:
    throughput = Throughput()
    throughput.start_step()
    throughput.end_step(input_tokens=1, target_tokens=1, flops_full=1.0, flops_causal=1.0)
    assert "mfu_full" not in throughput.drain()


def test_ending_a_step_that_never_began_is_refused() -> None:
    with pytest.raises(RuntimeError, match="without start_step"):
        Throughput().end_step(input_tokens=1, target_tokens=1)
