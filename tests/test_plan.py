"""recipes/plan.py in this process: the first source document's run, a counted model, and faults in one list."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import plan
from hfpretrain.arguments import DataArguments, ModelArguments, PretrainArguments
from hfpretrain.errors import ConfigError

COMMAND = (
    "--params 7B --total_tokens 1T --batch_tokens 8_388_608 --sequence_length 4096 --per_device_train_batch_size 4 "
    "--world_size 64 --warmup_steps 2000 --save_steps 1000 --save_total_limit none --storage_gbps 2 --device h200 "
    "--mfu 0.4 --price_per_device_hour 2.5 --mean_document_tokens 820 --inference_tokens 10T"
)
RUN = COMMAND.split()


def values_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    plan.main([*argv, "--json"])
    figures = json.loads(capsys.readouterr().out)
    assert all(set(figure) == {"name", "value", "unit", "formula", "source"} for figure in figures)
    return {figure["name"]: figure["value"] for figure in figures}


def problems_of(argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan.main(argv.split())
    return [str(problem) for problem in caught.value.problems]


def test_first_document_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    values = values_of(RUN, capsys)
    expected = {
        "parameters": 7_000_000_000,
        "batch_rows": 2048,
        "accumulation_steps": 8,
        "batch_tokens": 8_388_608,
        "optimizer_steps": 119_209,
        "unused_tokens": 2_428_928,
        "warmup_steps": 2000,
        "static_memory_bytes": 112e9,
        "weights_checkpoint_bytes": 14e9,
        "full_checkpoint_bytes": 84e9,
        "save_seconds": 42,
        "checkpoints": 119,
        "disk_without_rotation_bytes": 9.996e12,
        "disk_with_rotation_bytes": 120 * 84e9,  # no limit: all, the last step's too
        "forward_flops": 1.4e22,
        "backward_flops": 2.8e22,
        "training_flops": 4.2e22,
    }
    assert {name: values[name] for name in expected} == expected
    assert values["warmup_share"] == pytest.approx(0.017, abs=0.0005)
    assert values["padding_waste"] == pytest.approx(0.80, abs=0.0005)
    assert values["device_hours"] == pytest.approx(4.2e22 / (989.5e12 * 0.4) / 3600)
    assert values["clock_hours"] == pytest.approx(values["device_hours"] / 64)
    assert values["cost"] == pytest.approx(values["device_hours"] * 2.5)
    assert values["over_training"] == pytest.approx(1000 / 7 / 20)
    assert values["lifetime_flops"] == pytest.approx(6 * 7e9 * 1e12 + 2 * 7e9 * 1e13)


def test_half_the_micro_batch_and_half_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    smaller = values_of([*RUN, "--per_device_train_batch_size", "2"], capsys)
    assert (smaller["accumulation_steps"], smaller["optimizer_steps"]) == (16, 119_209)
    halved = values_of([*RUN, "--batch_tokens", "4Mi"], capsys)
    assert halved["optimizer_steps"] == 238_418
    assert halved["training_flops"] == smaller["training_flops"]  # the batch is not in it


def test_table_and_explanations(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(RUN)
    text = capsys.readouterr().out
    for name, shown in (
        ("optimizer steps", "119,209 steps"),
        ("warmup share", "1.678 %"),
        ("static memory", "112 GB"),
        ("full checkpoint", "84 GB"),
        ("save seconds", "42 seconds"),
        ("disk without rotation", "9.996 TB"),
        ("padding waste", "79.98 %"),
    ):
        assert re.search(rf"^{name} +{re.escape(shown)}$", text, flags=re.MULTILINE), name
    assert max(map(len, text.splitlines())) <= 80
    plan.main([*RUN, "--explain"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(text.splitlines())
    assert all(re.search(r"  \S.*  \[.+\]$", line) for line in lines)


def test_a_real_model_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    overrides = ",".join(f"{name}={value}" for name, value in sizes.items())
    command = (
        f"--model_type llama --config_overrides {overrides},vocab_size=100 --total_tokens 10M --sequence_length 128"
    )
    values = values_of([*command.split(), "--batch_tokens", "1280"], capsys)
    real = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=100, num_key_value_heads=4))
    assert values["parameters"] == real.num_parameters()
    matrices = 2 * (4 * 64**2 + 3 * 64 * 128) + 100 * 64
    assert values["counted_flops"] == pytest.approx(1e7 * (6 * matrices + 12 * 2 * 64 * 64))  # layers * width * L / 2
    assert values["warmup_steps"] == 156  # 2 % of 7,812


def test_a_large_model_is_counted_without_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """The default LlamaConfig is LLaMA 7B; on LLaMA-2's 2T tokens."""
    values = values_of(["--model_type", "llama", "--total_tokens", "2T"], capsys)
    assert values["parameters"] == 6_738_415_616
    assert values["over_training"] == pytest.approx(14.84, abs=0.005)


