"""From the activations of one kind of module at several widths to slopes, and whether they are flat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hfpretrain.model import name_template
from hfpretrain.mup.activations import Activation

FLAT = 0.15  # largest slope of log2 size against log2 width; the standard parametrisation has 0.5 to 2
# Largest slope of the change since the start, which has more noise: a rate wrong by a power 1/2 of the width shows 0.5.
FLAT_CHANGE = 0.3


@dataclass(frozen=True)
class Slope:
    """One kind of module over all widths and seeds.

    Attributes:
        kind: name of the module, layer numbers starred.
        grows: its output has a dimension that grows with the width (else it is only bounded above).
        sizes: width -> mean |x| after the last step, averaged over layers and seeds.
        at_start, size, change: slopes against log2 width of log2 mean |x| at the start and after the last step, and of
            log2 mean |x - x at the start|.
        of_scores: it is fed with one tensor in which nothing grows, or that a module made that is.
        fed_size, fed_change: the same slopes of that tensor; else 0.
        steepness: (of size, of change) how steep in a direction that counts: either, or where nothing grows, upwards.
            The scores of a low rank may shrink like the logits, by 1/sqrt(width) at the start (Yang et al. 2022,
            section D.2), and what is made of nothing but them shrinks as well: downwards, only a module's own part
            counts, fed_size - size and fed_change - change.
        errors: standard errors of size and of change, from how the seeds and widths scatter; 0 where one seed says
            nothing of them.
        measured: whether those are small enough to tell. Where a handful of random constants decides (the decay rates
            of a few heads, exp(-5 a) with a from 1 to 16), no affordable number of seeds gives a slope.
        flat: steepness is less than FLAT in size and FLAT_CHANGE in change, or not measured.
        roles: of the parameters in it.
    """

    kind: str
    grows: bool
    sizes: dict[int, float]
    at_start: float
    size: float
    change: float
    of_scores: bool
    fed_size: float
    fed_change: float
    steepness: tuple[float, float]
    errors: tuple[float, float]
    measured: bool
    flat: bool
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """Mean |x| of one kind of module in one run, averaged over its layers: what comes out and what goes in."""

    width: int
    shape: tuple[int, ...]
    start: float
    size: float
    change: float
    fed_shape: tuple[int, ...]  # () where nothing goes in, or several tensors
    fed_by: str  # the kind that made it
    fed_size: float
    fed_change: float


def sizes_of(start: Activation, end: Activation, width: int, factor: float) -> Sizes:
    def mean(x: Tensor) -> float:
        return float(x.abs().mean())

    fed = None if start.fed is None or end.fed is None or start.fed.shape != end.fed.shape else (start.fed, end.fed)
    return Sizes(
        width=width,
        shape=tuple(start.output.shape),
        start=mean(start.output) / factor,
        size=mean(end.output) / factor,
        change=mean(end.output - start.output) / factor,
        fed_shape=() if fed is None else tuple(fed[0].shape),
        fed_by=name_template(start.fed_by),
        fed_size=0.0 if fed is None else mean(fed[1]),
        fed_change=0.0 if fed is None else mean(fed[1] - fed[0]),
    )


def mean_sizes(layers: Sequence[Sizes]) -> Sizes:
    numbers = {
        name: sum(getattr(layer, name) for layer in layers) / len(layers)
        for name in ("start", "size", "change", "fed_size", "fed_change")
    }
    return replace(layers[0], **numbers)


def slope_of(kind: str, sizes: Sequence[Sizes], roles: tuple[str, ...], before: Mapping[str, Slope]) -> Slope:
    """The slopes of one kind of module, from all widths and seeds; `before`: of the kinds that ran before it."""

    def fit(name: str) -> tuple[float, float]:
        return _fit([(record.width, getattr(record, name)) for record in sizes])

    widths = sorted({record.width for record in sizes})
    narrow, wide = (next(r for r in sizes if r.width == width) for width in (widths[0], widths[-1]))
    grows = _grows(narrow.shape, wide.shape)
    maker = before.get(narrow.fed_by)
    of_scores = bool(narrow.fed_shape) and (
        narrow.fed_shape == wide.fed_shape or (maker is not None and maker.of_scores)
    )
    fed_size, fed_change = (fit("fed_size")[0], fit("fed_change")[0]) if of_scores else (0.0, 0.0)
    (size, size_error), (change, change_error) = fit("size"), fit("change")
    steepness = _steepness(size, fed_size, grows), _steepness(change, fed_change, grows)
    errors = (size_error, change_error) if len(sizes) > len(widths) else (0.0, 0.0)
    limits = (FLAT, FLAT_CHANGE)
    measured = all(
        error < limit or steep > limit + 2 * error
        for steep, error, limit in zip(steepness, errors, limits, strict=True)
    )
    return Slope(
        kind=kind,
        grows=grows,
        sizes={w: sum(r.size for r in sizes if r.width == w) * len(widths) / len(sizes) for w in widths},
        at_start=fit("start")[0],
        size=size,
        change=change,
        of_scores=of_scores,
        fed_size=fed_size,
        fed_change=fed_change,
        steepness=steepness,
        errors=errors,
        measured=measured,
        flat=not measured or all(steep < limit for steep, limit in zip(steepness, limits, strict=True)),
        roles=roles,
    )


def _steepness(slope: float, fed: float, grows: bool) -> float:
    return max(slope, min(fed, 0.0) - slope) if grows else slope


def _grows(narrow: tuple[int, ...], wide: tuple[int, ...]) -> bool:
    return narrow[-1:] != wide[-1:] or len(narrow) != len(wide)


def _fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Least-squares slope of log2 y against log2 x and its standard error; 0 where y is nothing but zeros."""
    usable = [(math.log2(x), math.log2(y)) for x, y in points if y > 0]
    if not usable:
        return 0.0, 0.0
    x_mean, y_mean = (sum(values) / len(usable) for values in zip(*usable, strict=True))
    spread = sum((x - x_mean) ** 2 for x, _ in usable)
    if not spread:
        return 0.0, 0.0
    slope = sum((x - x_mean) * y for x, y in usable) / spread
    misses = sum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in usable)
    return slope, math.sqrt(misses / (len(usable) - 2) / spread) if len(usable) > 2 else 0.0
