"""The README's Python blocks run as they stand, one after another, and its claims about files hold."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hfpretrain.data.tokenizer import byte_tokenizer
from hfpretrain.model import build_model, load_config
from runs import write_text

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_every_block_runs_with_a_stock_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(Path("text.jsonl"))
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    stock: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    namespace: dict[str, Any] = {
        "Path": Path,
        "Trainer": Trainer,
        "args": TrainingArguments("out", max_steps=2, remove_unused_columns=False, **stock),
        "step_args": TrainingArguments("out", ignore_data_skip=True, **stock),
        "model": build_model(load_config(model_type="llama", config_overrides=sizes, tokenizer=tokenizer), seed=1),
        "partial": partial,
        "tokenizer": tokenizer,
        "torch": torch,
    }
    before = {name: value.clone() for name, value in namespace["model"].named_parameters()}
    assert len(BLOCKS) == 11
    for block in BLOCKS:
        assert len([line for line in block.splitlines() if line]) <= 9
        exec(compile(block, str(README), "exec"), namespace)
    moved = namespace["model"].state_dict()
    assert any(not torch.equal(value, moved[name]) for name, value in before.items())
    assert "documents do not see each other" in capsys.readouterr().out


def test_every_file_that_is_named_exists() -> None:
    text = README.read_text(encoding="utf-8")
    named = set(
        re.findall(r"(?:accelerate_configs|ds_configs|recipes|benchmarks|docs)/[\w/]+\.(?:yaml|json|py|md)", text)
    )
    assert len(named) >= 12
    assert not [name for name in named if not (README.parent / name).exists()]


def test_every_test_that_the_documents_name_exists() -> None:
    root = README.parent
    named = {
        found
        for page in [README, *(root / "docs").glob("*.md")]
        for found in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text(encoding="utf-8"))
    }
    assert len(named) >= 20
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (root / file).read_text("utf-8")]
    assert not missing
