"""recipes/compare_bpb.py on tiny models with different tokenizers: figures by hand, lossy texts, faults in one list."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import compare_bpb
from comparison import EDGE, LOSSY_ID, RECIPE, TEXTS, arguments, build_world
from hfpretrain.arguments.compare import CompareArguments
from hfpretrain.errors import ConfigError
from launching import REPOSITORY, environment


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    build_world(folder)
    return folder


def compared(world: Path, models: str, *more: str) -> dict[str, Any]:
    output = world / "result.json"
    compare_bpb.main(arguments(world, models, *more, output=output))
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


def problems_of(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        compare_bpb.main(argv)
    return str(caught.value)


def nats_by_hand(folder: Path, text: str) -> float:
    """Float64, one forward over the whole document behind BOS."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([[tokenizer.bos_token_id, *ids]])).logits[0, :-1]
    return float(-logits.log_softmax(-1).gather(1, torch.tensor(ids, dtype=torch.int64)[:, None]).sum())


def test_figures_are_those_of_the_chain_rule(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = compared(world, "bytes bpe")
    text_bytes = [len(text.encode("utf-8")) for text in TEXTS]
    assert [d["id"] for d in result["documents"]] == [str(n) for n in range(len(TEXTS))]
    assert [d["text_bytes"] for d in result["documents"]] == text_bytes
    for name in ("bytes", "bpe"):
        model = result["models"][name]
        expected = [nats_by_hand(world / name, text) for text in TEXTS]
        np.testing.assert_allclose([d["nats"][name] for d in result["documents"]], expected, rtol=1e-5)
        assert model["bpb"] == pytest.approx(sum(expected) / math.log(2) / sum(text_bytes), rel=1e-6)
        assert model["text_bytes"] == sum(text_bytes) == sum(d["text_bytes"] for d in model["domains"].values())
        assert model["tokens"] == sum(d["tokens"][name] for d in result["documents"])
        assert model["interval"]["low"] < model["bpb"] < model["interval"]["high"]
        assert model["lossy_documents"] == model["scoring"]["uniform_tokens"] == 0
    assert result["models"]["bytes"]["tokens"] == sum(text_bytes)
    assert result["models"]["bytes"]["uniform_bound"] == pytest.approx(math.log2(258))
    (pair,) = result["pairs"]
    difference = result["models"]["bpe"]["bpb"] - result["models"]["bytes"]["bpb"]
    assert pair["difference"]["value"] == pytest.approx(difference, rel=1e-9)
    assert pair["documents"] == len(TEXTS) - 1  # the empty one is none
    assert result["choices"]["prefix"] == "trained"
    assert result["data"]["warnings"] == ["18 documents with text: fewer than 20, the intervals are too narrow"]
    assert (world / "result.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for shown in ("bytes: 256, '<|start|>'", f"{model['bpb']:.4f}", "xz -9", "uniform over 258", "second better on"):
        assert shown in printed


def test_prefix_stride_and_length_are_choices_that_are_written(world: Path) -> None:
    base = compared(world, "bytes")
    other = compared(world, "bytes", "--prefix", "eos", "--max_length", "16", "--stride", "4", "--batch_size", "3")
    none = compared(world, "bytes", "--prefix", "none")
    scoring = other["models"]["bytes"]["scoring"]
    assert (scoring["prefix_id"], scoring["max_length"], scoring["stride"]) == (257, 16, 4)
    assert other["models"]["bytes"]["bpb"] != base["models"]["bytes"]["bpb"]
    assert none["models"]["bytes"]["scoring"]["uniform_tokens"] == len(TEXTS) - 1
    one_byte = next(d for d in none["documents"] if d["text_bytes"] == 1)
    assert one_byte["nats"]["bytes"] == pytest.approx(math.log(258))  # charged, not forgotten


def test_what_a_tokenizer_loses_is_left_out_for_all(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = compared(world, "bytes nfc")
    assert list(result["data"]["lossy"]) == [LOSSY_ID]
    assert "NFC" in result["data"]["lossy"][LOSSY_ID]["nfc"]
    assert LOSSY_ID not in [d["id"] for d in result["documents"]]
    scored = {model["text_bytes"] for model in result["models"].values()}
    assert scored == {sum(len(text.encode()) for text in TEXTS[:-1])}
    assert [result["models"][name]["lossy_documents"] for name in ("bytes", "nfc")] == [0, 1]
    assert "1 documents, left out for every model" in capsys.readouterr().out
    kept = compared(world, "bytes nfc", "--lossy", "keep")
    assert kept["data"]["documents"] == len(TEXTS)
    assert kept["documents"][-1]["tokens"] == {"bytes": 9, "nfc": 3}
    message = problems_of(arguments(world, "bytes nfc", "--lossy", "error"))
    assert f"loses text of document {LOSSY_ID}" in message
    assert "--lossy exclude" in message


def test_nothing_left_to_score(world: Path, tmp_path: Path) -> None:
    (tmp_path / "lossy.jsonl").write_text(json.dumps({"text": EDGE[-1]}) + "\n")
    message = problems_of(["--models", str(world / "nfc"), "--data", str(tmp_path / "lossy.jsonl")])
    assert "no document is left" in message
    assert "NFC" in message


def test_everything_wrong_at_once(world: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((world / "bytes" / "config.json").read_bytes())
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_bytes((world / "bytes" / "config.json").read_bytes())
    PreTrainedTokenizerFast.from_pretrained(world / "bpe").save_pretrained(foreign)
    models = [str(world / "bytes"), str(tmp_path / "absent"), str(tmp_path / "bare"), str(foreign)]
    message = problems_of(
        [
            *("--models", *models, models[0], "--data", str(tmp_path / "no.jsonl"), "--max_length", "500"),
            *("--stride", "600", "--batch_size", "none", "--dtype", "int8", "--output", str(tmp_path / "x" / "o.json")),
            *("--block_size", "7"),
        ]
    )
    for expected in (
        "there is no field 'block_size'",
        "batch_size cannot be read",
        "expected one of float32, bfloat16",
        "is named more than once",
        "stride is more than max_length=500",
        "the folder of the output does not exist",
        "absent",
        "no tokenizer",
        "has no embedding for",
        "max_length is more than the 128 positions",
        "no.jsonl: no file matches",
    ):
        assert expected in message, expected
    assert "sequence_length" not in message  # a habit of another recipe


def test_a_tokenizer_that_is_rebuilt_by_its_class_is_refused(world: Path, tmp_path: Path) -> None:
    """transformers 5 replaces the pre-tokenizer that tokenizer.json names by that of the class (transformers#45920)."""
    folder = tmp_path / "rebuilt"
    shutil.copytree(world / "bpe", folder)
    pipeline = json.loads((folder / "tokenizer.json").read_text())
    pieces = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    pipeline["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [pieces, pipeline["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(pipeline))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    message = problems_of(["--models", str(folder), "--data", str(world / "text.jsonl")])
    assert "other ids than its own tokenizer.json" in message
    assert "TokenizersBackend" in message
    # The remedy.
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "TokenizersBackend"}))
    compare_bpb.main(["--models", str(folder), "--data", str(world / "text.jsonl")])


def test_without_matplotlib_all_but_the_chart_is_there(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (world / "result.png").unlink(missing_ok=True)
    result = compared(world, "bytes")
    assert result["models"]["bytes"]["bpb"] > 0
    assert not (world / "result.png").exists()
    assert "pip install 'hfpretrain[plot]'" in capsys.readouterr().out


def test_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_bpb.main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for field in fields(CompareArguments):
        assert f"--{field.name} " in printed
        assert "efault" in field.metadata["help"], field.name


def test_a_refused_command_exits_with_its_message(world: Path) -> None:
    run = [sys.executable, str(RECIPE), "--models", str(world / "absent"), "--data", str(world / "text.jsonl")]
    done = subprocess.run(
        run, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    assert "1 problem with this run" in done.stderr
    assert "Traceback" not in done.stderr
