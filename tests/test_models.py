"""A name becomes a model with the right start token, or an error that says what is missing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfpretrain.bpb.models import load, read_card
from hfpretrain.bpb.score import score
from hfpretrain.data.tokenizer import byte_tokenizer
from hfpretrain.errors import ConfigError
from tiny import tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with the byte tokenizer, as `save_pretrained` writes it."""
    place = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = tiny_config("llama", vocab_size=258, bos_token_id=256, eos_token_id=257)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place


def _copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


@pytest.mark.parametrize(
    ("prefix", "expected", "why"),
    [
        ("trained", 256, "BOS of the tokenizer (no run.json"),
        ("bos", 256, "as asked"),
        ("eos", 257, "'<|end|>': EOS"),
        ("none", None, "uniform code"),
        ("10", 10, "as asked"),
    ],
)
def test_prefix(folder: Path, prefix: str, expected: int | None, why: str) -> None:
    card = read_card(str(folder), prefix=prefix)
    assert card.prefix_id == expected
    assert why in card.prefix_why
    assert card.vocabulary == 258


@pytest.mark.parametrize("place", ["run", "run/checkpoint-3"])
def test_the_start_token_of_the_training_is_found_in_the_run(folder: Path, tmp_path: Path, place: str) -> None:
    _copy(folder, tmp_path / place)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"start_id": 65, "end_id": 257}))
    card = read_card(str(tmp_path / place))
    assert card.prefix_id == 65
    assert card.prefix_why == "'A': the start token of its training, from run.json"
    assert read_card(str(tmp_path / place), prefix="bos").prefix_id == 256


def test_load_is_the_model_that_was_saved(folder: Path) -> None:
    loaded = load(str(folder), dtype="float64")
    assert (loaded.model.dtype, loaded.model.training, loaded.prefix_id) == (torch.float64, False, 256)
    ids = [np.frombuffer("두 문서".encode(), dtype=np.uint8).astype(np.int64), np.arange(30)]
    expected = score(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), ids, prefix_id=256)
    scored = score(loaded, ids, prefix_id=loaded.prefix_id)
    np.testing.assert_array_equal(scored.nats, expected.nats)
    scorer = loaded.scorer
    np.testing.assert_array_equal(score(loaded, ids, prefix_id=256).nats, expected.nats)
    assert loaded.scorer is scorer  # measured once


def test_fingerprint_is_of_the_contents(folder: Path, tmp_path: Path) -> None:
    same = _copy(folder, tmp_path / "same")
    (same / "optimizer.pt").write_bytes(b"not the model's")
    assert read_card(str(same)).fingerprint == read_card(str(folder)).fingerprint
    weights = bytearray((same / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (same / "model.safetensors").write_bytes(weights)
    assert read_card(str(same)).fingerprint != read_card(str(folder)).fingerprint


def _without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def _without_a_weight(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = {name: value for name, value in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(folder, state_dict=state)


def _other_tokenizer(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["more", "than", "fits"])
    tokenizer.save_pretrained(folder)


def _special_tokens_beyond(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_without_tokenizer, ["no tokenizer beside the model", "save_pretrained(FOLDER)"]),
        (_without_a_weight, ["3 weights of LlamaForCausalLM are missing", "layers.1.mlp"]),
        (_other_tokenizer, ["3 tokens that the model has no embedding for", "largest id 260, vocabulary 258"]),
        (lambda folder: (folder / "config.json").unlink(), ["no model can be read here"]),
    ],
)
def test_what_is_missing_is_said(folder: Path, tmp_path: Path, damage: Any, words: list[str]) -> None:
    place = _copy(folder, tmp_path / "damaged")
    damage(place)
    with pytest.raises(ConfigError) as error:
        load(str(place))
    for word in [*words, str(place)]:
        assert word in str(error.value)


def test_special_tokens_beyond_the_vocabulary_are_a_note(folder: Path, tmp_path: Path) -> None:
    """Gemma 3's tokenizer has an image token that its text models have no embedding for."""
    place = _copy(folder, tmp_path / "padded")
    _special_tokens_beyond(place)
    assert read_card(str(place)).notes == ("1 special tokens of its tokenizer are beyond its vocabulary of 258",)


@pytest.mark.parametrize(("prefix", "words"), [("258", "no token 258"), ("start", "no prefix"), ("-1", "no prefix")])
def test_impossible_prefixes_are_refused(folder: Path, prefix: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_card(str(folder), prefix=prefix)


def test_no_such_name_and_no_such_dtype(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no model can be read here"):
        load("no/such-model")
    with pytest.raises(ConfigError, match="float32, bfloat16, float16, float64"):
        load(str(folder), dtype="int8")


ASSETS = Path(os.environ.get("HFPRETRAIN_ASSETS", "no assets"))


@pytest.mark.skipif(not (ASSETS / "model").is_dir(), reason="set HFPRETRAIN_ASSETS to try a real model")
def test_a_real_model_is_scored_as_its_logits_say() -> None:
    name = str(ASSETS / "model" / "smollm2-135m-instruct-fp32")
    loaded = load(name)
    assert AutoTokenizer.from_pretrained(name).convert_ids_to_tokens(loaded.prefix_id) == "<|im_start|>"
    text = "All human beings are born free and equal in dignity and rights."
    ids = np.array(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        stream = torch.tensor([[loaded.prefix_id, *ids.tolist()]])
        logits = loaded.model(input_ids=stream[:, :-1]).logits[0].double()
    expected = -float(logits.log_softmax(-1).gather(1, stream[0, 1:, None]).sum())
    assert score(loaded, [ids], prefix_id=loaded.prefix_id).nats[0] == pytest.approx(expected, rel=1e-6)
