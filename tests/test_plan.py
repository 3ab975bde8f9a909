"""recipes/plan.py in this process: the source documents' runs, plans of whole configurations, faults in one list."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import plan
from hfpretrain.arguments import parse
from hfpretrain.errors import ConfigError
from hfpretrain.training.run_length import derive

CONFIGS = Path(plan.__file__).parent / "configs"
COMMAND = (
    "--params 7B --total_tokens 1T --batch_tokens 8_388_608 --sequence_length 4096 --per_device_train_batch_size 4 "
    "--world_size 64 --warmup_steps 2000 --save_steps 1000 --save_total_limit none --storage_gbps 2 --device h200 "
    "--mfu 0.4 --price_per_device_hour 2.5 --mean_document_tokens 820 --inference_tokens 10T"
)
RUN = COMMAND.split()
TOKENS = 119_209 * 8_388_608  # whole steps of 1T
SIZES = "hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=4"
ROWS = ["--sequence_length", "128", "--batch_tokens", "1280"]
SMALL = ["--model_type", "llama", "--total_tokens", "10M", *ROWS, "--config_overrides", f"{SIZES},vocab_size=100"]


def printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    plan.main([*argv, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    keys = {"section", "name", "value", "unit", "formula", "source"}
    assert all(set(figure) == keys for figure in document["figures"])
    return document


def values_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    figures = printed(argv, capsys)["figures"]
    values = {figure["name"]: figure["value"] for figure in figures}
    assert len(values) == len(figures)
    return values


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
        "total_tokens": TOKENS,
        "unused_tokens": 2_428_928,
        "warmup_steps": 2000,
        "static_memory_bytes": 112e9,
        "weights_checkpoint_bytes": 14e9,
        "full_checkpoint_bytes": 84e9,
        "save_seconds": 42,
        "checkpoints": 119,
        "disk_without_rotation_bytes": 9.996e12,
        "disk_with_rotation_bytes": 120 * 84e9,  # no limit: all, the last step's too
        "forward_flops": 2 * 7e9 * TOKENS,
        "backward_flops": 4 * 7e9 * TOKENS,
        "training_flops": 6 * 7e9 * TOKENS,
    }
    assert {name: values[name] for name in expected} == expected
    assert values["training_flops"] == pytest.approx(4.2e22, rel=1e-5)
    assert values["warmup_share"] == pytest.approx(0.017, abs=0.0005)
    assert values["padding_waste"] == pytest.approx(0.80, abs=0.0005)
    assert values["device_hours"] == pytest.approx(6 * 7e9 * TOKENS / (989.5e12 * 0.4) / 3600)
    assert values["clock_hours"] == pytest.approx(values["device_hours"] / 64)
    assert values["cost"] == pytest.approx(values["device_hours"] * 2.5)
    assert values["over_training"] == pytest.approx(TOKENS / 7e9 / 20)
    assert values["lifetime_flops"] == pytest.approx(6 * 7e9 * TOKENS + 2 * 7e9 * 1e13)


def test_half_the_micro_batch_and_half_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    smaller = values_of([*RUN, "--per_device_train_batch_size", "2"], capsys)
    assert (smaller["accumulation_steps"], smaller["optimizer_steps"]) == (16, 119_209)
    halved = values_of([*RUN, "--batch_tokens", "4Mi"], capsys)
    assert halved["optimizer_steps"] == 238_418
    assert halved["training_flops"] == smaller["training_flops"]  # the batch is not in it


def test_table_and_explanations(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(RUN)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("plan      119,209 steps of 8,388,608 tokens")
    text = "\n".join(line for line in lines if not line.startswith("note "))
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
    titles = [line for line in text.splitlines() if re.fullmatch(r"[A-Z][a-z ]+", line)]
    assert titles[:3] == ["Run", "Parameters", "Compute"]
    plan.main([*RUN, "--explain"])
    explained = [line for line in capsys.readouterr().out.splitlines()[1:] if not line.startswith("note ")]
    assert len(explained) == len(text.split("\n"))
    assert all(re.search(r"  \S.*  \[.+\]$", line) for line in explained if line and line not in titles)


# --- a run's own configuration ----------------------------------------------------------------------------------------

DEMO = ["--config", str(CONFIGS / "demo.yaml")]
RAMP = ["--batch_ramp", "0:1024,100_000:2048,300_000:4096", "--batch_tokens", "4096"]


@pytest.mark.parametrize(
    "argv",
    [
        DEMO,
        [*DEMO, *RAMP],
        [*DEMO, "--total_tokens", "none", "--max_steps", "77", "--warmup_fraction", "none", "--warmup_steps", "5"],
        [*DEMO, "--batch_ramp", "noise_scale:1024", "--batch_tokens", "8192", "--log_noise_scale", "10"],
    ],
    ids=["as it is", "ramp", "steps", "growing"],
)
def test_plan_of_a_configuration_is_the_run_that_pretrain_makes(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same files and flags through both ways in; the first line is what pretrain.py prints."""
    _, data_args, args = parse(argv)
    run = derive(args, data_args, world_size=2)
    document = printed([*argv, "--world_size", "2"], capsys)
    values = {figure["name"]: figure["value"] for figure in document["figures"]}
    assert document["plan"] == str(run)
    assert values["optimizer_steps"] == run.num_steps
    assert values["accumulation_steps"] == run.micro_batches_per_step
    assert (values["warmup_steps"], values["decay_steps"]) == (run.warmup_steps, run.decay_steps)
    assert values["checkpoints"] == run.num_steps // 200  # save_steps of the file
    assert values["learning_rate"] == 1.5e-3
    steps = [values[f"stage_{number}_steps"] for number in range(1, 4) if f"stage_{number}_steps" in values]
    assert len(steps) == (len(run.ramp.stages) if len(run.ramp.stages) > 1 else 0)
    assert not steps or sum(steps) == run.num_steps


