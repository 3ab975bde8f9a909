"""The run's numbers, and the contradictions that are found before the first step."""

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
from hfpretrain.errors import ConfigError
from hfpretrain.launch_checks import check_deepspeed, check_launch, verify_engine
from hfpretrain.model import load_config
from hfpretrain.preflight import RunLength, check_data, check_model, check_start, derive, model_notes, mup_spec

ROOT = Path(__file__).parent.parent
BASE = [
    *("--model_type", "llama", "--tokenizer_name", "bytes", "--dataset", "stdlib"),
    *("--output_dir", "out", "--batch_tokens", "8Ki", "--sequence_length", "512"),
]


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


def test_check_start(monkeypatch: pytest.MonkeyPatch) -> None:
    _, data_args, args = parse([*BASE, "--max_steps", "10"])
    assert check_start(data_args, args).num_steps == 10
    args.warmup_steps = args.decay_steps = 6
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigError) as caught:
        check_start(data_args, args)
    assert len(caught.value.problems) == 2
    assert all(word in str(caught.value) for word in ("overlap", "precisions"))


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
    config = AutoConfig.for_model("gpt2", vocab_size=300, n_positions=256)
    found = check_model(config, range(301), data_args, args)
    assert ["256 positions" in str(found[0]), "301 tokens, vocab_size=300" in str(found[1])] == [True, True]
    assert check_model(AutoConfig.for_model("mamba", vocab_size=300), range(300), data_args, args) == []
    assert "load-balancing" in model_notes(AutoConfig.for_model("mixtral", vocab_size=320))[0]
    run = derive(args, data_args, world_size=1)  # 1600 rows
    problems, notes = check_data(num_blocks=200, num_validation_documents=3, run=run, data_args=data_args, args=args)
    assert problems == []
    assert notes[0].startswith("8.00 epochs of 102,400 tokens; repeats teach less")
    problems, _ = check_data(num_blocks=0, num_validation_documents=0, run=run, data_args=data_args, args=args)
    assert len(problems) == 2


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
