"""Powers of the depth that an architecture has by itself, in its initial values and in what its branches add.

GPT-2 divides the initial size of its last projections by sqrt(2 * layers), MiniCPM3 multiplies its branches by
1/sqrt(layers). Two models of different depth are compared number by number: what a rule puts on top would count twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpretrain.errors import ConfigError, Problem
from hfpretrain.initialisation import initialise
from hfpretrain.model import name_template
from hfpretrain.mup.layers import WIDTH_ONLY, layer_count
from hfpretrain.mup.stream import Stream, watch_stream

EXPONENTS = (0.0, -0.5, -1.0)  # powers of the depth that an initialisation or a branch's factor may have
TOLERANCE = 1e-4  # relative error of a branch in float32 against what it should be; what is not linear misses by 1


def forward_power(
    own: PreTrainedModel,
    base: PreTrainedModel,
    layers: Sequence[nn.Module],
    tokens: torch.Tensor,
    reference: Stream,
    ratio: float,
) -> float:
    """The power of the depth by which branches are multiplied: the same weights and input, at the two depths."""
    theirs = dict(base.named_parameters())
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            if name in theirs and theirs[name].shape == parameter.shape:
                theirs[name].copy_(parameter)
    other = watch_stream(base, layers, tokens, sums=reference.sums)
    factors = []
    for mine, their in zip(reference.contributions, other.contributions, strict=False):
        size = float(their.value.norm())
        factor = float((mine.value * their.value).sum()) / size**2 if size else 1.0
        misses = float((mine.value - factor * their.value).norm()) > TOLERANCE * size
        if mine.layer != their.layer or misses or factor <= 0:
            what = f"layer {mine.layer} with the same weights and input adds something else at the base depth"
            remedy = "a base depth with the same layers at its start, or leave base_depth out: width only"
            given = f"{layer_count(own.config)} layers against {layer_count(base.config)}"
            raise ConfigError([Problem(what, given, "base depth", remedy)])
        factors.append(math.log(factor) / math.log(ratio))
    nearest = min(EXPONENTS, key=lambda f: abs(f - factors[0]))
    if max(abs(factor - nearest) for factor in factors) > 0.01:
        what = "the factor that the architecture puts on its branches follows no power of the depth that is known here"
        given = f"powers {min(factors):.3g} to {max(factors):.3g}"
        raise ConfigError([Problem(what, given, "the architecture", WIDTH_ONLY)])
    return nearest


def initial_powers(
    own: PreTrainedModel, base: PreTrainedModel, ratio: float, problems: list[Problem]
) -> dict[str, float]:
    """Name -> the power of the depth in its initial size.

    Initial weights follow from a seed and the module's name, so what is in both models is the same numbers, times that.
    """
    for model in (own, base):
        initialise(model, seed=1)
    theirs = dict(base.named_parameters())
    found: dict[str, set[float | None]] = defaultdict(set)
    kinds = dict.fromkeys(name_template(name) for name, _ in own.named_parameters())
    for name, parameter in own.named_parameters():
        if name in theirs and theirs[name].shape == parameter.shape:
            found[name_template(name)].add(_power(parameter.detach(), theirs[name].detach(), ratio))
    mine, other = _constants(own), _constants(base)
    for kind in (mine.keys() & other.keys()) - found.keys():  # in other layers, but always the same number
        found[kind].add(_power(mine[kind], other[kind], ratio))
    if missing := [kind for kind in kinds if kind not in found]:
        what = "layers of these kinds are not among those of the base depth, so what they do with it is unknown"
        remedy = "a base depth that has every kind of layer, or base_config with that depth and kinds"
        problems.append(Problem(what, ", ".join(missing[:6]), "base depth", remedy))
    for kind in kinds:
        if None in found[kind] or len(found[kind]) > 1:
            what = f"the initial values of {kind} follow no power of the depth that is known here"
            given = f"{layer_count(own.config)} layers against {layer_count(base.config)}"
            problems.append(Problem(what, given, "the architecture", WIDTH_ONLY))
    return {name: next(iter(found[name_template(name)]), None) or 0.0 for name, _ in own.named_parameters()}


def _constants(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Kind of parameter -> the one number that all its layers have everywhere; only kinds with such a number."""
    ends: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        ends[name_template(name)] += [parameter.detach().min(), parameter.detach().max()]
    return {kind: values[0] for kind, values in ends.items() if min(values) == max(values)}


def _power(deep: torch.Tensor, shallow: torch.Tensor, ratio: float) -> float | None:
    """The power a with deep = ratio ** a * shallow, number by number; None: none of ours."""
    for power in EXPONENTS:
        if torch.allclose(deep, shallow * ratio**power, rtol=1e-5, atol=1e-6 * float(deep.abs().max())):
            return power
    return None
