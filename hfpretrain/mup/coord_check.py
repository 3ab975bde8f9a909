"""Coordinate check (Yang et al. 2022, appendix D.1): do activations keep their size when the width grows?

A few widths of one architecture take the same few Adam steps on the same tokens. Under muP the size of a coordinate of
every hidden activation, and of what training has changed about it, does not depend on the width; what has no dimension
that grows (logits, router scores) must not grow. It shows the scaling at these widths and steps, not that the best
learning rate transfers.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfpretrain.model import name_template
from hfpretrain.mup.activations import Activation, activations
from hfpretrain.mup.apply import apply
from hfpretrain.mup.infer import Study, infer_from, study
from hfpretrain.mup.measure import doubled, is_twice
from hfpretrain.mup.probe import probe_model, probe_tokens
from hfpretrain.mup.spec import MupSpec
from hfpretrain.mup.width import hidden_size, scale_width

FLAT = 0.15  # largest slope of log2 size against log2 width; the standard parametrisation has 0.5 to 2
# Largest slope of the change since the start, which has more noise: a rate wrong by a power 1/2 of the width shows 0.5.
FLAT_CHANGE = 0.3
# A few steps of it are a tenth of weights drawn with 0.02. At larger ones the smallest width leaves its first, linear
# phase, which the widest does not, and slopes of a limit that is not reached yet are measured.
LEARNING_RATE = 5e-4
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
        fed_size, fed_change: the same slopes of what goes in, where that has no dimension that grows; else 0.
        steepness: (of size, of change) how steep in a direction that counts: either, or where nothing grows, upwards.
            The scores of a low rank may shrink like the logits, by 1/sqrt(width) at the start (Yang et al. 2022,
            section D.2), and what is made of nothing but them shrinks as well: downwards, only a module's own part
            counts, fed_size - size and fed_change - change.
        flat: steepness is less than FLAT in size and FLAT_CHANGE in change.
        roles: of the parameters in it.
    """

    kind: str
    grows: bool
    sizes: dict[int, float]
    at_start: float
    size: float
    change: float
    fed_size: float
    fed_change: float
    steepness: tuple[float, float]
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
    tied: bool
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
    lr: float = LEARNING_RATE,
    standard: bool = False,
    overrides: dict[str, Any] | None = None,
    seen: Study | None = None,
) -> CoordCheck:
    """Train `config` at each of `widths` and measure activations.

    Args:
        widths: hidden sizes; the smallest is the base, where muP and the standard parametrisation are the same.
        standard: the standard parametrisation, one learning rate for all: it should fail.
        overrides: see `infer`.
        seen: of the model at the smallest width, where it has been studied already.

    Raises:
        ConfigError: a width that this architecture cannot have, or what `infer` refuses.
    """
    own = hidden_size(config)
    seen = study(scale_width(config, Fraction(min(widths), own))) if seen is None else seen
    records: dict[str, list[_Sizes]] = defaultdict(list)
    spec: MupSpec | None = None
    for width in sorted(widths):
        scaled = scale_width(config, Fraction(width, own))
        spec = infer_from(seen, scaled, overrides=overrides)
        for seed in range(seeds):
            model = probe_model(scaled, seed=seed)
            if not standard:
                apply(model, cast(MupSpec, spec))
            tokens = probe_tokens(scaled, rows=ROWS, tokens=TOKENS, seed=seed)
            for kind, sizes in _train(model, None if standard else spec, tokens, steps, width, lr).items():
                records[kind].append(sizes)
    assert spec is not None
    slopes = tuple(_slope(kind, sizes, spec) for kind, sizes in records.items() if len(sizes) == len(widths) * seeds)
    return CoordCheck(tuple(sorted(widths)), steps, seeds, lr, standard, spec.tied, slopes, _fault(slopes))


def _fault(slopes: Sequence[Slope]) -> str:
    bad = [slope for slope in slopes if not slope.flat]
    if not bad:
        return ""
    worst = max(bad, key=lambda s: max(s.steepness))
    roles = ", ".join(worst.roles) or "none of its own"
    return f"{worst.kind} (roles: {roles}), slope {worst.size:+.2f} in size and {worst.change:+.2f} in change"


@dataclass(frozen=True)
class _Sizes:
    """Mean |x| of one kind of module in one run, averaged over its layers: what comes out and what goes in."""

    width: int
    shape: tuple[int, ...]
    start: float
    size: float
    change: float
    fed_shape: tuple[int, ...]  # () where nothing goes in, or several tensors
    fed_size: float
    fed_change: float


