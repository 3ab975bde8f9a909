"""How a model depends on its depth, measured: which parameters write into the residual stream, what is 1/depth already.

CompleteP (see `rules`) multiplies every residual branch by 1 / (layers / base layers). Here the last linear map of the
branch takes that factor, so two things must hold and are measured on the model at hand, at the base width: the stream
is a plain sum of what enters the first layer and of branches (`stream`), and multiplying the parameters that were found
multiplies each branch's contribution by just that. What the architecture does about its depth by itself, in its initial
values (GPT-2 divides by sqrt(2 * layers)) or in its forward pass (MiniCPM3 multiplies branches by 1/sqrt(layers)), is
measured between the two depths and taken off.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.model import name_template
from hfpretrain.mup.depth_powers import TOLERANCE, forward_power, initial_powers
from hfpretrain.mup.flow import Factor
from hfpretrain.mup.layers import WIDTH_ONLY, layer_count
from hfpretrain.mup.probe import probe_tokens
from hfpretrain.mup.rules import PLACES, Place, at_depth
from hfpretrain.mup.spec import MupSpec, by_template
from hfpretrain.mup.stream import Stream, watch_stream

NOISE = 0.1  # put on gains and on what is zero, which could not be told from what is not there


@dataclass(frozen=True)
class DepthLaw:
    """What one parameter has to do with the depth.

    Attributes:
        place: its row in `rules.DEPTH_RULES`.
        init_exponent: power of the depth in its own initial size.
        forward_exponent: power of the depth by which the architecture multiplies the branch.
        one_plus: it writes as a gain of 1 + weight.
    """

    place: Place
    init_exponent: float
    forward_exponent: float
    one_plus: bool


def across_depth(
    spec: MupSpec, own: PreTrainedModel, base: PreTrainedModel, *, overrides: Mapping[str, Place]
) -> MupSpec:
    """`spec`, which is about the width, with the multipliers of the depth on top; arguments as of `depth_laws`."""
    laws, notes = depth_laws(own, base, overrides=overrides)
    depths = layer_count(own.config), layer_count(base.config)
    scalings = {}
    for name, law in laws.items():
        scaling = spec.of(name)
        both = at_depth(
            scaling.multipliers,
            law.place,
            depth_ratio=depths[0] / depths[1],
            own_init_exponent=law.init_exponent,
            forward_exponent=law.forward_exponent,
        )
        one_plus = scaling.one_plus or law.one_plus
        scalings[name] = replace(scaling, multipliers=both, place=law.place, one_plus=one_plus)
    return replace(
        spec,
        parameters=by_template(scalings),
        notes=tuple(dict.fromkeys([*spec.notes, *notes])),
        depth=depths[0],
        base_depth=depths[1],
    )


def depth_laws(
    own: PreTrainedModel, base: PreTrainedModel, *, overrides: Mapping[str, Place]
) -> tuple[dict[str, DepthLaw], list[str]]:
    """(name -> law for every parameter of `own`, notes).

    Args:
        own: a real model of the run's depth, at the base width. Its weights are changed, as are the next one's.
        base: one of the base depth, at the same width.
        overrides: regular expression over whole names -> place, for what cannot be placed.

    Raises:
        ConfigError: no list of layers of these lengths; a stream that is no sum of branches; a branch that is not
            linear in known parameters; parameters of several layers; initial values or branches that follow no known
            power of the depth.
    """
    depths = layer_count(own.config), layer_count(base.config)
    own_layers, base_layers = (list(modules) for modules in _layers(own, base, depths))
    ratio, tokens = depths[0] / depths[1], probe_tokens(own.config)
    problems: list[Problem] = []
    initial = initial_powers(own, base, ratio, problems)
    first = watch_stream(own, own_layers, tokens)
    refuse([*problems, *_stream_problems(first, depths[0])])
    places, ones = _places(own, own_layers, first, overrides, problems)
    refuse(problems)
    writers = {(name, name in ones) for name, place in places.items() if place == "writer"}
    with _with_noise(own):
        reference = watch_stream(own, own_layers, tokens)
        refuse(_nonlinear(own, own_layers, tokens, reference, writers))
        forward = forward_power(own, base, base_layers, tokens, reference, ratio)
    notes = [
        f"{kind} is initialised with a power {power:+g} of the depth by the architecture itself: not scaled twice"
        for kind, power in {name_template(name): power for name, power in initial.items() if power}.items()
    ]
    if forward:
        notes.append(f"the architecture multiplies its branches by a power {forward:+g} of the depth: not done twice")
    laws = {
        name: DepthLaw(place, initial[name], forward, one_plus=place == "writer" and name in ones)
        for name, place in places.items()
    }
    return laws, notes


def _layers(
    own: PreTrainedModel, base: PreTrainedModel, depths: tuple[int, int]
) -> tuple[nn.ModuleList, nn.ModuleList]:
    """The list that has as many modules as there are layers, in both; the largest, if there are several."""
    theirs = dict(base.named_modules())
    pairs = [
        (module, other)
        for name, module in own.named_modules()
        if isinstance(module, nn.ModuleList) and isinstance(other := theirs.get(name), nn.ModuleList)
        if (len(module), len(other)) == depths
    ]
    if not pairs:
        what = f"{type(own).__name__} has no list of as many modules as layers: its stream cannot be followed"
        raise ConfigError([Problem(what, f"{depths[0]} and {depths[1]} layers", "base depth", WIDTH_ONLY)])
    return max(pairs, key=lambda pair: sum(p.numel() for p in pair[0].parameters()))


def _stream_problems(stream: Stream, depth: int) -> list[Problem]:
    if stream.calls != list(range(depth)):
        what = "the layers do not run once each and in order, so what depth is here is unclear"
        return [Problem(what, f"order {stream.calls[:12]} of {depth} layers", "the architecture", WIDTH_ONLY)]
    if stream.broken:
        what = "the residual stream is not a plain sum of its branches, so they have no common factor to take"
        return [Problem(what, stream.broken, "the architecture", WIDTH_ONLY)]
    return []


def _places(
    model: PreTrainedModel,
    layers: list[nn.Module],
    stream: Stream,
    overrides: Mapping[str, Place],
    problems: list[Problem],
) -> tuple[dict[str, Place], set[str]]:
    """(name -> place, names of writers that are used as 1 + weight); adds to `problems` what is unclear."""
    writes, used = defaultdict[Factor, set[int]](set), defaultdict[str, set[int]](set)
    lost: dict[str, str] = {}
    for branch in stream.contributions:
        for factor in branch.flow.linear or ():
            writes[factor].add(branch.layer)
        for name in branch.flow.depends:
            used[name].add(branch.layer)
        if branch.flow.linear is None:
            last = max(branch.flow.depends, default="nothing", key=[n for n, _ in model.named_parameters()].index)
            lost[name_template(last)] = branch.flow.lost
    names = [name for name, _ in model.named_parameters()]
    asked = _asked(names, overrides, problems)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    seen: dict[str, Place] = {name: "writer" for name, _ in writes}
    seen = {name: "outside" if name in stream.start else "branch" for name in used} | seen | asked
    of_kind = {name_template(name): place for name, place in seen.items()}
    places: dict[str, Place] = {}
    for name, parameter in model.named_parameters():
        place = seen.get(name) or of_kind.get(name_template(name))
        several = {layer for (n, _), layers_of in writes.items() if n == name for layer in layers_of} | used[name]
        if place is None and id(parameter) in inside:
            problems.append(_unclear(name, "no branch of a probe used it"))
        elif place in ("writer", "branch") and len(several) > 1 and name not in asked:
            problems.append(_unclear(name, f"{len(several)} layers use it"))
        places[name] = place or "outside"
    if not any(place == "writer" for place in asked.values()):
        problems += [
            _unclear(kind, f"it ends in {operation}, in which nothing is linear: name the writers of such branches")
            for kind, operation in lost.items()
        ]
    return places, {name for name, one_plus in writes if one_plus}


def _asked(names: Sequence[str], overrides: Mapping[str, Place], problems: list[Problem]) -> dict[str, Place]:
    found: dict[str, Place] = {}
    for text, place in overrides.items():
        try:
            matching = [name for name in names if re.fullmatch(text, name)]
        except re.error as error:
            what = f"a depth override is no regular expression: {error}"
            problems.append(Problem(what, text, "muP depth overrides", "correct it; a literal ( is \\("))
            continue
        if place not in PLACES:
            what, remedy = "a depth override names no place", f"one of {', '.join(PLACES)}"
            problems.append(Problem(what, f"{text}: {place}", "muP depth overrides", remedy))
        elif not matching:
            what, remedy = "a depth override matches no parameter", f"match a whole name, such as {names[0]}"
            problems.append(Problem(what, f"{text}: {place}", "muP depth overrides", remedy))
        found = dict.fromkeys(matching, place) | found
    return found


def _unclear(name: str, reason: str) -> Problem:
    kind = name_template(name)
    pattern = re.escape(kind).replace(r"\*", r"\d+")
    remedy = f"say what it is, one of {', '.join(PLACES)}: depth_overrides={{r'{pattern}': PLACE}}; or no base_depth"
    return Problem(f"the place of {kind} in its residual branch is unclear", reason, "the architecture", remedy)


@contextmanager
def _with_noise(model: PreTrainedModel) -> Iterator[None]:
    """A bias of zero, or a gain of one, would pass for linear in anything; here they are neither."""
    generator = torch.Generator().manual_seed(3)
    changed = {p: p.detach().clone() for p in model.parameters() if p.ndim < 2 or not p.any()}
    try:
        with torch.no_grad():
            for parameter in changed:
                parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator))
        yield
    finally:
        with torch.no_grad():
            for parameter, values in changed.items():
                parameter.copy_(values)


def _nonlinear(
    model: PreTrainedModel, layers: list[nn.Module], tokens: torch.Tensor, once: Stream, writers: set[Factor]
) -> list[Problem]:
    """Problems if doubling the writers does not double every contribution, the stream being held where it was."""
    parameters = dict(model.named_parameters())
    saved = {name: parameters[name].detach().clone() for name, _ in writers}
    try:
        with torch.no_grad():
            for name, one_plus in writers:
                parameters[name].mul_(2).add_(1.0 if one_plus else 0.0)
        twice = watch_stream(model, layers, tokens, sums=once.sums)
    finally:
        with torch.no_grad():
            for name, values in saved.items():
                parameters[name].copy_(values)
    wrong = {
        after.layer
        for before, after in zip(once.contributions, twice.contributions, strict=True)
        if not float((after.value - 2 * before.value).norm()) <= TOLERANCE * float(after.value.norm())
    }
    if not wrong:
        return []
    what = "doubling what writes into the residual stream does not double what the branches add"
    names = ", ".join(sorted({name_template(name) for name, _ in writers}))
    remedy = "name what is missing or too much: depth_overrides; or no base_depth"
    return [Problem(what, f"layers {sorted(wrong)[:12]} with {names}", "the architecture", remedy)]
