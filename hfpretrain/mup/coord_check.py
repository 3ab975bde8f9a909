"""Coordinate check (Yang et al. 2022, appendix D.1): do activations keep their size when the width grows?

A few widths of one architecture take the same few Adam steps on the same tokens. Under muP the size of a coordinate of
every hidden activation, and of what training has changed about it, does not depend on the width; what has no dimension
that grows (logits, router scores) must not grow. It shows the scaling at these widths and steps, not that the best
learning rate transfers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfpretrain.model import name_template
from hfpretrain.mup.apply import apply
from hfpretrain.mup.infer import infer
from hfpretrain.mup.probe import probe_model, probe_tokens
from hfpretrain.mup.spec import MupSpec
from hfpretrain.mup.width import hidden_size, scale_width

FLAT = 0.15  # largest slope of log2 size against log2 width; the standard parametrisation has 0.5 to 2
# Largest slope of the change since the start, which has more noise: a rate wrong by a power 1/2 of the width shows 0.5.
FLAT_CHANGE = 0.3
ROWS, TOKENS = 4, 32
EPS = 1e-12  # at tiny gradients the default of 1e-8 would be part of what is measured


@dataclass(frozen=True)
class Slope:
    """One kind of module over all widths and seeds.

    Attributes:
        kind: name of the module, layer numbers starred.
        grows: its output has a dimension that grows with the width (else it is only bounded above).
        sizes: width -> mean |x| after the last step, averaged over layers and seeds.
        at_start, size, change: slopes against log2 width of log2 mean |x| at the start and after the last step, and of
            log2 mean |x - x at the start|.
        flat: |size| < FLAT and |change| < FLAT_CHANGE; where nothing grows, the same without the absolute value.
        roles: of the parameters in it.
    """

    kind: str
    grows: bool
    sizes: dict[int, float]
    at_start: float
    size: float
    change: float
    flat: bool
    roles: tuple[str, ...]


@dataclass(frozen=True)
class CoordCheck:
    """The result: `slopes` in the order of the forward pass; `fault` names the steepest that is not flat, or is ""."""

    widths: tuple[int, ...]
    steps: int
    seeds: int
    lr: float
    standard: bool
    slopes: tuple[Slope, ...]
    fault: str

    @property
    def verdict(self) -> str:
        return "not flat" if self.fault else "flat"

    def as_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, **asdict(self)}

    def __str__(self) -> str:
        rows = [("activation", "at start", "size", "change", "", "roles")]
        for s in self.slopes:
            mark = ("flat" if s.grows else "bounded") if s.flat else "NOT FLAT"
            rows.append((s.kind, f"{s.at_start:+.2f}", f"{s.size:+.2f}", f"{s.change:+.2f}", mark, " ".join(s.roles)))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join(f"{row[i]:{'<' if i in (0, 4) else '>'}{widths[i]}}" for i in range(5)) for row in rows]
        table = "\n".join(f"{line}  {row[5]}" for line, row in zip(lines, rows, strict=True))
        return f"{table}\n{self.verdict}" + (f": {self.fault}" if self.fault else "")


def coord_check(
    config: PreTrainedConfig,
    *,
    widths: Sequence[int],
    steps: int = 4,
    seeds: int = 1,
    lr: float = 1e-3,
    standard: bool = False,
    overrides: dict[str, Any] | None = None,
) -> CoordCheck:
    """Train `config` at each of `widths` and measure activations.

    Args:
        widths: hidden sizes; the smallest is the base, where muP and the standard parametrisation are the same.
        standard: the standard parametrisation, one learning rate for all: it should fail.
        overrides: see `infer`.

    Raises:
        ConfigError: a width that this architecture cannot have, or what `infer` refuses.
    """
    own = hidden_size(config)
    base = scale_width(config, Fraction(min(widths), own))
    records: dict[str, list[_Sizes]] = defaultdict(list)
    spec: MupSpec | None = None
    for width in sorted(widths):
        scaled = scale_width(config, Fraction(width, own))
        spec = infer(scaled, base_config=base, overrides=overrides)
        for seed in range(seeds):
            model = probe_model(scaled, seed=seed)
            if not standard:
                apply(model, spec)
            tokens = probe_tokens(scaled, rows=ROWS, tokens=TOKENS, seed=seed)
            groups = _groups(model, None if standard else spec, lr)
            carried = {} if standard else _readout_factors(model, spec)
            for kind, sizes in _train(model, groups, tokens, steps, width, lr).items():
                records[kind].append(sizes.divided_by(carried.get(kind, 1.0)))
    assert spec is not None
    slopes = tuple(_slope(kind, sizes, spec) for kind, sizes in records.items() if len(sizes) == len(widths) * seeds)
    bad = [slope for slope in slopes if not slope.flat]
    worst = max(bad, key=lambda s: max(abs(s.size), abs(s.change))) if bad else None
    fault = (
        ""
        if worst is None
        else (
            f"{worst.kind} (roles: {', '.join(worst.roles) or 'none of its own'}), "
            f"slope {worst.size:+.2f} in size and {worst.change:+.2f} in change"
        )
    )
    return CoordCheck(tuple(sorted(widths)), steps, seeds, lr, standard, slopes, fault)


@dataclass(frozen=True)
class _Sizes:
    """Mean |x| of one kind of module in one run, averaged over its layers."""

    width: int
    shape: tuple[int, ...]
    start: float
    size: float
    change: float

    def divided_by(self, factor: float) -> _Sizes:
        return replace(self, start=self.start / factor, size=self.size / factor, change=self.change / factor)


def _readout_factors(model: PreTrainedModel, spec: MupSpec) -> dict[str, float]:
    """Final norm that holds the readout's 1/width -> that factor, which is not for it to answer for."""
    scalings = {name: spec.of(name) for name, _ in model.named_parameters()}
    return {
        name_template(name.rpartition(".")[0]): scaling.multipliers.init
        for name, scaling in scalings.items()
        if scaling.role == "tied_gain"
    }


