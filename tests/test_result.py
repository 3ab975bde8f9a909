"""What a comparison says in words: short names that differ, and pairs that loss per token would turn around."""

from __future__ import annotations

import math

from hfpretrain.bpb.result import _disagreements, labels


def test_labels_are_the_shortest_ends_that_differ() -> None:
    assert labels(["/a/b/one", "two"]) == ["one", "two"]
    assert labels(["runs/a/checkpoint-9", "runs/b/checkpoint-9"]) == ["a/checkpoint-9", "b/checkpoint-9"]
    assert labels(["x/a", "a"]) == ["x/a", "a"]
    assert labels(["only/one"]) == ["one"]


def test_the_order_by_loss_per_token_is_contradicted_only_where_it_is_wrong() -> None:
    def record(nats_per_token: float, bytes_per_token: float) -> dict[str, float]:
        bpb = nats_per_token / bytes_per_token / math.log(2)
        return {"bpb": bpb, "nats_per_token": nats_per_token, "tokens_per_byte": 1 / bytes_per_token}

    long, short = record(3.0, 4.0), record(1.0, 1.0)  # 1.08 and 1.44 bits per byte
    (line,) = _disagreements({"short": short, "long": long})
    assert line.startswith("long predicts the text better (1.0820 against 1.4427 bits per byte)")
    assert _disagreements({"same": short, "better": record(0.9, 1.0)}) == []
