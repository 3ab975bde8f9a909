"""Configurations with one fault each, and one with many: what `begin` says before text or weights are touched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hfpretrain.data.tokenizer import byte_tokenizer
from hfpretrain.errors import ConfigError, Problem
from hfpretrain.model import build_model, load_config
from hfpretrain.preflight import begin, folders, memory, start
from hfpretrain.run_record import write_run_json

COMMAND_LINE = "command line"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text with and without a text column, a file of an unknown kind, and YAML files with a fault each."""
    path = tmp_path_factory.mktemp("broken")
    (path / "text.jsonl").write_text(json.dumps({"text": "a text"}) + "\n")
    (path / "body.jsonl").write_text(json.dumps({"body": "a text"}) + "\n")
    (path / "table.csv").write_text("text\na\n")
    (path / "typo.yaml").write_text("learning_rte: 1e-3\n")
    (path / "list.yaml").write_text("seed: [1, 2]\n")
    (path / "twice.yaml").write_text("seed: 1\nseed: 2\n")
    (path / "words.yaml").write_text('config_overrides: {hidden_size: "32"}\n')
    checkpoint = path / "old" / "checkpoint-5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    return path


def words(folder: Path, **changes: Any) -> list[str]:
    """The command line of a run in which nothing is wrong, with these fields set anew; None leaves one out."""
    settings: dict[str, Any] = {
        "model_type": "llama",
        "config_overrides": json.dumps(SIZES),
        "tokenizer_name": "bytes",
        "dataset": folder / "text.jsonl",
        "sequence_length": 64,
        "batch_tokens": 512,
        "max_steps": 10,
        "output_dir": folder / "run",
        "cache_dir": folder / "cache",
    }
    settings |= changes
    listed = {name: value if isinstance(value, list) else [value] for name, value in settings.items()}
    return [str(word) for name, values in listed.items() if values != [None] for word in (f"--{name}", *values)]


def refused(argv: list[str]) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        begin(argv)
    return caught.value.problems


def the_one(argv: list[str], message: str, source: str) -> None:
    (problem,) = refused(argv)
    assert re.search(message, str(problem), re.DOTALL), problem
    assert source in problem.source, problem
    assert problem.given
    assert problem.remedy


