"""A model without most of its repeated layers, and what to add for those: a pass over 80 equal layers measures one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_WORTH_IT = 3  # layers less


@dataclass(frozen=True)
class Shallow:
    """What was taken out of a model's list of layers.

    Attributes:
        path: name of the list in the model.
        kept: place of each remaining layer in the whole model.
        stand_in: place of a removed layer -> place of one that remains and is like it.
        values: place of a removed layer -> values of its trained parameters.
    """

    path: str
    kept: tuple[int, ...]
    stand_in: Mapping[int, int]
    values: Mapping[int, int]

    def place(self, parameter_name: str) -> float:
        """Where in the whole model the layer of a parameter is; infinity for one that is in none."""
        rest = parameter_name.removeprefix(f"{self.path}.")
        inside = rest != parameter_name and rest.partition(".")[0].isdigit()
        return self.kept[int(rest.partition(".")[0])] if inside else math.inf

    def layers(self, measured: Mapping[str, int]) -> dict[str, int]:
        """Bytes by layer of the shallow model -> of the whole one."""
        own = {f"{self.path}.{new}": f"{self.path}.{old}" for new, old in enumerate(self.kept)}
        whole = {own.get(name, name): size for name, size in measured.items()}
        for removed, like in self.stand_in.items():
            whole[f"{self.path}.{removed}"] = whole.get(f"{self.path}.{like}", 0)
        return whole


def shorten(model: nn.Module, config: Any) -> Shallow | None:
    """Take layers out of `model` and its `config` that are like others; None where nothing is worth it, or not sure.

    Of each kind (type, shapes, what the config says of the place) the first two and the last stay: in between all that
    is measured of a pass grows evenly. Not sure is a model with several long lists, or with weights that layers share.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [(n, m) for n, m in lists if not any(n.startswith(f"{other}.") for other, _ in lists)]
    long = [(name, module) for name, module in outer if len(module) > _WORTH_IT]
    if len(long) != 1:
        return None
    ((path, layers),) = long
    owners: dict[int, set[int]] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    if any(len(indices) > 1 for indices in owners.values()):
        return None
    by_kind: dict[Any, list[int]] = {}
    for index, layer in enumerate(layers):
        by_kind.setdefault(_kind(layer, index, len(layers), config), []).append(index)
    kept = sorted({index for places in by_kind.values() for index in (*places[:2], places[-1])})
    if len(layers) - len(kept) < _WORTH_IT:
        return None
    stand_in = {index: places[1] for places in by_kind.values() for index in places[2:-1]}
    values = {i: sum(p.numel() for p in layers[i].parameters() if p.requires_grad) for i in stand_in}
    _cut(model, path, layers, kept, config)
    return Shallow(path, tuple(kept), stand_in, values)


def _kind(layer: nn.Module, index: int, depth: int, config: Any) -> Any:
    shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
    types = tuple(type(module).__name__ for module in layer.modules())
    said = tuple(str(value[index]) for _, value in _lists_of(config, depth))
    return shapes, types, said


def _lists_of(config: Any, depth: int) -> list[tuple[str, list[Any]]]:
    """Settings with an entry for each layer."""
    return [(k, v) for k, v in sorted(vars(config).items()) if isinstance(v, list) and len(v) == depth]


def _cut(model: nn.Module, path: str, layers: nn.ModuleList, kept: list[int], config: Any) -> None:
    depth = len(layers)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.ModuleList([layers[index] for index in kept]))
    for new, old in enumerate(kept):
        for module in layers[old].modules():
            if getattr(module, "layer_idx", None) == old:
                module.layer_idx = new  # type: ignore[assignment]
    for key, value in _lists_of(config, depth):
        setattr(config, key, [value[index] for index in kept])
    for key in ("num_hidden_layers",):
        if getattr(config, key, None) == depth:
            setattr(config, key, len(kept))
