"""run.json: what a run was, beside its checkpoints."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("hfpretrain", "torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "numpy")


def write_run_json(
    output_dir: str | Path,
    *,
    model_args: Any,
    data_args: Any,
    args: Any,
    data_fingerprint: str | None,
    model_parameters: int | None,
    plan: Mapping[str, Any] | None = None,
    parent: str | None = None,
    start_id: int | None = None,
    end_id: int | None = None,
    mup: Mapping[str, Any] | None = None,
    verdicts: Any = None,
) -> Path:
    """Write `output_dir/run.json`; call it on one process only.

    A launch that resumes keeps the record of the earlier ones under `earlier_launches`, each with the arguments whose
    value has changed since, so that a changed learning rate can be found later.

    Args:
        model_parameters: number of parameters, tied ones once.
        plan: derived numbers (steps, rows, ...), JSON-able.
        parent: the checkpoint that this run branches from, where it has one; a later launch need not repeat it.
        start_id, end_id: tokens that each training document began and ended with; a model is best asked about a text
            behind the token that its training texts had before them.
        mup: the run's muP spec, where it has one.
        verdicts: the list before the first step, a `hfpretrain.verdicts.Verdicts`.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    record: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [sys.executable, *masked(sys.argv)],
        "arguments": {"model": plain(model_args), "data": plain(data_args), "training": plain(args)},
        "sources": {name: source for name, source in getattr(args, "sources", {}).items() if source != "default"},
        "plan": dict(plan or {}),
        "data_fingerprint": data_fingerprint,
        "model_parameters": model_parameters,
        "start_id": start_id,
        "end_id": end_id,
        "parent": parent,
        "mup": None if mup is None else dict(mup),
        "preflight": None if verdicts is None else verdicts.as_dict(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "versions": versions(),
        "git_commit": git_commit(),
    }
    record["earlier_launches"] = _earlier(path, record)
    if parent is None and path.exists():
        record["parent"] = json.loads(path.read_text(encoding="utf-8")).get("parent")
    # Written beside and renamed: a run that is killed here leaves the old record whole.
    beside = path.with_suffix(".json.partial")
    beside.write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")
    beside.replace(path)
    return path


def plain(arguments: Any) -> dict[str, Any]:
    """A dataclass of arguments as JSON-able values; access tokens are masked by `TrainingArguments.to_dict`."""
    if isinstance(arguments, Mapping):
        return dict(arguments)
    values = arguments.to_dict() if hasattr(arguments, "to_dict") else dataclasses.asdict(arguments)
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return result


def masked(argv: Sequence[str]) -> list[str]:
    """A command line without the values of flags that hold access tokens (`--hub_token`)."""
    result = []
    hide_next = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        secret = flag.startswith("--") and flag.replace("-", "_").endswith("hub_token")
        result.append("***" if hide_next else f"{flag}=***" if secret and equals else word)
        hide_next = secret and not equals
    return result


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes; those not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of the working directory, with "-dirty" where files differ from it; None outside a repository."""
    try:
        text = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return text.strip() or None


def _earlier(path: Path, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    old = json.loads(path.read_text(encoding="utf-8"))
    changed = {}
    for group, now in record["arguments"].items():
        before = old["arguments"].get(group, {})
        changed.update({key: value for key, value in before.items() if now.get(key) != value})
    launch = {
        "started": old["started"],
        "world_size": old.get("world_size"),
        "git_commit": old.get("git_commit"),
        "was": changed,
    }
    return [*old.get("earlier_launches", []), launch]
