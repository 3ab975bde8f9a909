"""Imports run one way: recipes -> middle floor -> ground floor, and rooms on the ground know nothing of one another."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "hfpretrain"
# The only modules that join rooms.
MIDDLE = {"training", "preflight", "launch_checks", "verdicts", "memory_estimate", "run_plan"}
# What a room may use of the others; a room that is not listed may use none. Everybody may use `errors`. `bpb` stands
# between: it joins two rooms, and training uses it.
ALLOWED = {
    "model": {"initialisation"},
    "activation_memory": {"shallow"},
    "bpb": {"data", "loss"},
    "mup": {"initialisation", "model"},
    "model_counts": {"model", "product_watch"},
}
PURE = [
    *("bpb.windows", "bpb.compare", "bpb.coders", "data.packing", "data.order", "errors", "mup.rules", "mup.transfer"),
    *("training.schedule", "training.batch_ramp", "training.adaptive_ramp", "training.noise_estimate"),
    *(f"planning.{path.stem}" for path in sorted((PACKAGE / "planning").glob("[!_]*.py"))),
]


def _room(module: str) -> str:
    return module.removeprefix("hfpretrain.").partition(".")[0]


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def _module(path: Path) -> str:
    return ".".join(("hfpretrain", *path.relative_to(PACKAGE).with_suffix("").parts))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=_module)
def test_no_room_reaches_sideways_or_up(path: Path) -> None:
    room = _room(_module(path))
    ours = {_room(name) for name in _imports(path) if name.startswith("hfpretrain.")} - {room, "errors"}
    if room in MIDDLE:
        assert room != "training" or "preflight" not in ours, "preflight knows training, not the other way round"
        return
    assert not ours & MIDDLE, f"{room} imports {ours & MIDDLE}, which stand above it"
    assert ours <= ALLOWED.get(room, set()), f"{room} imports {ours}; allowed: {ALLOWED.get(room, set())}"


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_no_torch(module: str) -> None:
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    outside = {name.partition(".")[0] for name in _imports(path)} - {"hfpretrain"}
    assert not outside & {"torch", "transformers", "accelerate", "deepspeed", "datasets"}


def test_nothing_imports_a_recipe() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not {name for name in _imports(path) if name.startswith(("recipes", "tests", "benchmarks", "pretrain"))}
