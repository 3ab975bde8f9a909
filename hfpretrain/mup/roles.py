"""The role of every parameter: which of its axes grow with the width, and which of those a forward pass sums over.

Never a matter of names, of the number of dimensions, or of `isinstance(nn.Linear)` alone: experts and routers are bare
tensors on many architectures, and a Linear from the width to a fixed number of outputs is no hidden layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D

from hfpretrain.errors import Problem
from hfpretrain.model import name_template
from hfpretrain.mup.rules import ROLES, Role
from hfpretrain.mup.uses import Uses

Shape = tuple[int, ...]
_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d  # weight [out, in / groups, ...]


@dataclass(frozen=True)
class Placed:
    """The role of one parameter.

    Attributes:
        role: its row in `rules.RULES`.
        fan_in: its axes that grow and are summed over; empty where there is no such fan-in.
        why: what decided, for people.
    """

    role: Role
    fan_in: tuple[int, ...]
    why: str


def place_all(
    model: nn.Module,
    shapes: Mapping[str, tuple[Shape, ...]],
    uses: Mapping[str, Uses],
    overrides: Mapping[str, Role],
) -> tuple[dict[str, Placed], list[Problem]]:
    """(name -> placed parameter, problems: those that cannot be placed and overrides that fit nothing).

    Args:
        model: the base model, for the types of modules.
        shapes: name -> its shape at each of several widths, the base width first.
        uses: what `watch_uses` saw; layers of one kind share what was seen of any of them.
        overrides: regular expression, matched against the whole name -> role; the first that matches wins.
    """
    by_template: dict[tuple[str, int], Uses] = {}
    for name, seen in uses.items():
        by_template.setdefault((name_template(name), len(shapes[name][0])), Uses()).merge(seen)
    placed: dict[str, Placed] = {}
    problems, usable = _read_overrides(shapes, overrides)
    unknown: dict[str, str] = {}
    for name, sizes in shapes.items():
        seen = by_template[name_template(name), len(sizes[0])]
        module = model.get_submodule(name.rpartition(".")[0])
        asked = next((role for pattern, role in usable.items() if pattern.fullmatch(name)), None)
        result = _as_asked(asked, sizes, seen) if asked is not None else _place(module, name, sizes, seen)
        if isinstance(result, Placed):
            placed[name] = result
        else:
            unknown.setdefault(name_template(name), f"{_listed(sizes)}: {result}")
    for template, reason in unknown.items():
        pattern = re.escape(template).replace(r"\*", r"\d+")
        remedy = f"say its role, one of {', '.join(ROLES)}: overrides={{r'{pattern}': ROLE}}"
        problems.append(Problem(f"the muP role of {template} is unclear", reason, "the architecture", remedy))
    return placed, problems


def infinite_axes(sizes: tuple[Shape, ...]) -> tuple[int, ...]:
    """Axes whose size differs between any two of the widths."""
    return tuple(axis for axis, along in enumerate(zip(*sizes, strict=True)) if len(set(along)) > 1)


def _place(module: nn.Module, name: str, sizes: tuple[Shape, ...], seen: Uses) -> Placed | str:
    """The role, or why there is none."""
    infinite = frozenset(infinite_axes(sizes))
    if not infinite:
        return Placed("fixed", (), "no dimension grows")
    if len(infinite) > 2:
        return "more than two of its dimensions grow"
    if seen.looked_up:  # tied to a head: its 1/width is the final gain's
        return Placed("input", (), "embedding and tied head" if seen.products else "embedding")
    if seen.products:
        readings = {_of_product(infinite & use.contracted, infinite - use.contracted) for use in seen.products}
        both = any(infinite & use.contracted & use.kept for use in seen.products)
        if len(readings) > 1 or both:
            return "it is contracted over different dimensions in different places"
        role, fan_in = readings.pop()
        return Placed(role, fan_in, "contracted over a dimension that grows" if fan_in else "its fan-in does not grow")
    if seen.touched and not seen.copied:
        return Placed("vector", (), "used coordinate by coordinate")
    return _by_type(module, name, sizes, infinite, "used through a copy" if seen.copied else "not used in a forward")


def _of_product(contracted: frozenset[int], kept: frozenset[int]) -> tuple[Role, tuple[int, ...]]:
    if not contracted:
        return "input", ()
    return ("hidden" if kept else "output"), tuple(sorted(contracted))


def _by_type(
    module: nn.Module, name: str, sizes: tuple[Shape, ...], infinite: frozenset[int], how: str
) -> Placed | str:
    """Where the forward pass does not show it: what the module's type says, or what holds either way round."""
    kind = type(module).__name__
    is_weight = name.rpartition(".")[2] == "weight"
    if isinstance(module, nn.Linear | Conv1D | _CONVOLUTIONS) and is_weight and getattr(module, "groups", 1) == 1:
        fan_in = infinite & {0 if isinstance(module, Conv1D) else 1}
        role, axes = _of_product(fan_in, infinite - fan_in)
        return Placed(role, axes, f"{how}; a {kind}")
    if isinstance(module, nn.Embedding):
        return Placed("input", (), f"{how}; an embedding")
    if len(sizes[0]) == 1 and (isinstance(module, nn.Linear | Conv1D | _CONVOLUTIONS) or "norm" in kind.lower()):
        return Placed("vector", (), f"{how}; of a {kind}")
    if len(infinite) == 2 and _ratios_agree(sizes, infinite):
        return Placed("hidden", (max(infinite),), f"{how}; two dimensions grow alike")
    return how


def _as_asked(role: Role, sizes: tuple[Shape, ...], seen: Uses) -> Placed | str:
    infinite = frozenset(infinite_axes(sizes))
    if role not in ("hidden", "output"):
        return Placed(role, (), "as asked")
    fan_ins = {tuple(sorted(infinite & use.contracted)) for use in seen.products} - {()}
    if len(fan_ins) == 1:
        return Placed(role, fan_ins.pop(), "as asked")
    if infinite and _ratios_agree(sizes, infinite):
        return Placed(role, (max(infinite),), "as asked")
    return f"asked to be {role}, but which dimension is its fan-in is unclear, and they grow differently"


def _ratios_agree(sizes: tuple[Shape, ...], axes: frozenset[int]) -> bool:
    base = sizes[0]
    return all(len({shape[axis] / base[axis] for axis in axes}) == 1 for shape in sizes)


def _read_overrides(
    shapes: Mapping[str, tuple[Shape, ...]], overrides: Mapping[str, Role]
) -> tuple[list[Problem], dict[re.Pattern[str], Role]]:
    """What is wrong with the overrides, and those with which nothing is."""
    problems, usable = [], {}
    for text, role in overrides.items():
        try:
            pattern = re.compile(text)
        except re.error as error:
            what = f"an override is no regular expression: {error}"
            problems.append(Problem(what, text, "muP overrides", "correct it; a literal ( is \\("))
            continue
        if role not in ROLES:
            what, remedy = "an override names no muP role", f"one of {', '.join(ROLES)}"
            problems.append(Problem(what, f"{text}: {role}", "muP overrides", remedy))
        elif not any(pattern.fullmatch(name) for name in shapes):
            names = ", ".join(sorted({name_template(name) for name in shapes})[:12])
            what, remedy = "an override matches no parameter", f"match a whole name, such as one of {names}"
            problems.append(Problem(what, f"{text}: {role}", "muP overrides", remedy))
        else:
            usable[pattern] = role
    return problems, usable


def _listed(sizes: tuple[Shape, ...]) -> str:
    return " against ".join(str(list(shape)) for shape in dict.fromkeys(sizes))
