"""The contradictions that are found before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig

from hfpretrain.arguments import ModelArguments, PretrainArguments, parse
from hfpretrain.data.tokenizer import byte_tokenizer
from hfpretrain.deepspeed_checks import check_deepspeed
from hfpretrain.errors import ConfigError
from hfpretrain.launch_checks import check_launch, verify_engine, verify_gradient_signals
from hfpretrain.model import load_config
from hfpretrain.preflight import begin, check_amount, check_model, model_notes, mup_spec
from hfpretrain.preflight.machine import CONSTRAINTS, WATCHED, Device, read_constraints, speed_notes, version_notes

ROOT = Path(__file__).parent.parent
BASE = [
    *("--model_type", "llama", "--tokenizer_name", "bytes", "--dataset", "stdlib"),
    *("--output_dir", "out", "--batch_tokens", "8Ki", "--sequence_length", "512"),
]


def test_gradients_that_say_nothing_about_a_step() -> None:
    def accelerator(**sizes: int) -> SimpleNamespace:
        return SimpleNamespace(parallelism_config=SimpleNamespace(**sizes) if sizes else None)

    def deepspeed(**config: Any) -> SimpleNamespace:
        return launched(deepspeed_plugin=SimpleNamespace(hf_ds_config=SimpleNamespace(config=config)))

    assert verify_gradient_signals(accelerator(), launched()) == []
    assert verify_gradient_signals(accelerator(tp_size=1, cp_size=1), deepspeed(sequence_parallel_size=1)) == []
    (problem,) = verify_gradient_signals(accelerator(tp_size=2), launched())
    assert "tp_size: 2" in problem.given
    (problem,) = verify_gradient_signals(accelerator(), deepspeed(sequence_parallel_size=4))
    assert "sequence_parallel_size: 4" in problem.given
    (problem,) = verify_gradient_signals(accelerator(), deepspeed(zero_optimization={"compute_grad_norm": False}))
    assert "compute_grad_norm" in problem.remedy


def launched(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "n_gpu": 0,
        "bf16": False,
        "fp16": False,
        "use_cpu": True,
        "max_grad_norm": 1.0,
        "per_device_train_batch_size": 8,
    }
    return SimpleNamespace(**(values | {"deepspeed_plugin": None} | changes))


def test_one_process_where_several_were_asked_for() -> None:
    by_accelerate = {"ACCELERATE_MIXED_PRECISION": "no"}
    assert check_launch(launched(), env={}) == []
    assert check_launch(launched(), env=by_accelerate) == []
    assert check_launch(launched(), env={"MASTER_ADDR": "node1"}) == []  # a cluster's shell, no launcher
    assert check_launch(launched(), env={**by_accelerate, "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}) == []
    (problem,) = check_launch(launched(), env={**by_accelerate, "MASTER_ADDR": "127.0.0.1"})
    assert "accelerate started one" in problem.what


def test_data_parallel_precision_and_accumulation_of_the_launcher() -> None:
    (problem,) = check_launch(launched(n_gpu=4), env={})
    assert "DataParallel" in problem.what
    assert check_launch(launched(bf16=True), env={"ACCELERATE_MIXED_PRECISION": "bf16"}) == []
    env = {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    assert len(check_launch(launched(bf16=True), env=env)) == 2


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_our_deepspeed_configs_decide_placement_only(path: Path) -> None:
    config = json.loads(path.read_text())
    assert check_deepspeed(config, launched()) == []
    assert config["gradient_clipping"] == "auto"
    assert config["zero_optimization"]["stage"] == int(path.stem[4])
    assert config["zero_optimization"].get("stage3_gather_16bit_weights_on_model_save", False) == (path.stem[4] == "3")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"optimizer": {"type": "AdamW"}}, "parameter groups"),
        ({"scheduler": {"type": "WarmupLR"}}, "replaces the schedule"),
        ({"gradient_clipping": 0.5}, "max_grad_norm: 1.0"),
        ({"gradient_accumulation_steps": 4}, "must not accumulate"),
        ({"train_micro_batch_size_per_gpu": 3}, "per_device_train_batch_size: 8"),
        ({"bf16": {"enabled": True}}, "two ways"),
    ],
)
def test_deepspeed_configs_that_decide_more(change: dict[str, Any], expected: str) -> None:
    config = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    (problem,) = check_deepspeed(config | change, launched())
    assert expected in str(problem)


def test_deepspeed_config_without_clipping() -> None:
    (problem,) = check_deepspeed({"zero_optimization": {"stage": 2}}, launched())
    assert "does not clip at all" in problem.what
    assert check_deepspeed(None, launched()) == []


def test_what_wraps_the_model() -> None:
    model = nn.Linear(2, 2)
    alone, pair = SimpleNamespace(num_processes=1), SimpleNamespace(num_processes=2)
    assert verify_engine(alone, model, launched(), env={}) == []
    (problem,) = verify_engine(pair, model, launched(), env={"WORLD_SIZE": "2"})
    assert "nothing averages their gradients" in problem.what
    assert len(verify_engine(alone, model, launched(), env={"WORLD_SIZE": "2"})) == 2
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config={"zero_optimization": {"stage": 2}}))
    (problem,) = verify_engine(alone, model, launched(deepspeed_plugin=plugin), env={})
    assert "DeepSpeed was asked for" in problem.what


def test_model_and_data() -> None:
    _, data_args, args = parse([*BASE, "--max_steps", "100"])
    config = AutoConfig.for_model("gpt2", vocab_size=300, n_positions=256, bos_token_id=0, eos_token_id=0)
    found = check_model(config, range(301), data_args, args)
    assert ["256 positions" in str(found[0]), "301 tokens, vocab_size=300" in str(found[1])] == [True, True]
    assert len(found) == 2
    assert check_model(AutoConfig.for_model("mamba", vocab_size=300), range(300), data_args, args) == []
    assert "load-balancing" in model_notes(AutoConfig.for_model("mixtral", vocab_size=320))[0]
    amount = {"data_args": data_args, "args": args}
    assert check_amount(num_blocks=200, num_validation_documents=3, **amount) == []
    assert len(check_amount(num_blocks=0, num_validation_documents=0, **amount)) == 2


def test_everything_wrong_with_held_out_sets_comes_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    entries = ["plain", "=x.txt", f"a b={tmp_path}/a.txt", f"good={tmp_path}/a.txt", f"good={tmp_path}/*.txt"]
    entries += [f"bpb={tmp_path}/a.txt", f"gone={tmp_path}/gone.jsonl", f"odd={tmp_path}/*.gz"]
    words = [*BASE, "--max_steps", "3", "--output_dir", str(tmp_path / "out"), "--cache_dir", str(tmp_path / "cache")]
    words += ["--config_overrides", "hidden_size=32,intermediate_size=64,num_hidden_layers=1,num_attention_heads=4"]
    with pytest.raises(ConfigError) as error:
        begin([*words, "--eval_data", *entries])
    message = str(error.value)
    assert message.startswith("7 problems")
    assert message.count("is written name=source") == 3
    assert message.count("cannot be found: no file matches") == 2
    assert "two held-out sets have the name good" in message
    assert "logged as eval_bpb, which is a metric already" in message
    start = begin([*words, "--eval_data", entries[3]])
    assert start.run.num_steps == 3
    assert start.data_args.eval_sources == {"good": f"{tmp_path}/a.txt"}


def test_the_mup_of_a_run() -> None:
    """A base model by its width, or by the keys in which it differs; refused for an optimizer without muP's rules."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    tokenizer = byte_tokenizer()

    def spec(optim: str = "adamw_torch", **changes: Any) -> Any:
        model_args = ModelArguments(model_type="llama", config_overrides=sizes | {"num_hidden_layers": 1}, **changes)
        config = load_config(model_type="llama", config_overrides=model_args.config_overrides, tokenizer=tokenizer)
        return mup_spec(config, model_args, PretrainArguments(output_dir="x", optim=optim), tokenizer=tokenizer)

    assert spec() is None
    by_width = spec(mup_base_width=16)
    by_config = spec(mup_base_config={name: size // 2 for name, size in sizes.items()})
    assert by_width.fingerprint == by_config.fingerprint
    assert by_width.of("model.layers.0.mlp.up_proj.weight").multipliers.lr == 0.5
    asked = spec(mup_base_width=16, mup_weight_decay="coupled", mup_overrides={r".*up_proj\.weight": "input"})
    assert asked.of("model.layers.0.mlp.up_proj.weight").multipliers.lr == 1.0
    assert asked.of("model.layers.0.mlp.down_proj.weight").multipliers.weight_decay == 1.0
    with pytest.raises(ConfigError, match="those of AdamW, and adafactor is none"):
        spec("adafactor", mup_base_width=16)


GPU = {"bf16": True, "fp16": False, "tf32": True, "dataloader_num_workers": 2, "dataloader_pin_memory": True}


@pytest.mark.parametrize(
    ("changes", "attention", "remedy"),
    [
        ({}, "auto", None),
        ({"bf16": False}, "auto", "bf16: true"),
        ({"bf16": False, "fp16": True}, "auto", "bf16: true"),
        ({"tf32": None}, "auto", "tf32: true"),
        ({"dataloader_num_workers": 0}, "auto", "dataloader_num_workers: 2"),
        ({"dataloader_pin_memory": False}, "auto", "dataloader_pin_memory: true"),
        ({}, "eager", "attn_implementation: auto"),
        ({"optim": "adamw_torch"}, "auto", "optim: adamw_torch_fused"),
    ],
)
def test_settings_that_leave_a_gpu_idle(changes: dict[str, Any], attention: str, remedy: str | None) -> None:
    args = SimpleNamespace(**(GPU | {"optim": "adamw_torch_fused"} | changes))
    ampere = Device("cuda", (8, 0), bfloat16=True)
    found = [remedy for _, remedy in speed_notes(args, ampere, attn_implementation=attention)]
    assert found == ([] if remedy is None else [remedy])
    assert speed_notes(args, Device("cpu"), attn_implementation=attention) == []
    if remedy in ("bf16: true", "tf32: true"):
        assert speed_notes(args, Device("cuda", (7, 0)), attn_implementation=attention) == []  # which has neither


def test_versions_outside_of_what_was_tested() -> None:
    required, tested = {"torch": ">=2.13", "rich": ">=14"}, {"torch": "2.13.0", "rich": "14.1", "idna": "3.20"}
    same = {"torch": "2.13.0+cpu", "rich": "15.0", "idna": "3.1"}  # neither's insides are used
    assert version_notes(same, tested=tested, required=required) == []
    other = {"torch": "2.14.1", "rich": "13.9"}
    assert version_notes(other, tested=tested, required=required) == [
        "torch 2.14.1 (tested: 2.13.0)",
        "rich 13.9 (needs >=14)",
    ]
    assert read_constraints(CONSTRAINTS).keys() >= set(WATCHED)
