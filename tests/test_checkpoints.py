"""A checkpoint is whole or absent, the newest is the one with the highest step, and rotation never takes too much."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hfpretrain.errors import ConfigError
from hfpretrain.training.checkpoints import (
    TRAINER_STATE,
    checkpoint_step,
    latest_checkpoint,
    list_checkpoints,
    publish,
    resume_point,
    rotate,
    staging_dir,
)


def _write(folder: Path, *, complete: bool = True, content: str = "w") -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(content)
    if complete:
        (folder / TRAINER_STATE).write_text("{}")
    return folder


def test_steps_order_checkpoints_and_time_stamps_do_not(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        _write(tmp_path / f"checkpoint-{step}")
    os.utime(tmp_path / "checkpoint-3", (2e9, 2e9))  # copied or touched last
    assert [checkpoint_step(folder) for folder in list_checkpoints(tmp_path)] == [3, 20, 100]
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


def test_half_a_checkpoint_and_foreign_folders_are_not_seen(tmp_path: Path) -> None:
    _write(tmp_path / "checkpoint-10")
    _write(tmp_path / "checkpoint-20", complete=False)
    _write(tmp_path / "checkpoint-best")
    _write(staging_dir(tmp_path) / "checkpoint-30")
    assert list_checkpoints(tmp_path) == [tmp_path / "checkpoint-10"]
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_publish_moves_the_whole_folder_and_replaces_an_older_one(tmp_path: Path) -> None:
    _write(tmp_path / "checkpoint-10", content="old")
    _write(staging_dir(tmp_path) / "checkpoint-10", content="new")
    assert publish(tmp_path, "checkpoint-10") == tmp_path / "checkpoint-10"
    assert (tmp_path / "checkpoint-10" / "model.safetensors").read_text() == "new"
    assert list(staging_dir(tmp_path).iterdir()) == []
    publish(tmp_path, "checkpoint-10")  # the second node of a shared file system finds nothing left to do
    assert (tmp_path / "checkpoint-10" / "model.safetensors").read_text() == "new"


def test_publish_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="checkpoint-5 was not written"):
        publish(tmp_path, "checkpoint-5")


def test_rotation_keeps_the_newest_and_everything_that_is_not_its_own(tmp_path: Path) -> None:
    for step in (1, 2, 30, 4):
        _write(tmp_path / f"checkpoint-{step}")
    _write(tmp_path / "checkpoint-best-stable")
    deleted = rotate(tmp_path, 2)
    assert [folder.name for folder in deleted] == ["checkpoint-1", "checkpoint-2"]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [
        "checkpoint-30",
        "checkpoint-4",
        "checkpoint-best-stable",
    ]
    assert rotate(tmp_path, None) == []
    assert rotate(tmp_path, 5) == []


def test_resume_point(tmp_path: Path) -> None:
    assert resume_point("auto", tmp_path) is None
    assert resume_point("false", tmp_path) is None
    _write(tmp_path / "checkpoint-8")
    _write(tmp_path / "checkpoint-9", complete=False)
    assert resume_point("auto", tmp_path) == tmp_path / "checkpoint-8"
    assert resume_point(str(tmp_path / "checkpoint-8"), tmp_path / "new") == tmp_path / "checkpoint-8"
    with pytest.raises(ConfigError, match="no complete checkpoint there"):
        resume_point(str(tmp_path / "checkpoint-9"), tmp_path)
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier one"):
        resume_point("false", tmp_path)