def test_nothing_is_wrong_with_what_the_others_change(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = begin(words(folder))
    assert started.run.num_steps == 10
    assert started.checkpoint is None
    assert {verdict.verdict for verdict in started.verdicts.found} == {"ok"}
    assert capsys.readouterr().out.count("\n") < 10


# fields that are changed (None: left out), what the message says, where the value came from
FLAGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown flag": ({"batch_tokenz": 256}, "no field 'batch_tokenz'.*did you mean batch_tokens", COMMAND_LINE),
    "habit of another trainer": ({"block_size": 64}, "did you mean sequence_length", COMMAND_LINE),
    "unknown key in a file": ({"config": "typo.yaml"}, "did you mean learning_rate", "typo.yaml"),
    "list for a number": ({"config": "list.yaml"}, "seed has the wrong form", "list.yaml"),
    "key given twice": ({"config": "twice.yaml"}, "'seed' stands here twice", "--config"),
    "no such file": ({"config": "none.yaml"}, "No such file", "--config"),
    "word for a number": ({"per_device_train_batch_size": "many"}, "expected a whole number", COMMAND_LINE),
    "no such choice": ({"packing": "tight"}, "expected one of concat", COMMAND_LINE),
    "no tokens": ({"batch_tokens": "1.5"}, "whole number of tokens", COMMAND_LINE),
    "no model": ({"model_type": None}, "no model is named", "default"),
    "two models": ({"config_name": "gpt2"}, "more than once", COMMAND_LINE),
    "no tokenizer": ({"tokenizer_name": None}, "no tokenizer is named", "default"),
    "no data": ({"dataset": None}, "no data is named", "default"),
    "no output folder": ({"output_dir": None}, "no output folder", "default"),
    "no length": ({"max_steps": None}, "the run has no length", "default"),
    "indivisible batch": ({"batch_tokens": 500}, "448, 512", COMMAND_LINE),
    "two lengths": ({"total_tokens": 512}, "= 1 steps", COMMAND_LINE),
    "warm-up given twice": ({"warmup_steps": 2, "warmup_fraction": 0.1}, "given twice", COMMAND_LINE),
    "warm-up as a ratio": ({"warmup_steps": 0.1}, "warmup_fraction: 0.1", COMMAND_LINE),
    "shares above 1": ({"warmup_fraction": 0.6, "decay_fraction": 0.6}, "1.2 of the run", COMMAND_LINE),
    "warm-up and decay longer than the run": ({"warmup_steps": 6, "decay_steps": 6}, "overlap", ""),
    "warm-up longer than the run": ({"warmup_steps": 12, "lr_scheduler_type": "cosine"}, "12", ""),
    "unknown schedule": ({"lr_scheduler_type": "polynomial"}, "one of warmup_stable_decay", COMMAND_LINE),
    "decay of cosine": ({"lr_scheduler_type": "cosine", "decay_steps": 3}, "no separate final decay", COMMAND_LINE),
    "not followed": ({"label_smoothing_factor": 0.1}, "not followed by this trainer", COMMAND_LINE),
    "two precisions": ({"bf16": "true", "fp16": "true"}, "fp16 and bf16", "bf16 from command line"),
    "accumulation": ({"gradient_accumulation_steps": 3}, "= 1", COMMAND_LINE),
    "noise scale of one micro-batch": ({"log_noise_scale": 1}, "size of at most 4", COMMAND_LINE),
    "spikes that are none": ({"skip_spikes": 2}, "at least 3", COMMAND_LINE),
    "ramp that shrinks": ({"batch_ramp": "0:1Ki,2Ki:512", "max_steps": 20}, "no larger than", COMMAND_LINE),
    "ramp that never comes": ({"batch_ramp": "0:256,1M:512"}, "never has a step", COMMAND_LINE),
    "evaluation of nothing": (
        {"validation_fraction": 0, "eval_strategy": "steps"},
        "no document is held",
        COMMAND_LINE,
    ),
    "optimizer with groups of its own": ({"optim": "galore_adamw"}, "optimizer c", COMMAND_LINE),
    "unknown tracker": ({"report_to": "nosuch"}, "nosuch", COMMAND_LINE),
    # the model, the tokenizer and what they say of each other
    "rows longer than positions": ({"sequence_length": 128}, "64 positions", COMMAND_LINE),
    "vocabulary too small": (
        {"config_overrides": SIZES | {"vocab_size": 200}},
        "258 tokens, vocab_size=200",
        COMMAND_LINE,
    ),
    "end beyond the vocabulary": (
        {"config_overrides": SIZES | {"eos_token_id": 999}},
        "eos_token_id=999",
        COMMAND_LINE,
    ),
    "another end": ({"config_overrides": SIZES | {"eos_token_id": 3}}, "stop at another", COMMAND_LINE),
    "padding beyond the vocabulary": (
        {"config_overrides": SIZES | {"pad_token_id": -1}},
        "pad_token_id=-1",
        COMMAND_LINE,
    ),
    "unknown architecture": ({"model_type": "lama"}, "did you mean.*llama", "model_type from command line"),
    "unknown size": ({"config_overrides": SIZES | {"hiden_size": 4}}, "did you mean hidden_size", COMMAND_LINE),
    "text for a number": ({"config_overrides": None, "config": "words.yaml"}, "refuses these values", "words.yaml"),
    "heads that do not divide": ({"config_overrides": SIZES | {"hidden_size": 30}}, "hidden_size", COMMAND_LINE),
    "attention that is not there": ({"attn_implementation": "flash9"}, "flash9", "attn_implementation from command"),
    "tokenizer that is not there": ({"tokenizer_name": "./no/tokenizer"}, "cannot be loaded", COMMAND_LINE),
    "configuration that is not there": (
        {"model_type": None, "config_name": "./no/model"},
        "cannot be loaded",
        COMMAND_LINE,
    ),
    "tokenizer too small": ({"tokenizer_name": "train:100"}, "at least 258", "tokenizer_name from command line"),
    "muP without its optimizer": ({"mup_base_width": 16, "optim": "adafactor"}, "adafactor is none", "optim from"),
    "muP without a base": ({"mup_overrides": "a=input"}, "no base model is given", COMMAND_LINE),
    "muP with two bases": ({"mup_base_width": 16, "mup_base_config": "hidden_size=16"}, "given twice", COMMAND_LINE),
}
# The text and the folders; paths are below the fixture's folder.
PATHS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no such data": ({"dataset": "gone.jsonl"}, "no file matches", COMMAND_LINE),
    "data of an unknown kind": ({"dataset": "table.csv"}, "cannot tell how to read", COMMAND_LINE),
    "no text column": ({"dataset": "body.jsonl"}, "text", COMMAND_LINE),
    "data named twice": ({"dataset": ["text.jsonl", "text.jsonl"]}, "named twice", COMMAND_LINE),
    "output below a file": ({"output_dir": "text.jsonl/run"}, "output_dir cannot be written to", COMMAND_LINE),
    "cache below a file": ({"cache_dir": "text.jsonl/cache"}, "cache_dir cannot be written to", COMMAND_LINE),
    "new run over an old one": (
        {"output_dir": "old", "resume_from_checkpoint": "false"},
        "checkpoints of an earlier",
        "",
    ),
    "checkpoint that is not there": ({"resume_from_checkpoint": "none"}, "does not exist", COMMAND_LINE),
    "checkpoint that is none": ({"resume_from_checkpoint": "old"}, "no complete checkpoint", "resume_from_checkpoint"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_one_fault_of_a_flag_or_a_file(name: str, folder: Path) -> None:
    changes, message, source = FLAGS[name]
    changes = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in changes.items()}
    if "config" in changes:
        changes["config"] = folder / changes["config"]
    the_one(words(folder, **changes), message, source)


