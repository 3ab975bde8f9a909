"""Where a run writes: may it, does the disk hold its checkpoints, and is another run's work in the way?"""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel

from hfpretrain.arguments import DataArguments, ModelArguments, PretrainArguments
from hfpretrain.errors import ConfigError, Problem
from hfpretrain.planning.storage import (
    checkpoint_count,
    full_checkpoint_bytes,
    kept_checkpoints,
    weight_bytes,
    zero_checkpoint_bytes,
)
from hfpretrain.run_record import plain
from hfpretrain.training.checkpoints import list_checkpoints
from hfpretrain.training.run_length import RunLength, source_of

# Arguments about model and data that say nothing about which run it is; of the training arguments only the seeds do.
MAY_CHANGE = {"cache_dir", "preprocessing_num_workers", "attn_implementation", "eval_data"}
SEEDS = ("seed", "data_seed")
_TIGHT = 0.8  # of the free space


def check_writable(data_args: DataArguments, args: PretrainArguments) -> list[Problem]:
    """Folders that cannot be written to, found by writing a file where they are or would be made."""
    problems = []
    for name, folder in (("output_dir", str(args.output_dir)), ("cache_dir", data_args.cache_dir)):
        try:
            probe = existing_parent(Path(folder)) / f".{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            what = f"{name} cannot be written to: {error.strerror or error}"
            problems.append(Problem(what, folder, source_of(args, name), "another folder, or the right to write there"))
    return problems


def existing_parent(folder: Path) -> Path:
    """The folder itself or the nearest above it that is there."""
    folder = folder.expanduser().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def checkpoint_bytes(parameters: int, *, zero_stage: int | None) -> float:
    """One checkpoint of `recipes/pretrain.py`, all ranks together; see `planning.budget`."""
    if zero_stage is None:
        return full_checkpoint_bytes(parameters)
    return zero_checkpoint_bytes(parameters, zero_stage=zero_stage)


def check_disk(
    args: PretrainArguments, run: RunLength, *, parameters: int, zero_stage: int | None, free_bytes: int | None = None
) -> tuple[list[Problem], str, bool]:
    """(problems, what was found, whether it is tight) about room for the checkpoints of output_dir and the final model.

    Checkpoints that lie there already and will be rotated away make room.

    Args:
        free_bytes: default is what the file system of output_dir has.
    """
    folder = Path(str(args.output_dir))
    free = shutil.disk_usage(existing_parent(folder)).free if free_bytes is None else free_bytes
    each, kept = checkpoint_bytes(parameters, zero_stage=zero_stage), 0
    if str(getattr(args.save_strategy, "value", args.save_strategy)) == "steps":
        every = args.save_steps if args.save_steps >= 1 else args.save_steps * run.num_steps
        count = checkpoint_count(run.num_steps, max(round(every), 1), last_step=True)
        kept = kept_checkpoints(count, args.save_total_limit)
    there = sum(path.stat().st_size for old in list_checkpoints(folder) for path in old.rglob("*") if path.is_file())
    final = weight_bytes(parameters, "float32")
    needed = max(kept * each - there, 0) + final
    sizes = f"{kept} checkpoint(s) of {_size(each)} at a time and the model, {_size(final)}"
    found = f"{sizes}: {_size(needed)} of {_size(free)} free"
    if needed <= free:
        return [], found, needed > _TIGHT * free
    what = "the disk will be full before the run ends"
    remedy = "a smaller save_total_limit, fewer save_steps, or another file system"
    return [Problem(what, found, "output_dir", remedy)], found, True


def changed_arguments(
    model_args: ModelArguments, data_args: DataArguments, args: PretrainArguments
) -> tuple[list[str], bool]:
    """(what differs from the run whose `run.json` lies in output_dir, a clause for each; whether weights lie there).

    Raises:
        ConfigError: the record cannot be read.
    """
    folder = Path(str(args.output_dir))
    saved = bool(list_checkpoints(folder)) or any(folder.glob("*.safetensors"))
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        then = {**record["arguments"]["model"], **record["arguments"]["data"]}
        then |= {name: record["arguments"]["training"].get(name) for name in SEEDS}
    except (FileNotFoundError, NotADirectoryError):
        return [], saved
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"run.json there cannot be read: {type(error).__name__}: {error}"
        remedy = "another output_dir, or remove the file"
        raise ConfigError([Problem(what, str(folder), "output_dir", remedy)]) from error
    now = {**plain(model_args), **plain(data_args)} | {name: getattr(args, name) for name in SEEDS}
    names = [name for name in now if name in then and then[name] != now[name] and name not in MAY_CHANGE]
    return [f"{name}: {_short(then[name])} then, {_short(now[name])} now" for name in names], saved


def other_run(changed: list[str], args: PretrainArguments) -> list[Problem]:
    """A new run where another one's model lies."""
    what = "output_dir holds the model of another run, which this one would overwrite"
    return [Problem(what, "; ".join(changed), "output_dir", "another output_dir, or remove what is there")]


def check_weights(checkpoint: Path, model: PreTrainedModel, args: PretrainArguments) -> list[Problem]:
    """Weights of a checkpoint that are none of this model's, or have another shape; read off the files' headers.

    Args:
        model: on the meta device.
    """
    ours = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    differing = []
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            for name in names:
                there = list(file.get_slice(name).get_shape())
                if ours.get(name) != there:
                    differing.append(f"{name}: {there} there, {ours.get(name, 'no such weight')} here")
    if not differing:
        return []
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    what = f"the weights of {checkpoint} are those of another model"
    remedy = "the former configuration to continue it; or another output_dir for a new run"
    return [Problem(what, "; ".join(differing[:3]) + more, "resume_from_checkpoint", remedy)]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _size(count: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count / 1e6:.3g} MB"