def _factors(
    model: PreTrainedModel, spec: MupSpec, tokens: Tensor, before: Mapping[str, Activation]
) -> dict[str, float]:
    """Module name -> a factor that muP puts into its output for what follows to take out: not for it to answer for.

    The gain before a tied head holds the readout's 1/width; whatever doubles with it, up to the head, has it too. And
    an embedding that is multiplied by a power of the width further on is smaller by that power.
    """
    factors: dict[str, float] = {}
    scalings = {name: spec.of(name) for name, _ in model.named_parameters()}
    if gains := [name for name, scaling in scalings.items() if scaling.role == "tied_gain"]:
        with doubled(model, gains, next((name for name in gains if scalings[name].one_plus), None)):
            twice = activations(model, tokens)
        head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
        up_to_head = itertools.takewhile(lambda name: name != head, before)
        factor = scalings[gains[0]].multipliers.init
        factors |= {name: factor for name in up_to_head if is_twice(twice[name].output, before[name].output)}
    embedding = model.get_input_embeddings()
    name = next((name for name, module in model.named_modules() if module is embedding), "")
    weight = cast(nn.Embedding, embedding).weight
    if name in before and torch.equal(before[name].output, weight.detach()[tokens]):  # not multiplied by itself
        factor = scalings[next(n for n, p in model.named_parameters() if p is weight)].multipliers.lr
        factors |= {n: factor for n, seen in before.items() if torch.equal(seen.output, before[name].output)}
    return factors


def _groups(model: PreTrainedModel, spec: MupSpec | None, lr: float) -> list[dict[str, Any]]:
    """One group per parameter, without weight decay."""
    groups = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate, eps = (1.0, 1.0) if spec is None else (spec.of(name).multipliers.lr, spec.of(name).multipliers.eps)
            groups.append({"params": [parameter], "lr": lr * rate, "eps": EPS * eps})
    return groups


def _train(
    model: PreTrainedModel, spec: MupSpec | None, tokens: Tensor, steps: int, width: int, lr: float
) -> dict[str, _Sizes]:
    optimizer = torch.optim.AdamW(_groups(model, spec, lr), lr=lr, weight_decay=0.0)
    before = activations(model, tokens)
    factors = {} if spec is None else _factors(model, spec, tokens, before)
    for _ in range(steps):
        logits = model(input_ids=tokens).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = activations(model, tokens)
    kinds: dict[str, list[_Sizes]] = defaultdict(list)
    for name, start in before.items():
        if name in after and after[name].output.shape == start.output.shape:  # an expert may get other tokens now
            kinds[name_template(name)].append(_sizes(start, after[name], width, factors.get(name, 1.0)))
    return {kind: _mean(layers) for kind, layers in kinds.items()}


def _sizes(start: Activation, end: Activation, width: int, factor: float) -> _Sizes:
    def mean(x: Tensor) -> float:
        return float(x.abs().mean())

    fed = None if start.fed is None or end.fed is None or start.fed.shape != end.fed.shape else (start.fed, end.fed)
    return _Sizes(
        width=width,
        shape=tuple(start.output.shape),
        start=mean(start.output) / factor,
        size=mean(end.output) / factor,
        change=mean(end.output - start.output) / factor,
        fed_shape=() if fed is None else tuple(fed[0].shape),
        fed_size=0.0 if fed is None else mean(fed[1]),
        fed_change=0.0 if fed is None else mean(fed[1] - fed[0]),
    )


def _mean(layers: Sequence[_Sizes]) -> _Sizes:
    numbers = {
        name: sum(getattr(layer, name) for layer in layers) / len(layers)
        for name in ("start", "size", "change", "fed_size", "fed_change")
    }
    return replace(layers[0], **numbers)


def _slope(kind: str, sizes: list[_Sizes], spec: MupSpec) -> Slope:
    def fit(name: str) -> float:
        return _fit([(record.width, getattr(record, name)) for record in sizes])

    widths = sorted({record.width for record in sizes})
    narrow, wide = (next(r for r in sizes if r.width == width) for width in (widths[0], widths[-1]))
    grows = _grows(narrow.shape, wide.shape)
    is_fed_scores = bool(narrow.fed_shape) and not _grows(narrow.fed_shape, wide.fed_shape)
    fed_size, fed_change = (fit("fed_size"), fit("fed_change")) if is_fed_scores else (0.0, 0.0)
    size, change = fit("size"), fit("change")
    steepness = _steepness(size, fed_size, grows), _steepness(change, fed_change, grows)
    return Slope(
        kind=kind,
        grows=grows,
        sizes={w: sum(r.size for r in sizes if r.width == w) * len(widths) / len(sizes) for w in widths},
        at_start=fit("start"),
        size=size,
        change=change,
        fed_size=fed_size,
        fed_change=fed_change,
        steepness=steepness,
        flat=steepness[0] < FLAT and steepness[1] < FLAT_CHANGE,
        roles=tuple(
            sorted({s.role for name, s in spec.parameters.items() if name_template(name).startswith(f"{kind}.")})
        ),
    )


def _steepness(slope: float, fed: float, grows: bool) -> float:
    return max(slope, min(fed, 0.0) - slope) if grows else slope


def _grows(narrow: tuple[int, ...], wide: tuple[int, ...]) -> bool:
    return narrow[-1:] != wide[-1:] or len(narrow) != len(wide)


def _fit(points: list[tuple[int, float]]) -> float:
    """Least-squares slope of log2 y against log2 x; 0 where y is nothing but zeros."""
    usable = [(math.log2(x), math.log2(y)) for x, y in points if y > 0]
    if not usable:
        return 0.0
    middle = sum(x for x, _ in usable) / len(usable)
    spread = sum((x - middle) ** 2 for x, _ in usable)
    return sum((x - middle) * y for x, y in usable) / spread if spread else 0.0
