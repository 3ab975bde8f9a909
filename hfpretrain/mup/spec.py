"""The result of `infer`: every parameter's muP multipliers, as a value that can be printed, stored and compared."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hfpretrain.model import name_template
from hfpretrain.mup.rules import Multipliers, Place, Role, WeightDecayMode

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True)
class Scaling:
    """One parameter, or all layers' where they agree.

    Attributes:
        role: its row in `rules.RULES`.
        shape, base_shape: at the run's width and at the base width.
        fan_in_ratio: fan-in over the base model's; the width ratio where there is no fan-in.
        multipliers: on the model's own initialisation, learning rate, weight decay and Adam's epsilon.
        own_std: standard deviation of the model's own initialisation at this width, as measured on the base model;
            None where it is not random.
        own_std_error: relative standard error of that measurement.
        one_plus: the gain is 1 + weight.
        why: what decided the role.
        place: its row in `rules.DEPTH_RULES`; None where the depth is the base's.
    """

    role: Role
    shape: tuple[int, ...]
    base_shape: tuple[int, ...]
    fan_in_ratio: float
    multipliers: Multipliers
    own_std: float | None
    own_std_error: float
    one_plus: bool
    why: str
    place: Place | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Scaling:
        shapes = {key: tuple(values[key]) for key in ("shape", "base_shape")}
        return cls(**{**values, **shapes, "multipliers": Multipliers(**values["multipliers"])})


@dataclass(frozen=True)
class MupSpec:
    """muP of one architecture at one width.

    Attributes:
        width, base_width: of the residual stream.
        weight_decay_mode: see `rules.multipliers`.
        tied: the head's weight is the token embedding.
        head: name of the head's weight where it is not tied, else None.
        parameters: name -> scaling; a name with `*` in place of layer numbers stands for all of its layers.
        notes: what was decided or could not be known, one sentence each.
        depth, base_depth: number of layers; None where only the width is scaled.
    """

    width: int
    base_width: int
    weight_decay_mode: WeightDecayMode
    tied: bool
    head: str | None
    parameters: Mapping[str, Scaling]
    notes: tuple[str, ...] = ()
    depth: int | None = None
    base_depth: int | None = None

    def of(self, name: str) -> Scaling:
        """The scaling of a parameter by its name; wrappers' prefixes (`module.`, `_orig_mod.`, ...) do not matter.

        Raises:
            KeyError: the model has a parameter that the spec was not made for.
        """
        bare = _WRAPPERS.sub("", name)
        for key in (name, name_template(name), bare, name_template(bare)):
            if key in self.parameters:
                return self.parameters[key]
        raise KeyError(f"{name}: no such parameter in this muP spec of {len(self.parameters)} kinds; infer it anew")

    def multipliers(self, names: Iterable[str]) -> dict[str, Multipliers]:
        """Name -> multipliers, for an optimizer's groups."""
        return {name: self.of(name).multipliers for name in names}

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the training; measured sizes and notes are not part of it."""
        decisive = [
            [name, scaling.role, list(scaling.shape), asdict(scaling.multipliers), scaling.one_plus]
            for name, scaling in sorted(self.parameters.items())
        ]
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, as it stands in config.json under `mup`."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        parameters = {name: scaling.as_dict() for name, scaling in self.parameters.items()}
        whole = plain | {"parameters": parameters, "fingerprint": self.fingerprint}
        result: dict[str, Any] = json.loads(json.dumps(whole))
        return result

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MupSpec:
        plain = {key: value for key, value in values.items() if key != "fingerprint"}
        parameters = {name: Scaling.from_dict(scaling) for name, scaling in values["parameters"].items()}
        return cls(**{**plain, "parameters": parameters, "notes": tuple(values["notes"])})

    @classmethod
    def from_json(cls, text: str) -> MupSpec:
        return cls.from_dict(json.loads(text))

    def explain(self) -> str:
        """A table: parameter, role, shape at base and here, fan-in ratio, multipliers, why; then the notes.

        With another depth than the base's, also the parameter's place in its residual branch.
        """
        deep = self.base_depth is not None
        rows = [["parameter", "role", *["in branch"] * deep, "base shape", "shape"]]
        rows[0] += ["ratio", "init", "lr", "decay", "eps", "why"]
        for name, s in self.parameters.items():
            m = s.multipliers
            numbers = [f"{x:.4g}" for x in (s.fan_in_ratio, m.init, m.lr, m.weight_decay, m.eps)]
            place = [s.place or "outside"] * deep
            rows.append([name, s.role, *place, _sizes(s.base_shape), _sizes(s.shape), *numbers, s.why])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, [*widths, 0], strict=True)) for row in rows]
        depths = f", base depth {self.base_depth} to {self.depth}" if deep else ""
        head = f"muP from base width {self.base_width} to {self.width}{depths}, weight decay {self.weight_decay_mode}"
        return "\n".join([head, *lines, *(f"note: {note}" for note in self.notes)])


def by_template(scalings: Mapping[str, Scaling]) -> dict[str, Scaling]:
    """Layers that agree in everything under one starred name; the others under their own."""
    groups: dict[str, set[Scaling]] = {}
    for name, scaling in scalings.items():
        groups.setdefault(name_template(name), set()).add(scaling)
    return {
        (name_template(name) if len(groups[name_template(name)]) == 1 else name): scaling
        for name, scaling in scalings.items()
    }


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