def _groups(model: PreTrainedModel, spec: MupSpec | None, lr: float) -> list[dict[str, Any]]:
    """One group per parameter, without weight decay."""
    groups = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate, eps = (1.0, 1.0) if spec is None else (spec.of(name).multipliers.lr, spec.of(name).multipliers.eps)
            groups.append({"params": [parameter], "lr": lr * rate, "eps": EPS * eps})
    return groups


def _train(
    model: PreTrainedModel, groups: list[dict[str, Any]], tokens: Tensor, steps: int, width: int, lr: float
) -> dict[str, _Sizes]:
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=0.0)
    before = _activations(model, tokens)
    for _ in range(steps):
        logits = model(input_ids=tokens).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = _activations(model, tokens)
    rows: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for name, start in before.items():
        if name in after and after[name].shape == start.shape:  # an expert may get other tokens than before
            rows[name_template(name)].append((start, after[name]))
    return {kind: _sizes(pairs, width) for kind, pairs in rows.items()}


def _sizes(pairs: list[tuple[Tensor, Tensor]], width: int) -> _Sizes:
    def mean(values: Callable[[Tensor, Tensor], Tensor]) -> float:
        return sum(float(values(*pair).abs().mean()) for pair in pairs) / len(pairs)

    return _Sizes(
        width=width,
        shape=tuple(pairs[0][0].shape),
        start=mean(lambda x, _: x),
        size=mean(lambda _, y: y),
        change=mean(lambda x, y: y - x),
    )


def _activations(model: PreTrainedModel, tokens: Tensor) -> dict[str, Tensor]:
    """Module name -> the first floating-point tensor of its output, in the order of the forward pass."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple | list) else [output]
            floats = [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]
            if floats:
                found[name] = floats[0].detach().float().clone()

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            model(input_ids=tokens)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _slope(kind: str, sizes: list[_Sizes], spec: MupSpec) -> Slope:
    widths = sorted({record.width for record in sizes})
    narrow, wide = (next(r.shape for r in sizes if r.width == width) for width in (widths[0], widths[-1]))
    grows = narrow[-1:] != wide[-1:] or len(narrow) != len(wide)
    start, size, change = (
        _fit([(r.width, value) for r, value in zip(sizes, values, strict=True)])
        for values in ([r.start for r in sizes], [r.size for r in sizes], [r.change for r in sizes])
    )
    return Slope(
        kind=kind,
        grows=grows,
        sizes={w: sum(r.size for r in sizes if r.width == w) * len(widths) / len(sizes) for w in widths},
        at_start=start,
        size=size,
        change=change,
        flat=size < FLAT and change < FLAT_CHANGE and (not grows or (size > -FLAT and change > -FLAT_CHANGE)),
        roles=tuple(
            sorted({s.role for name, s in spec.parameters.items() if name_template(name).startswith(f"{kind}.")})
        ),
    )


def _fit(points: list[tuple[int, float]]) -> float:
    """Least-squares slope of log2 y against log2 x; 0 where y is nothing but zeros."""
    usable = [(math.log2(x), math.log2(y)) for x, y in points if y > 0]
    if not usable:
        return 0.0
    middle = sum(x for x, _ in usable) / len(usable)
    spread = sum((x - middle) ** 2 for x, _ in usable)
    return sum((x - middle) * y for x, y in usable) / spread if spread else 0.0