def test_defaults_are_those_of_pretrain() -> None:
    theirs = {f.name: f.default for cls in (ModelArguments, DataArguments, PretrainArguments) for f in fields(cls)}
    shared = (plan.FLAGS.keys() & theirs.keys()) - {"config_overrides", "warmup_steps"}  # not given: {}, and 2 %
    assert {name: plan.FLAGS[name][1] for name in shared} == {name: theirs[name] for name in shared}
    assert len(shared) == 8


def test_zero_stage_and_rotation(capsys: pytest.CaptureFixture[str]) -> None:
    values = values_of([*RUN, "--zero_stage", "2", "--save_total_limit", "3"], capsys)
    assert values["zero_checkpoint_bytes"] == 112e9
    assert values["save_seconds"] == 56
    assert values["disk_with_rotation_bytes"] == 4 * 112e9


def test_faults_are_listed_together() -> None:
    problems = problems_of("--params 7B --total_tokens 1B --batch_tokens 1000 --sequence_length 300 --world_size 4")
    assert len(problems) == 2
    assert "whole number of rows" in problems[0]
    assert "900, 1_200" in problems[0]
    assert "fewer rows than there are devices" in problems[1]


def test_everything_wrong_at_once() -> None:
    text = "\n".join(
        problems_of(
            "--params seven --total_tokens 1.5 --mfu 2 --device abacus --save_steps 0 --bogus 3 --world_size "
            "--critical_batch_points 5:0 --batch_tokens none --zero_stage 4"
        )
    )
    named = "params total_tokens mfu abacus save_steps --bogus world_size critical_batch_points batch_tokens zero_stage"
    assert [name for name in named.split() if name not in text] == []
    assert text.count("remedy:") == 10


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--total_tokens 1B", "which model"),
        ("--params 1B --model_type llama --total_tokens 1B", "params, model_type"),
        ("--config_name /no/such/folder --total_tokens 1B", "/no/such/folder"),
        ("--params 1B --total_tokens 1B --device", "unknown device"),
        ("--params 1B --total_tokens 1B --world_size 1.5", "expected a whole number"),
        ("--params 1B --config_overrides hidden_size=8 --total_tokens 1B", "params alone"),
        ("--params 1B", "total_tokens has no value"),
        ("--model_type lama --total_tokens 1B", "did you mean llama"),
        ("--params 1B --total_tokens 1B --warmup_steps 1M", "warmup_steps cannot be read"),
        ("--params 1B --total_tokens 1B --warmup_steps 4000", "longer than the run of 3_814 steps"),
    ],
)
def test_one_fault(argv: str, message: str) -> None:
    problems = problems_of(argv)
    assert len(problems) == 1
    assert message in problems[0]


def test_measured_points_are_continued(capsys: pytest.CaptureFixture[str]) -> None:
    values = values_of([*RUN, "--critical_batch_points", "70M:100k"], capsys)
    assert values["critical_batch_points"] == pytest.approx(1e6)  # 100 times the size, 10 times the batch
    assert values["tokens_ratio_points"] == pytest.approx(1 + 8.388608)
