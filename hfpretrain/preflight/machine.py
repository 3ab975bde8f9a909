"""What this machine and what is installed on it mean for a run: speed left unused, versions that nobody tested."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.version import Version

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
# Those whose insides this package relies on; of the others only the least version is looked at.
WATCHED = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers")


@dataclass(frozen=True)
class Device:
    """What of a device decides which settings waste it.

    Attributes:
        kind: cuda, cpu, ...
        capability: of a CUDA device, (8, 0) for an A100; (0, 0) otherwise.
        bfloat16: whether it computes in bf16.
    """

    kind: str
    capability: tuple[int, int] = (0, 0)
    bfloat16: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Device:
        if device.type != "cuda":
            return cls(device.type)
        return cls("cuda", torch.cuda.get_device_capability(device), torch.cuda.is_bf16_supported())


def speed_notes(args: Any, device: Device, *, attn_implementation: str = "auto") -> list[tuple[str, str]]:
    """(what is left unused, what to set) on a GPU; nothing on a CPU, where none of it applies."""
    if device.kind != "cuda":
        return []
    notes = []
    half = args.bf16 or args.fp16
    if not half and device.bfloat16:
        notes.append(("it computes in float32; matrix products in bf16 are several times faster", "bf16: true"))
    elif args.fp16 and device.bfloat16:
        notes.append(("fp16 needs a loss scale and may skip steps, and the device has bf16", "bf16: true"))
    if device.capability >= (8, 0) and not args.tf32 and not torch.backends.cuda.matmul.allow_tf32:
        notes.append(("products that stay in float32 do not use TF32", "tf32: true"))
    if args.dataloader_num_workers == 0:
        what = "rows are put together while the GPU waits, with no process of their own"
        notes.append((what, "dataloader_num_workers: 2"))
    if not args.dataloader_pin_memory:
        notes.append(("rows are copied to the GPU from memory that is not pinned", "dataloader_pin_memory: true"))
    if attn_implementation == "eager":
        notes.append(("eager attention keeps every score of a row in memory", "attn_implementation: auto"))
    if str(getattr(args.optim, "value", args.optim)) == "adamw_torch":
        notes.append(("this AdamW updates in many small kernels", "optim: adamw_torch_fused"))
    return notes


def probes(args: Any) -> bool:
    """Whether a pass of full rows is made before the first step; see `training.probe`."""
    return args.probe_step == "always" or (
        args.probe_step == "auto" and (args.device.type == "cuda" or args.preflight_only)
    )


def version_notes(
    installed: Mapping[str, str] | None = None,
    *,
    tested: Mapping[str, str] | None = None,
    required: Mapping[str, str] | None = None,
) -> list[str]:
    """Packages below what pyproject.toml asks for, or other than the tested set of constraints.txt; a clause for each.

    Args:
        installed: name -> version; default is what is installed.
        tested, required: name -> version, name -> specifier; default is read from the two files.
    """
    tested = read_constraints(CONSTRAINTS) if tested is None else tested
    required = _requirements() if required is None else required
    notes = []
    for name in dict.fromkeys([*required, *tested]):
        version = _installed(name) if installed is None else installed.get(name)
        if version is None:
            continue
        if name in required and not Requirement(f"{name}{required[name]}").specifier.contains(
            version, prereleases=True
        ):
            notes.append(f"{name} {version} (needs {required[name]})")
        elif name in WATCHED and name in tested and Version(version).public != Version(tested[name]).public:
            notes.append(f"{name} {version} (tested: {tested[name]})")
    return notes


def read_constraints(path: Path) -> dict[str, str]:
    """Name -> version of a pip constraints file; empty where there is none, as in an installed package."""
    if not path.is_file():
        return {}
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return dict(line.split("==") for line in lines if "==" in line)


def _requirements() -> dict[str, str]:
    try:
        lines = importlib.metadata.requires("hfpretrain") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    parsed = [Requirement(line) for line in lines]
    return {r.name: str(r.specifier) for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})}


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_launch(args: Any, config: Mapping[str, Any] | None) -> str:
    """Processes, DeepSpeed stage, precision and device, in one line."""
    stage = (
        "no DeepSpeed" if config is None else f"DeepSpeed ZeRO {config.get('zero_optimization', {}).get('stage', 0)}"
    )
    section = config or {}
    half = [name for name in ("bf16", "fp16") if getattr(args, name) or section.get(name, {}).get("enabled") is True]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    where = str(args.device) + (f" with {threads} thread(s)" if args.device.type == "cpu" and threads else "")
    return f"{args.world_size} process(es), {stage}, {half[0] if half else 'float32'}, on {where}"
