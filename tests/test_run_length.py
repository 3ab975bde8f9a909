"""The run's numbers: steps, micro-batches, stages, and the schedule that goes with them."""

from __future__ import annotations

import json
import math

import pytest

from hfpretrain.arguments import parse
from hfpretrain.errors import ConfigError
from hfpretrain.training.adaptive_ramp import AdaptiveRamp
from hfpretrain.training.batch_ramp import BatchRamp, Stage
from hfpretrain.training.run_length import RunLength, batch_plan, derive, schedule
from hfpretrain.training.schedule import lr_factor

MODEL = ("--model_type", "llama", "--tokenizer_name", "bytes", "--dataset", "stdlib", "--output_dir", "out")
ROWS = ("--sequence_length", "512")
BASE = [*MODEL, *ROWS, "--batch_tokens", "8Ki"]
RAMP = "--batch_ramp 0:4Ki,20Ki:8Ki,60Ki:32Ki"  # 5 steps of 8 rows, 5 of 16, then 64


def length(words: str, *, world_size: int = 1) -> RunLength:
    _, data_args, args = parse([*BASE, *words.split()])
    return derive(args, data_args, world_size=world_size)


def test_whole_steps_only() -> None:
    run = length("--total_tokens 100_000")
    assert (run.num_steps, run.total_tokens, run.unused_tokens, run.rows_per_step) == (12, 98_304, 1_696, 16)
    assert length("--total_tokens 100").num_steps == 1
    assert length("--total_tokens 100_000 --max_steps 12").num_steps == 12
    assert length("--max_steps 7").total_tokens == 7 * 8192


@pytest.mark.parametrize(
    ("world_size", "per_device", "micro_batches"),
    [(1, 8, 2), (1, 5, 4), (2, 8, 1), (2, 3, 3), (3, 2, 3), (16, 4, 1)],  # 16 rows; 3 processes: at most 6 rows each
)
def test_micro_batches(world_size: int, per_device: int, micro_batches: int) -> None:
    words = f"--max_steps 10 --per_device_train_batch_size {per_device}"
    assert length(words, world_size=world_size).micro_batches_per_step == micro_batches
    assert length(f"{words} --gradient_accumulation_steps {micro_batches}", world_size=world_size)
    with pytest.raises(ConfigError, match=f"= {micro_batches}\n"):
        length(f"{words} --gradient_accumulation_steps {micro_batches + 1}", world_size=world_size)


def test_a_noise_scale_that_can_never_be_measured() -> None:
    """A step of one micro-batch has nothing to compare."""
    words = "--max_steps 10 --log_noise_scale 1 --per_device_train_batch_size"
    with pytest.raises(ConfigError, match=r"remedy: per_device_train_batch_size of at most 8"):
        length(f"{words} 16")
    assert length(f"{words} 8")
    assert length(f"{words} 16", world_size=2)
    with pytest.raises(ConfigError, match="remedy: batch_tokens of at least two rows"):
        length(f"{words} 16 --batch_tokens 512")


def test_more_processes_than_rows() -> None:
    with pytest.raises(ConfigError, match="16 rows, 17 processes"):
        length("--max_steps 10", world_size=17)


@pytest.mark.parametrize(
    ("words", "lengths"),
    [
        ("--max_steps 1000", (20, 200)),
        ("--max_steps 1000 --warmup_steps 0", (0, 200)),
        ("--max_steps 1000 --warmup_steps 7 --decay_steps 300", (7, 300)),
        ("--max_steps 1000 --warmup_fraction 0.1 --decay_fraction 0.5", (100, 500)),
        ("--max_steps 1000 --lr_scheduler_type cosine", (20, 0)),
        ("--max_steps 1", (0, 1)),  # a default warm-up makes room
        ("--max_steps 10 --decay_fraction 1", (0, 10)),
    ],
)
def test_schedule_lengths(words: str, lengths: tuple[int, int]) -> None:
    run = length(words)
    assert (run.warmup_steps, run.decay_steps) == lengths


def test_schedule_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="num_steps=10, warmup_steps=6, decay_steps=6"):
        length("--max_steps 10 --warmup_steps 6 --decay_steps 6")


def planned(words: str, *, world_size: int = 1) -> RunLength:
    """A run that names no batch_tokens."""
    _, data_args, args = parse([*MODEL, *ROWS, *words.split()])
    return derive(args, data_args, world_size=world_size)


def test_ramp() -> None:
    run = planned(f"{RAMP} --total_tokens 200Ki", world_size=2)
    assert run.ramp.stages == (Stage(0, 0, 8), Stage(5, 40, 16), Stage(10, 120, 64))
    assert (run.num_steps, run.total_tokens, run.unused_tokens) == (14, (20 + 40 + 4 * 32) * 1024, 12 * 1024)
    assert (run.batch_tokens, run.rows_per_step, run.micro_batches_per_step) == (32 * 1024, 64, 4)
    # 5 % of 188 Ki tokens are 9.4 Ki: after 2 of the first steps 8. The last 17 % are 32 Ki, the last step.
    assert (run.warmup_steps, run.decay_steps) == (1, 1)
    longer = planned(f"{RAMP} --total_tokens 200Ki --warmup_fraction 0.05 --decay_fraction 0.3")
    assert (longer.warmup_steps, longer.decay_steps) == (2, 2)
    assert planned(f"{RAMP} --max_steps 14").total_tokens == run.total_tokens
    assert planned(f"{RAMP} --max_steps 14 --batch_tokens 32Ki").ramp == run.ramp
    printed = str(run).splitlines()
    assert "14 steps, 192,512 tokens (12,288 tokens of the request are no whole step)" in printed[0]
    table = [line.split() for line in printed[2:]]
    assert table == [
        ["0", "4,096", "8", "5", "0.3536", "x"],
        ["20,480", "8,192", "16", "5", "0.5000", "x"],
        ["61,440", "32,768", "64", "4", "1.0000", "x"],
    ]
    plan = json.loads(json.dumps(run.as_dict()))
    assert plan["ramp"]["stages"][1] == {"first_step": 5, "first_row": 40, "rows": 16}