@pytest.mark.parametrize("name", PATHS)
def test_one_fault_of_a_path(name: str, folder: Path) -> None:
    changes, message, source = PATHS[name]
    placed = {
        key: [folder / word for word in value]
        if isinstance(value, list)
        else folder / value
        if value != "false"
        else value
        for key, value in changes.items()
    }
    the_one(words(folder, **placed), message, source)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (LAUNCHED | {"MASTER_ADDR": "127.0.0.1"}, "accelerate started one"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed_precision: bf16 there, no here"),
        (LAUNCHED | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "follows from batch_tokens"),
        (LAUNCHED | {"ACCELERATE_USE_MEGATRON_LM": "true"}, "sharding is DeepSpeed's"),
        (LAUNCHED | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, "tp_size: 2"),
        (LAUNCHED | {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "compiles the model"),
    ],
)
def test_one_fault_of_the_launcher(
    env: dict[str, str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    the_one(words(folder), message, "accelerate launch")


def under_deepspeed(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """As if the launcher had read this DeepSpeed file; the real way to it is in tests/distributed/test_launch.py."""
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"} | changes
    config = {key: value for key, value in config.items() if value is not None}
    monkeypatch.setattr(start, "deepspeed_config", lambda _: config)
    monkeypatch.setattr(start, "deepspeed_source", lambda _: "zero2.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"type": "AdamW"}}, "replaces the parameter groups"),
        ({"scheduler": {"type": "WarmupLR"}}, "replaces the schedule"),
        ({"gradient_clipping": None}, "does not clip at all"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping: 0\.5, max_grad_norm: 1\.0"),
        ({"gradient_clipping": "1.0"}, r"gradient_clipping is str.*'1\.0', max_grad_norm: 1\.0"),
        (
            {"train_micro_batch_size_per_gpu": "8"},
            "is str, DeepSpeed needs a number.*'8', per_device_train_batch_size: 8",
        ),
        ({"train_micro_batch_size_per_gpu": 4}, "contradicts per_device_train_batch_size"),
        ({"train_batch_size": 64}, "train_batch_size: 64, .*: 8"),
        ({"gradient_accumulation_steps": 4}, "must not accumulate"),
        ({"gradient_accumulation_steps": "1"}, "is str, DeepSpeed needs a number"),
        ({"bf16": {"enabled": True}}, "bf16.enabled: True, bf16: False"),
        ({"bf16": {"enabled": "true"}}, "DeepSpeed needs true or false"),
        ({"zero_optimization": {"stage": "2"}}, "a number from 0 to 3.*'2'"),
        ({"zero_optimization": {"stage": 4}}, "a number from 0 to 3"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "needs ZeRO stage 3"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "needs ZeRO stage 1"),
        ({"gradient_cliping": 1.0}, "did you mean gradient_clipping"),
    ],
)
def test_one_fault_of_a_deepspeed_file(
    changes: dict[str, Any], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_deepspeed(monkeypatch, **changes)
    the_one(words(folder), message, "zero2.json")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("wiki", "name=source"),
        ("bpb=stdlib", "a metric already"),
        ("wiki=gone.jsonl", "held-out data cannot be found"),
    ],
)
def test_one_fault_of_a_held_out_set(entry: str, message: str, folder: Path) -> None:
    the_one(words(folder, eval_data=entry), message, COMMAND_LINE)


def test_a_disk_that_would_fill_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 steps, saved at 4, 8 and the last, all kept: 3 * 12 N + 4 N bytes."""
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: SimpleNamespace(free=5e5))
    argv = words(folder, save_steps=4, save_total_limit="none")
    parameters = 2 * 258 * 32 + 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48 + 3 * 32
    needed = f"{(3 * 12 + 4) * parameters / 1e6:.3g} MB of 0.5 MB free"
    the_one(argv, f"the disk will be full.*{needed}", "output_dir")


def test_a_micro_batch_that_no_device_would_hold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there is: refused, with the rows that fit; more than is free of it: a note."""
    large = SIZES | {"hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 4096}
    argv = words(folder, config_overrides=json.dumps(large), sequence_length=4096, batch_tokens=8 * 4096)
    # A Llama layer keeps at least its 17 inputs and outputs of width d or more for the backward pass: 8 rows of 4,096
    # in float32 are above 17 * 4 * 8 * 4096 * 2048 bytes = 4.6e9, and weights and moments 12 * 64e6, 0.72 GiB.
    monkeypatch.setattr(memory.Memory, "of", lambda _: memory.Memory("cpu", int(3e9), int(3e9)))
    (problem,) = refused(argv)
    assert "one rank would need" in problem.what
    assert problem.source == "per_device_train_batch_size"
    fits = re.search(r"per_device_train_batch_size of at most (\d+)", problem.remedy)
    assert fits is not None
    assert 1 <= int(fits[1]) <= 3
    assert begin([*argv, "--per_device_train_batch_size", fits[1]]).run.num_steps == 10
    monkeypatch.setattr(memory.Memory, "of", lambda _: memory.Memory("cpu", int(7e8), int(7e8)))
    the_one(argv, r"state alone are 0\.72 GiB a rank.*no DeepSpeed, 1 rank", "config_overrides from command line")
    monkeypatch.setattr(memory.Memory, "of", lambda _: memory.Memory("cpu", int(1e12), int(3e9)))
    notes = [verdict.why for verdict in begin(argv).verdicts.found if verdict.verdict == "note"]
    assert len(notes) == 1
    assert "others use the rest now" in notes[0]


def test_the_folder_of_another_run(folder: Path) -> None:
    """Refused with the fields that differ, once it holds weights; its record alone is in nobody's way."""
    argv = words(folder, output_dir=folder / "other")
    started = begin(argv)
    facts: dict[str, Any] = {"data_fingerprint": "f", "model_parameters": 7}
    write_run_json(
        folder / "other", model_args=started.model_args, data_args=started.data_args, args=started.args, **facts
    )
    changed = words(folder, output_dir=folder / "other", seed=7, batch_tokens=1024, cache_dir=folder / "elsewhere")
    assert begin(changed).run.batch_tokens == 1024
    (folder / "other" / "model.safetensors").write_text("")
    assert begin(argv).run.batch_tokens == 512
    (problem,) = refused(changed)
    assert problem.given == "seed: 42 then, 7 now"
    (folder / "other" / "run.json").write_text("{")
    the_one(argv, "run.json there cannot be read", COMMAND_LINE)


def test_a_checkpoint_of_another_model_and_one_of_this_with_other_arguments(folder: Path, tmp_path: Path) -> None:
    """Weights are compared by name and shape, in whatever form the checkpoint has them; the data's turn comes later."""
    argv = words(folder, output_dir=tmp_path)
    started = begin(argv)
    facts: dict[str, Any] = {"data_fingerprint": "f", "model_parameters": 7}
    write_run_json(tmp_path, model_args=started.model_args, data_args=started.data_args, args=started.args, **facts)
    checkpoint = tmp_path / "checkpoint-5"
    config = load_config(model_type="llama", config_overrides=SIZES, tokenizer=byte_tokenizer())
    build_model(config, seed=1).save_pretrained(checkpoint, max_shard_size="50KB")
    (checkpoint / "trainer_state.json").write_text("{}")
    assert len(list(checkpoint.glob("*.safetensors"))) > 1
    assert {verdict.verdict for verdict in begin(argv).verdicts.found} == {"ok"}
    (note,) = [v for v in begin([*argv, "--packing", "best_fit"]).verdicts.found if v.verdict == "note"]
    assert note.why.endswith('with other arguments than there: packing: "concat" then, "best_fit" now')
    wider = words(folder, output_dir=tmp_path, config_overrides=json.dumps(SIZES | {"intermediate_size": 64}))
    the_one(wider, r"mlp\.down_proj\.weight: \[32, 48\] there, \[32, 64\] here", "resume_from_checkpoint")


def test_values_that_no_check_expects_are_said_and_not_stumbled_over(folder: Path) -> None:
    changes = {
        "sequence_length": 0,
        "per_device_train_batch_size": 0,
        "batch_tokens": -1,
        "dataset": folder / "gone.jsonl",
    }
    found = [str(problem) for problem in refused(words(folder, **changes))]
    for text in ("sequence_length is out of range", "batch_size is out of range", "batch_tokens is out", "no file"):
        assert sum(text in problem for problem in found) == 1, (text, found)


def test_a_tokenizer_that_is_not_there_hides_nothing_about_the_model(folder: Path) -> None:
    found = refused(words(folder, tokenizer_name="./none", sequence_length=128, output_dir=folder / "text.jsonl" / "x"))
    assert ["cannot be loaded" in found[0].what, "64 positions" in found[1].what] == [True, True]
    assert "cannot be written" in found[2].what
    assert len(found) == 3


def test_faults_of_every_kind_come_in_one_list(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_deepspeed(monkeypatch, optimizer={"type": "AdamW"})
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    changes = {"batch_tokens": 1000, "sequence_length": 96, "dataset": folder / "gone.jsonl", "learning_rte": 1e-3}
    changes |= {"config_overrides": json.dumps(SIZES | {"vocab_size": 100}), "warmup_steps": 6, "decay_steps": 6}
    changes |= {"output_dir": folder / "text.jsonl" / "run", "report_to": "nosuch", "seed": "first"}
    found = [str(problem) for problem in refused(words(folder, **changes))]
    expected = [
        *("no field 'learning_rte'", "seed cannot be read", "whole number of rows", "an optimizer block"),
        *("different precisions", "overlap", "no file matches", "64 positions", "258 tokens, vocab_size=100"),
        *("output_dir cannot be written", "nosuch"),
    ]
    for text in expected:
        assert sum(text in problem for problem in found) == 1, (text, found)
    assert len(found) == len(expected)


def test_a_value_that_could_not_be_read_is_not_judged_further(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its default would only give rise to problems that are none; what does not hang on it is judged."""
    (one, two) = refused(words(folder, batch_tokenz=64, batch_tokens=None, dataset=folder / "gone.jsonl"))
    assert "batch_tokenz" in one.given
    assert "no file matches" in two.what
    assert "not judged: batch_tokens could not be read" in capsys.readouterr().out


def test_only_preflight_writes_its_list(folder: Path, tmp_path: Path) -> None:
    argv = words(folder, output_dir=tmp_path / "a", batch_tokens=500)
    refused(argv)
    assert not (tmp_path / "a").exists()
    refused([*argv, "--preflight_only", "true"])
    written = json.loads((tmp_path / "a" / "preflight.json").read_text())
    verdicts = {verdict["check"]: verdict for verdict in written["verdicts"]}
    assert verdicts["arguments"]["verdict"] == "problem"
    assert verdicts["arguments"]["value"] == "batch_tokens=500, sequence_length=64"
    assert verdicts["arguments"]["source"] == COMMAND_LINE
    assert verdicts["arguments"]["remedy"] == "the nearest that fit: 448, 512"
    assert verdicts["launch"]["verdict"] == "ok"
    refused(words(folder, output_dir=folder / "text.jsonl" / "x", preflight_only="true"))  # which cannot be written
    assert written["seconds"].keys() >= {"launch", "plan", "data", "model", "output_dir"}
