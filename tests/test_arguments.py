"""Files and flags -> dataclasses: precedence, every mistake at once, and each with its source."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hfpretrain.arguments import DataArguments, ModelArguments, PretrainArguments, parse
from hfpretrain.arguments.types import key_values, token_count
from hfpretrain.errors import ConfigError
from hfpretrain.run_record import write_run_json

CONFIGS = Path(__file__).parent.parent / "recipes" / "configs"
GOOD = [
    *("--model_type", "llama", "--tokenizer_name", "bytes", "--dataset", "stdlib"),
    *("--output_dir", "out", "--total_tokens", "1M", "--batch_tokens", "8Ki"),
]


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems_of(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("250_000", 250_000),
        ("2.5e5", 250_000),
        ("0.25M", 250_000),
        ("0.3B", 300_000_000),  # 0.3 * 1e9 is not whole in floating point
        ("1B", 10**9),
        ("1.5T", 1_500_000_000_000),
        ("256Ki", 2**18),
        ("4mi", 2**22),
        (" 10k ", 10_000),
    ],
)
def test_token_counts(text: str, count: int) -> None:
    assert token_count(text) == count


@pytest.mark.parametrize("text", ["", "many", "1.5", "1.0001k", "3x", "1e-3"])
def test_token_counts_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a"):
        token_count(text)


def test_key_values_on_the_command_line() -> None:
    expected = {
        "hidden_size": 64,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1e4},
    }
    words = 'hidden_size=64,hidden_act=silu,tie_word_embeddings=True,rope_parameters={"rope_theta": 1e4}'
    assert key_values(words) == expected
    assert key_values(json.dumps(expected)) == expected


def test_files_from_left_to_right_then_the_command_line(tmp_path: Path) -> None:
    one = write(
        tmp_path,
        "one.yaml",
        "learning_rate: 1e-3\nweight_decay: 0.2\nseed: 1\nconfig_overrides: {hidden_size: 64, r: {a: 1, b: 2}}\n",
    )
    two = write(
        tmp_path, "two.yaml", "weight_decay: 0.3\nseed: 2\nconfig_overrides: {num_hidden_layers: 2, r: {b: 3}}\n"
    )
    overrides = ["--config_overrides", "hidden_size=96,x=1", "--config-overrides", "x=2"]
    model, _, args = parse([*GOOD, "--config", one, two, "--seed", "3", *overrides])
    assert (args.learning_rate, args.weight_decay, args.seed) == (1e-3, 0.3, 3)
    assert model.config_overrides == {"hidden_size": 96, "num_hidden_layers": 2, "r": {"a": 1, "b": 3}, "x": 2}
    assert args.sources["learning_rate"] == one
    assert args.sources["weight_decay"] == two
    assert args.sources["seed"] == "command line"
    assert args.sources["adam_beta2"] == "default"


def test_the_same_value_means_the_same_in_a_file_and_in_a_flag(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "a.yaml",
        "learning_rate: 1e-3\nbatch_tokens: 0.016M\nsequence_length: 500\nisolate_documents: false\n"
        "eval_strategy: no\nsave_total_limit: null\ndataset: [a.txt, b.txt]\nreport_to: [tensorboard]\n"
        "resume_from_checkpoint: false\nmax_steps: -1\n",
    )
    flags = [
        *("--learning_rate", "1e-3", "--batch_tokens", "0.016M", "--sequence_length", "500", "--no_isolate_documents"),
        *("--eval_strategy", "no", "--save_total_limit", "none", "--dataset", "a.txt", "b.txt"),
        *("--report_to", "tensorboard", "--resume_from_checkpoint", "false", "--max_steps", "-1"),
    ]
    base = ["--model_type", "llama", "--tokenizer_name", "bytes", "--output_dir", "out", "--total_tokens", "1M"]
    _, data, args = parse([*base, "--config", file])
    _, flag_data, flag_args = parse([*base, *flags])
    assert data == flag_data
    assert data.dataset == ["a.txt", "b.txt"]
    assert not data.isolate_documents
    assert args.to_dict() == flag_args.to_dict()
    assert (args.batch_tokens, args.save_total_limit, args.report_to) == (16_000, None, ["tensorboard"])
    assert args.resume_from_checkpoint == "false"


def test_all_problems_at_once_each_with_its_source(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "bad.yaml",
        "learning_rte: 1e-3\nsequence_length: long\ndataset: stdlib\npacking: tight\nseed: [1, 2]\n",
    )
    found = problems_of(
        [
            "--config",
            file,
            "--modl_type",
            "llama",
            "--bf16",
            "maybe",
            "--max_steps",
            "1e3",
            "--weight_decay",
            "stray",
            "more",
        ]
    )
    text = "\n".join(found)
    for wrong, source in [
        ("learning_rte", file),
        ("sequence_length", file),
        ("packing", file),
        ("seed", file),
        ("modl_type", "command line"),
        ("bf16", "command line"),
        ("max_steps", "command line"),
        ("weight_decay", "command line"),
        ("more", "command line"),
        ("output_dir", "default"),
    ]:
        assert any(wrong in problem and f"({source})" in problem for problem in found), (wrong, text)
    assert "did you mean learning_rate?" in text
    assert "did you mean model_type?" in text
    assert "expected one of concat, best_fit" in text
    assert "expected a whole number" in text


def test_a_bad_value_is_not_judged_twice() -> None:
    assert len(problems_of([*GOOD, "--batch_tokens", "lots"])) == 1
    assert len(problems_of([*GOOD, "--total_tokens", "1.5"])) == 1


def test_a_flag_without_a_value() -> None:
    (problem,) = problems_of([*GOOD, "--learning_rate", "--seed", "3"])
    assert "learning_rate has no value" in problem
    (problem,) = problems_of([*GOOD, "--dataset"])
    assert "dataset has no value" in problem


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--warmup_steps 0.1", "warmup_fraction: 0.1"),
        ("--warmup_steps 10 --warmup_fraction 0.1", "given twice"),
        ("--warmup_steps 0 --warmup_fraction 0.1", "given twice"),
        ("--lr_scheduler_type polynomial", "warmup_stable_decay, cosine, linear, constant"),
        ("--lr_scheduler_type cosine --decay_fraction 0.1", "no separate final decay"),
        ("--lr_scheduler_type constant --min_lr_ratio 0.1", "no minimum"),
        ("--warmup_fraction 0.6 --decay_fraction 0.6", "1.2 of the run"),
        ("--decay_steps 3 --decay_fraction 0.1", "given twice"),
        ("--batch_tokens 10_000", "9_216, 10_240"),
        ("--total_tokens 1M --max_steps 5", "122 steps"),
        ("--num_train_epochs 2", "total_tokens or max_steps"),
        ("--label_smoothing_factor 0.1", "not followed"),
        ("--validation_fraction 0 --eval_strategy steps", "no document is held out"),
        ("--resume_from_checkpoint true", "auto"),
        ("--resume_from_checkpoint no/such/folder", "does not exist"),
        ("--config_name gpt2", "more than once"),
        ("--block_size 512", "sequence_length"),
        ("--warmup_ratio 0.1", "warmup_fraction"),
        ("--learning_rate=-1", "at least 0"),
        ("--z_loss_weight=-1e-4", "at least 0"),
    ],
)
def test_contradictions(words: str, expected: str) -> None:
    found = problems_of([*GOOD, *words.split()])
    assert len(found) == 1
    assert expected in found[0]


def test_what_transformers_refuses_is_a_config_error_too() -> None:
    (problem,) = problems_of([*GOOD, "--bf16", "true", "--fp16", "true"])
    assert "bf16 from command line" in problem


def test_defaults_follow() -> None:
    _, data, args = parse([*GOOD, "--validation_fraction", "0"])
    assert args.eval_strategy == "no"
    assert data.validation_fraction == 0
    for words in ([], ["--validation_fraction", "0", "--eval_data", "a=b.txt"]):
        _, _, args = parse([*GOOD, *words])
        assert args.eval_strategy == "steps"
    assert (args.gradient_accumulation_steps, args.accumulation_asked) == (1, None)
    for asked in (1, 4):
        _, _, args = parse([*GOOD, "--gradient_accumulation_steps", str(asked)])
        assert (args.gradient_accumulation_steps, args.accumulation_asked) == (1, asked)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    twice = write(tmp_path, "twice.yaml", "seed: 1\nseed: 2\n")
    (problem,) = problems_of([*GOOD, "--config", twice])
    assert "'seed' stands here twice" in problem
    (problem,) = problems_of([*GOOD, "--config", str(tmp_path / "none.yaml")])
    assert "No such file" in problem


def test_every_field_that_is_ours_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for cls in (ModelArguments, DataArguments, PretrainArguments):
        for name in cls.__annotations__:
            field = cls.__dataclass_fields__[name]
            if field.init:
                assert len(field.metadata["help"]) > 30, name
                assert f"--{name} " in text
    assert "--torch_compile" not in text
    with pytest.raises(SystemExit):
        parse(["--help_all"])
    assert "--torch_compile" in capsys.readouterr().out


@pytest.mark.parametrize("model", sorted((CONFIGS / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_pieces_compose(model: Path) -> None:
    for data in sorted((CONFIGS / "data").glob("*.yaml")):
        for train in (CONFIGS / "train" / "wsd.yaml", CONFIGS / "train" / "cosine.yaml"):
            _, data_args, args = parse(
                ["--config", *map(str, (model, data, train)), "--output_dir", "out", "--total_tokens", "1B"]
            )
            assert args.batch_tokens % data_args.sequence_length == 0


def test_the_other_configs_are_read() -> None:
    _, data_args, args = parse(["--config", str(CONFIGS / "demo.yaml")])
    assert args.batch_tokens == 4 * data_args.sequence_length
    # bf16 and tf32 need a GPU to be accepted; here only their names and types are of interest.
    argv = [*GOOD, "--config", str(CONFIGS / "train" / "gpu.yaml"), "--bf16", "false", "--tf32", "none"]
    assert parse(argv)[2].dataloader_num_workers == 2


def test_run_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [*GOOD, "--hub_token", "secret", "--hub-token=secret"]
    model_args, data_args, args = parse(argv)
    monkeypatch.setattr("sys.argv", ["pretrain.py", *argv])
    for rate in (6e-4, 3e-4):
        args.learning_rate = rate
        path = write_run_json(
            tmp_path, model_args=model_args, data_args=data_args, args=args, data_fingerprint="f", model_parameters=7
        )
    record = json.loads(path.read_text())
    assert "secret" not in path.read_text()
    assert record["command"][1:4] == ["pretrain.py", "--model_type", "llama"]
    assert record["arguments"]["training"]["learning_rate"] == 3e-4
    assert record["arguments"]["data"] == dataclasses.asdict(data_args)
    assert record["sources"]["dataset"] == "command line"
    assert record["versions"]["torch"]
    (earlier,) = record["earlier_launches"]
    assert earlier["was"] == {"learning_rate": 6e-4}