def test_the_demo_is_counted_with_its_tokenizers_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    """train:2048 has 2,048 entries before there is a text to train it on; README states 2,164,416 parameters."""
    values = values_of(DEMO, capsys)
    assert values["parameters"] == 2048 * 192 + 4 * (4 * 192**2 + 3 * 192 * 512 + 2 * 192) + 192
    assert values["disk_with_rotation_bytes"] == 3 * 12 * values["parameters"]  # steps 200, 400 and the last
    without_limit = values_of([*DEMO, "--tokenizer_name", "bytes", "--save_steps", "0.5"], capsys)
    assert without_limit["head_parameters"] == 258 * 192
    assert without_limit["checkpoints"] == 1  # ceil(585 / 2) = 293


def test_stages_of_a_ramp(capsys: pytest.CaptureFixture[str]) -> None:
    """1,024 a step to 100,000: 98 steps; 2,048 to 300,000: 98 more; of 600,000 are left 72 whole steps of 4,096."""
    values = values_of([*DEMO, *RAMP], capsys)
    assert [values[f"stage_{n}_steps"] for n in (1, 2, 3)] == [98, 98, 72]
    assert [values[f"stage_{n}_first_token"] for n in (1, 2, 3)] == [0, 98 * 1024, 98 * 3072]
    assert [values[f"stage_{n}_learning_rate"] for n in (1, 2, 3)] == [0.5, pytest.approx(0.5**0.5), 1.0]
    assert values["batch_tokens"] == 4096


# --- a counted model --------------------------------------------------------------------------------------------------


def test_a_real_model_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    values = values_of([*SMALL, "--gradient_checkpointing", "true"], capsys)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    real = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=100, num_key_value_heads=4))
    assert values["parameters"] == real.num_parameters()
    layers, head = 2 * (4 * 64**2 + 3 * 64 * 128), 100 * 64
    tokens = 7812 * 1280
    assert values["active_parameters"] == layers + head
    assert values["matrix_flops"] == 6 * (layers + head) * tokens
    scores = 12 * 2 * 64 * 64  # 12 * layers * width * L / 2
    assert values["counted_flops"] == pytest.approx((6 * (layers + head) + scores) * tokens)
    assert values["recomputed_flops"] == pytest.approx((2 * layers + scores / 3) * tokens)
    assert values["training_flops"] == 6 * real.num_parameters() * tokens
    assert values["warmup_steps"] == 156  # 2 % of 7,812