def rates(words: str) -> list[float]:
    _, data_args, args = parse([*MODEL, *ROWS, *words.split()])
    run = derive(args, data_args, world_size=1)
    factor = schedule(args, run, batch_plan(args, run))
    return [factor(step) for step in range(run.num_steps)]


def test_learning_rate_of_a_ramp() -> None:
    words = f"{RAMP} --max_steps 14 --warmup_steps 6 --decay_steps 2 --min_lr_ratio 0.1 --decay_shape linear"
    warmup = [4 / 28, 8 / 28, 12 / 28, 16 / 28, 20 / 28, 1.0]  # tokens done over those of 6 steps, in Ki
    over_tokens = [*warmup, *[1.0] * 6, 0.55, 0.1]
    batch = [1 / 8] * 5 + [1 / 4] * 5 + [1.0] * 4
    root = [x * math.sqrt(y) for x, y in zip(over_tokens, batch, strict=True)]
    assert rates(words) == pytest.approx(root, rel=1e-12)
    assert rates(words)[-1] == 0.1
    linear = [x * y for x, y in zip(over_tokens, batch, strict=True)]
    assert rates(f"{words} --batch_ramp_lr linear") == pytest.approx(linear, rel=1e-12)
    assert rates(f"{words} --optim sgd") == pytest.approx(linear, rel=1e-12)
    assert rates(f"{words} --batch_ramp_lr none") == pytest.approx(over_tokens, rel=1e-12)


@pytest.mark.parametrize("kind", ["warmup_stable_decay", "cosine", "linear", "constant"])
def test_a_constant_ramp_is_no_ramp(kind: str) -> None:
    words = f"--max_steps 77 --lr_scheduler_type {kind} --warmup_fraction 0.145"
    plain, ramp = planned(f"{words} --batch_tokens 8Ki"), planned(f"{words} --batch_ramp 0:8Ki")
    assert plain == ramp
    assert str(plain) == str(ramp)
    steps = {"num_steps": 77, "warmup_steps": plain.warmup_steps, "decay_steps": plain.decay_steps}
    assert rates(f"{words} --batch_ramp 0:8Ki") == [lr_factor(step, schedule=kind, **steps) for step in range(77)]


def test_ramp_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="stage 1: 4_096 / 512 = 8 rows, 9 processes"):
        planned(f"{RAMP} --max_steps 14", world_size=9)
    with pytest.raises(ConfigError, match="stage 3 of the ramp never has a step: the run ends after 61_440 tokens"):
        planned(f"{RAMP} --total_tokens 91Ki")
    with pytest.raises(ConfigError, match="204_800 tokens are 14 steps of this ramp"):
        planned(f"{RAMP} --total_tokens 200Ki --max_steps 15")
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps disagrees[\s\S]*8 rows[\s\S]*16 rows"):
        planned(f"{RAMP} --max_steps 14 --gradient_accumulation_steps 8")
    with pytest.raises(ConfigError) as caught:
        planned("--batch_ramp 1:1000,1:900 --max_steps 5")
    assert len(caught.value.problems) == 5


def test_a_ramp_by_measurement() -> None:
    words = "--batch_ramp noise_scale:4Ki,steps:5 --batch_tokens 32Ki --total_tokens 201Ki --log_noise_scale 1"
    with pytest.raises(ConfigError, match="a step is one micro-batch here"):  # 8 rows at once: never defined, no growth
        planned(words)
    words += " --per_device_train_batch_size 4 --dataloader_num_workers 3"
    _, data_args, args = parse([*MODEL, *ROWS, *words.split()])
    run = derive(args, data_args, world_size=1)
    assert (run.num_steps, run.rows_per_step, run.ramp.stages) == (50, 64, (Stage(0, 0, 8),))
    assert "at most 50 steps" in str(run)
    plan = batch_plan(args, run)
    assert isinstance(plan, AdaptiveRamp)
    assert (plan.factor, plan.steps, plan.lead_steps, plan.total_rows) == (2.0, 5, 7, 402)
    factor = schedule(args, run, plan)
    assert factor(20) == math.sqrt(1 / 8)
    for step in range(1, 7):
        plan.observe(step, 1e9, 0.0)
    assert plan.ramp.stages[1:] == (Stage(13, 104, 16),)
    # What follows has the same tokens for its decay, so fewer steps: 13 + 298 // 16.
    assert (factor(20), plan.ramp.num_steps, factor(30)) == (math.sqrt(1 / 4), 31, 0.0)
    decay_rows = 8 * 10  # 20 % of 50 steps
    done, total = 104 + 16 * 15, 104 + 16 * 18
    expected = (1 - math.sqrt((done - (total - decay_rows)) / decay_rows)) * math.sqrt(1 / 4)
    assert factor(27) == pytest.approx(expected, rel=1e-12)
    assert factor(25) == math.sqrt(1 / 4)


def test_plan_of_a_given_ramp_is_fixed() -> None:
    _, data_args, args = parse([*MODEL, *ROWS, *RAMP.split(), "--max_steps", "14"])
    run = derive(args, data_args, world_size=1)
    assert isinstance(batch_plan(args, run), BatchRamp)
