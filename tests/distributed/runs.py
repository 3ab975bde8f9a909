"""A run of recipes/pretrain.py that is over in seconds, for tests that start, kill and repeat it."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from launching import REPOSITORY

RECIPE = REPOSITORY / "recipes" / "pretrain.py"


def write_text(path: Path, documents: int = 20) -> Path:
    """Documents of uneven length with some structure to learn: 3 to 40 words out of 30."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(2, 6))) for _ in range(30)]
    texts = [" ".join(generator.choices(words, k=generator.randint(3, 40))) for _ in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def arguments(folder: Path, **changes: Any) -> list[str]:
    """Command-line arguments: GPT-2 with dropout (so that random states matter), 8 rows of 32 tokens a step."""
    overrides = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    }
    settings: dict[str, Any] = {
        "model_type": "gpt2",
        "config_overrides": ",".join(f"{key}={value}" for key, value in overrides.items()),
        "tokenizer_name": "bytes",
        "dataset": str(folder / "text.jsonl"),
        "validation_fraction": 0.2,
        "sequence_length": 32,
        "batch_tokens": 256,
        "per_device_train_batch_size": 2,
        "max_steps": 14,
        "learning_rate": 3e-3,
        "warmup_fraction": 0.2,
        "decay_fraction": 0.3,
        "logging_steps": 2,
        "save_steps": 3,
        "eval_steps": 7,
        "output_dir": str(folder / "run"),
        "cache_dir": str(folder / "cache"),
        "preprocessing_num_workers": 1,
        "disable_tqdm": "true",
    }
    settings |= changes
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


def curve(run: Path) -> list[dict[str, Any]]:
    """The log lines of a finished run without what depends on the clock."""
    lines = json.loads((run / "trainer_state.json").read_text())["log_history"]
    timed = ("second", "runtime", "peak_memory")
    return [
        {key: value for key, value in line.items() if not any(word in key for word in timed)}
        for line in lines
        if "loss" in line or "eval_loss" in line
    ]


def weights_hash(run: Path) -> str:
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