def test_attention_inside_documents_and_windows(capsys: pytest.CaptureFixture[str]) -> None:
    """4 * width * attended: L / 2 = 64; m / 2 - m^2 / (6 L) for documents of 32; w - w^2 / (2 L) in a window."""

    def scores(*more: str, name: str = "forward_attention_scores") -> float:
        return float(values_of([*SMALL, *more], capsys)[name]) / (4 * 2 * 64)

    assert scores() == 64
    assert scores("--mean_document_tokens", "32") == pytest.approx(16 - 32**2 / 6 / 128)
    assert scores("--mean_document_tokens", "32", "--isolate_documents", "false") == 64
    mistral = ["--model_type", "mistral", "--config_overrides", "sliding_window=16"]
    assert scores(*mistral, name="forward_attention_scores_window_16") == pytest.approx(16 - 16**2 / 2 / 128)


def test_experts_and_what_cannot_be_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Mixtral by roles; dbrx, whose experts loop over values, by the rule of pretrain.py's MFU, and it says so."""
    small = ["--total_tokens", "1M", *ROWS, "--tokenizer_name", "bytes"]
    mixtral = values_of([*small, "--model_type", "mixtral", "--config_overrides", SIZES], capsys)
    experts = 2 * 8 * 3 * 64 * 128
    assert mixtral["experts_parameters"] == experts
    assert mixtral["multiplied_parameters"] - mixtral["active_parameters"] == experts * 3 / 4  # 2 of 8 experts
    assert mixtral["training_flops"] == 6 * (mixtral["parameters"] - experts * 3 // 4) * (781 * 1280)
    file = tmp_path / "dbrx.yaml"
    attention = "attn_config: {kv_n_heads: 2, clip_qkv: 8.0, rope_theta: 10000.0}"
    file.write_text(f"model_type: dbrx\nconfig_overrides: {{d_model: 64, n_heads: 4, n_layers: 1, {attention}}}\n")
    dbrx = printed([*small, "--config", str(file)], capsys)
    assert "experts_parameters" not in {figure["name"] for figure in dbrx["figures"]}
    assert [note for note in dbrx["notes"] if "not counted" in note and "nonzero" in note]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_of_a_bare_number_is_the_first_documents_sixteen_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Plain DDP: fp32 weights, gradients and two moments. What depends on the batch is left out, and said so."""
    document = printed([*RUN, "--device_memory_gb", "100"], capsys)
    values = {figure["name"]: figure["value"] for figure in document["figures"]}
    assert values["memory_weights"] == 4 * 7e9
    assert values["memory_optimizer_state"] == values["optimizer_state_adamw"] == 8 * 7e9 + 4  # a step counter
    assert values["memory_peak"] >= 112e9
    assert values["device_memory"] == 100e9
    assert values["memory_margin"] == 100e9 - values["memory_peak"]
    notes = "\n".join(document["notes"])
    assert "memory too large" in notes
    assert "activations, logits and buffers" in notes


def test_memory_of_a_counted_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The largest micro-batch nearly fills a device of 40 MB and a tenth more does not fit; a step of 10 rows caps it.

    ZeRO 1 on 4 ranks keeps a quarter of the moments.
    """
    device = ["--device_memory_gb", "0.04", "--batch_tokens", "128_000", "--per_device_train_batch_size"]
    values = values_of([*SMALL, *device, "1"], capsys)
    assert values["memory_weights"] == 4 * values["parameters"]
    assert values["memory_optimizer_state"] == 8 * values["parameters"] + 4 * (2 * 9 + 3)  # and a counter a tensor
    rows = values["largest_micro_batch"]
    assert rows > 10
    filled = values_of([*SMALL, *device, str(rows)], capsys)
    assert abs(filled["memory_margin"]) < 0.1 * 40e6
    assert values_of([*SMALL, *device, str(rows + -(-rows // 10))], capsys)["memory_margin"] < 0
    assert values_of(SMALL, capsys)["largest_micro_batch"] == 10
    sharded = values_of([*SMALL, "--zero_stage", "1", "--world_size", "4", "--bf16", "true"], capsys)
    assert sharded["memory_weights"] == 2 * values["parameters"]
    assert sharded["memory_optimizer_state"] == pytest.approx(8 * values["parameters"] / 4, rel=1e-3)


# --- checkpoints and laws ---------------------------------------------------------------------------------------------


def test_zero_stage_and_rotation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = values_of([*RUN, "--zero_stage", "2", "--save_total_limit", "3"], capsys)
    assert values["zero_checkpoint_bytes"] == 112e9
    assert values["save_seconds"] == 56
    assert values["disk_with_rotation_bytes"] == 4 * 112e9
    file = tmp_path / "zero3.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    assert values_of([*RUN, "--deepspeed", str(file)], capsys)["zero_checkpoint_bytes"] == 98e9


def test_measured_points_are_continued(capsys: pytest.CaptureFixture[str]) -> None:
    values = values_of([*RUN, "--noise_scale_points", "70M:100k"], capsys)
    assert values["critical_batch_points"] == pytest.approx(1e6)  # 100 times the size, 10 times the batch
    assert values["tokens_ratio_points"] == pytest.approx(1 + 8.388608)


def test_notes(capsys: pytest.CaptureFixture[str]) -> None:
    notes = "\n".join(printed([*RUN, "--gradient_checkpointing", "true", "--warmup_steps", "9000"], capsys)["notes"])
    for part in ("the warm-up is 7.5% of the run", "muP", "expected_loss extrapolates: 1e+12 tokens"):
        assert part in notes
    assert "3/4" not in notes  # mfu is given


# --- faults -----------------------------------------------------------------------------------------------------------


def test_everything_wrong_at_once() -> None:
    text = "\n".join(
        problems_of(
            "--params seven --total_tokens 1.5 --mfu 2 --device abacus --save_steps 0 --bogus 3 --world_size "
            "--noise_scale_points 5:0 --batch_tokens none --zero_stage 4 --deepspeed /no/such.json"
        )
    )
    named = (
        "params total_tokens mfu abacus save_steps bogus world_size noise_scale_points batch_tokens zero_stage "
        "/no/such.json"
    )
    assert [name for name in named.split() if name not in text] == []
    assert text.count("remedy:") == 12  # zero_stage twice: out of range, and beside a DeepSpeed file


def test_faults_of_a_file_and_a_model_come_with_those_of_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_type: llama\nconfig_overrides: {hiden_size: 64}\nlearning_rat: 1\ntotal_tokens: 1M\n")
    problems = problems_of(f"--config {file} --batch_tokens 1Ki --sequence_length 512 --world_size 4 --mfu 0")
    text = "\n".join(problems)
    assert len(problems) == 4
    for part in ("did you mean hidden_size", "learning_rat", "fewer rows than there are processes", "mfu is out of"):
        assert part in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--total_tokens 1B", "which model"),
        ("--params 1B --model_type llama --total_tokens 1B", "params (command line), model_type"),
        ("--config_name /no/such/folder --total_tokens 1B", "/no/such/folder"),
        ("--params 1B --total_tokens 1B --device abacus", "peak of this device"),
        ("--params 1B --total_tokens 1B --device", "device has no value"),
        ("--params 1B --total_tokens 1B --world_size 1.5", "expected a whole number"),
        ("--params 1B --config_overrides hidden_size=8 --total_tokens 1B", "params alone"),
        ("--params 1B", "the run has no length"),
        ("--model_type lama --total_tokens 1B", "did you mean llama"),
        ("--params 1B --total_tokens 1B --batch_tokens 1000 --sequence_length 300", "900, 1_200"),
        ("--params 1B --total_tokens 1B --warmup_steps 4000 --lr_scheduler_type constant", "longer than the run"),
        ("--params 1B --total_tokens 1M --batch_ramp 0:1024,9M:2048", "stage 2 of the ramp never has a step"),
        ("--params 1B --total_tokens 1B --zero_stage 1 --deepspeed {}", "so does a flag of the plan"),
        ("--model_type gpt2 --total_tokens 1B --sequence_length 2048", "longer than the 1_024 positions"),
        ("--params 1B --total_tokens 1B --offload_params true", "weights can only be offloaded"),
    ],
)
def test_one_fault(argv: str, message: str) -> None:
    problems = problems_of(argv)
    assert len(problems) == 1
    assert message in problems[0]
