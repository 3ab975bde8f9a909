"""Checkpoints that are whole or absent: staged, synced to disk, renamed; rotated by step number.

A checkpoint folder is exactly what the stock Trainer writes. It is written to `<output_dir>/.saving/checkpoint-N` and
moved to `<output_dir>/checkpoint-N` in one rename, so a killed run can leave a stale `.saving` but never a
`checkpoint-N` that is half a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from hfpretrain.errors import ConfigError, Problem

STAGING_FOLDER = ".saving"
TRAINER_STATE = "trainer_state.json"
_CHECKPOINT_NAME = re.compile(r"^checkpoint-(\d+)$")


def checkpoint_step(folder: Path) -> int | None:
    """Optimizer step of a folder named `checkpoint-N`, None for anything else (`checkpoint-best` is the user's own)."""
    match = _CHECKPOINT_NAME.match(folder.name)
    return int(match.group(1)) if match else None


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Complete checkpoints of a run, oldest step first. Time stamps play no part: copying a folder changes them."""
    root = Path(output_dir)
    if not root.is_dir():
        return []
    found = [(checkpoint_step(folder), folder) for folder in root.iterdir()]
    complete = [(step, folder) for step, folder in found if step is not None and (folder / TRAINER_STATE).is_file()]
    return [folder for _, folder in sorted(complete)]


def latest_checkpoint(output_dir: str | Path) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    checkpoints = list_checkpoints(output_dir)
    return checkpoints[-1] if checkpoints else None


def resume_point(asked: str | None, output_dir: str | Path) -> Path | None:
    """Which checkpoint a launch continues from, None for a new run.

    Args:
        asked: `auto` (the newest complete checkpoint of output_dir, if there is one), a checkpoint folder, or `false`.

    Raises:
        ConfigError: the folder is no complete checkpoint; or a new run was asked for in a folder with checkpoints of an
            old one, whose higher steps would later be taken for the newest of the new run.
    """
    newest = latest_checkpoint(output_dir)
    if asked in (None, "false"):
        if newest is not None:
            what = "a new run was asked for, but output_dir holds checkpoints of an earlier one"
            remedy = "another output_dir, or remove them, or resume_from_checkpoint: auto to continue"
            raise ConfigError([Problem(what, str(newest), "resume_from_checkpoint", remedy)])
        return None
    if asked == "auto":
        return newest
    folder = Path(str(asked))
    if not (folder / TRAINER_STATE).is_file():
        what = f"no complete checkpoint there: it has no {TRAINER_STATE}"
        remedy = f"one of {[str(found) for found in list_checkpoints(folder.parent)] or 'the complete ones'}, or auto"
        raise ConfigError([Problem(what, str(asked), "resume_from_checkpoint", remedy)])
    return folder


def staging_dir(output_dir: str | Path) -> Path:
    """Where a checkpoint is written before it is one."""
    return Path(output_dir) / STAGING_FOLDER


def publish(output_dir: str | Path, name: str) -> Path:
    """Sync `<output_dir>/.saving/<name>` to disk and move it to `<output_dir>/<name>`, replacing one of that name.

    Called once per node, one node at a time; on a shared file system all but the first find the work done and return.
    """
    staged, final = staging_dir(output_dir) / name, Path(output_dir) / name
    replaced = staging_dir(output_dir) / f"{name}.replaced"
    with contextlib.suppress(FileNotFoundError):
        _sync_tree(staged)
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists() and staged.exists():
            os.rename(final, replaced)
        os.rename(staged, final)
        _sync_path(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    if not final.is_dir():
        raise FileNotFoundError(f"checkpoint {final} was not written: neither it nor {staged} exists")
    return final


def rotate(output_dir: str | Path, save_total_limit: int | None) -> list[Path]:
    """Delete all but the newest `save_total_limit` complete checkpoints (by step); return what was deleted.

    None or 0 keeps everything. Call it only after `publish`: a new checkpoint is whole before an old one goes.
    """
    if not save_total_limit or save_total_limit < 1:
        return []
    stale = list_checkpoints(output_dir)[:-save_total_limit]
    for folder in stale:
        shutil.rmtree(folder)
    return stale


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for file in files:
            _sync_path(Path(folder) / file)
        _sync_path(Path(folder))


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
