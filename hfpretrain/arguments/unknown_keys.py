"""What a key that does not exist was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from hfpretrain.errors import Problem

# Habits from run_clm and other trainers that no spelling distance would find.
HABITS = {
    "block_size": "sequence_length",
    "max_seq_length": "sequence_length",
    "max_length": "sequence_length",
    "seq_len": "sequence_length",
    "context_length": "sequence_length",
    "dataset_name": "dataset",
    "train_file": "dataset",
    "validation_split_percentage": "validation_fraction",
    "warmup_ratio": "warmup_fraction",
    "max_train_steps": "max_steps",
    "train_steps": "max_steps",
    "max_tokens": "total_tokens",
    "global_batch_size": "batch_tokens",
    "batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "lr": "learning_rate",
    "beta2": "adam_beta2",
    "grad_clip": "max_grad_norm",
    "lr_scheduler": "lr_scheduler_type",
    "min_lr": "min_lr_ratio",
    "resume": "resume_from_checkpoint",
    "overwrite_output_dir": "resume_from_checkpoint",
}


def nearest(key: str, names: Iterable[str]) -> str | None:
    """The field that a key was probably meant to be; None where nothing is near."""
    names = list(names)
    near = [HABITS[key]] if HABITS.get(key) in names else difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return near[0] if near else None


def unknown_key(key: str, value: Any, *, source: str, names: Iterable[str]) -> Problem:
    """The problem for a key that no field has, with the nearest field as the remedy."""
    near = nearest(key, names)
    remedy = f"did you mean {near}?" if near else "see --help for the fields there are"
    return Problem(f"there is no field {key!r}", f"{key}: {value}", source, remedy)
