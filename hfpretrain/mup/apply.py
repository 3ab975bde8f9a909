"""Put a muP spec on a model: its initial values, in place, once; and the proof that an optimizer has its groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from hfpretrain.errors import Problem, refuse
from hfpretrain.initialisation import gathered
from hfpretrain.model import true_shape
from hfpretrain.mup.rules import is_exact
from hfpretrain.mup.spec import MupSpec, Scaling

_APPLIED = "_mup_applied"  # on the instance: a configuration is copied, saved and loaded without its weights


def apply(model: PreTrainedModel, spec: MupSpec, *, zero_readout: bool = False) -> None:
    """Scale the freshly initialised `model` to its muP values and write `spec` into `model.config.mup`.

    Nothing else about the model changes: what is saved from it is a plain checkpoint. Called again with the same spec
    it does nothing. Under ZeRO-3 every rank must call it, before the model is wrapped.

    Args:
        zero_readout: start the head at zero, which takes away the logits' 1/sqrt(width) at the start (Yang et al. 2022,
            section D.2). Only for a head that is not tied: the embedding would be zero as well.

    Raises:
        ConfigError: weights that are not as the architecture initialises them (loaded, trained, or already scaled); a
            spec of another model; 1 + weight gains in half precision, which cannot hold 1/width - 1.
    """
    applied = model.__dict__.get(_APPLIED)
    if applied == (spec.fingerprint, zero_readout):
        return
    if applied is not None:
        what = "this model already has another muP applied; a second one would be multiplied on top"
        refuse([Problem(what, f"{applied} then, {(spec.fingerprint, zero_readout)} now", "model", "build it anew")])
    refuse(_unfit(model, spec, zero_readout))
    refuse(_unexpected_values(model, spec))
    for name, parameter in model.named_parameters():
        if zero_readout and name == spec.head:
            _write(name, parameter, torch.zeros_like)
        elif not is_exact(spec.of(name).multipliers.init):
            _write(name, parameter, partial(_scaled, spec.of(name)))
    model.__dict__[_APPLIED] = (spec.fingerprint, zero_readout)
    model.config.mup = spec.as_dict()


def is_applied(model: nn.Module, spec: MupSpec) -> bool:
    """Whether `apply` has put this spec on this instance."""
    applied = model.__dict__.get(_APPLIED)
    return applied is not None and applied[0] == spec.fingerprint


def verify_groups(optimizer: Optimizer, spec: MupSpec, *, lrs: Sequence[float] | None = None) -> list[Problem]:
    """What is wrong with the groups of an optimizer for this spec; right after every step of a schedule, too.

    Groups must carry `lr_multiplier` and `eps_multiplier`, as `training.optimizer.parameter_groups` makes them, and
    stand in these ratios, which must be ratios of the spec.

    Args:
        lrs: learning rate of each group as an engine reports it; by default what stands in the groups.
    """
    groups = optimizer.param_groups
    remedy = "build the optimizer from training.optimizer.parameter_groups(model, ..., mup=spec) and no other groups"
    if lost := [index for index, group in enumerate(groups) if "lr_multiplier" not in group]:
        what = "these parameter groups have no muP multipliers, so they learn at the same rate at every width"
        return [Problem(what, f"groups {lost} of {len(groups)}", "optimizer", remedy)]
    problems = []
    rates = [group["lr"] for group in groups] if lrs is None else list(lrs)
    for label, values, key in (
        ("learning rate", rates, "lr_multiplier"),
        ("eps", [g["eps"] for g in groups], "eps_multiplier"),
    ):
        bases = [value / group[key] for value, group in zip(values, groups, strict=True)]
        if not all(math.isclose(base, bases[0], rel_tol=1e-6, abs_tol=1e-30) for base in bases):
            what = f"the groups' {label} is not in muP's ratios: something has set it for all alike"
            given = ", ".join(f"{v:.6g} (x {g[key]:.6g})" for v, g in zip(values, groups, strict=True))
            problems.append(Problem(what, given, "optimizer", remedy))
    known = [(s.multipliers.lr, s.multipliers.eps) for s in spec.parameters.values()]
    for group in groups:
        pair = group["lr_multiplier"], group["eps_multiplier"]
        if not any(math.isclose(pair[0], lr) and math.isclose(pair[1], eps) for lr, eps in known):
            what = "a parameter group was made for another muP spec"
            given = f"multipliers {pair[0]:.6g} of the learning rate and {pair[1]:.6g} of eps, which no parameter has"
            problems.append(Problem(what, given, "optimizer", remedy))
    return problems


def _scaled(scaling: Scaling, values: torch.Tensor) -> torch.Tensor:
    """New initial values; of a 1 + weight gain, it is 1 + weight that is scaled."""
    factor = scaling.multipliers.init
    return (1 + values) * factor - 1 if scaling.one_plus else values * factor


def _write(name: str, parameter: nn.Parameter, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Set a whole parameter and read it back: writing to a partitioned one without gathering it would do nothing."""
    with torch.no_grad(), gathered(parameter, write=True):
        wanted = new(parameter.detach()).clone()
        parameter.copy_(wanted)
    with torch.no_grad(), gathered(parameter, write=False):
        if not torch.equal(parameter.detach(), wanted):
            raise RuntimeError(f"{name} did not take its muP values: it reads back other numbers than were written")


def _unfit(model: PreTrainedModel, spec: MupSpec, zero_readout: bool) -> list[Problem]:
    problems = []
    for name, parameter in model.named_parameters():
        try:
            scaling = spec.of(name)
        except KeyError as error:
            problems.append(Problem("the muP spec is of another model", str(error), "spec", "infer it from this one"))
            continue
        if true_shape(parameter) != scaling.shape:
            given = f"{name} {list(true_shape(parameter))}, spec {list(scaling.shape)}"
            problems.append(Problem("the muP spec is of another width", given, "spec", "infer it from this model"))
        if scaling.one_plus and not is_exact(scaling.multipliers.init) and parameter.dtype.itemsize < 4:
            what = f"{name} is a gain of 1 + weight: half precision holds 1/width - 1 to some percent only"
            remedy = "float32 weights" + (", or tie_word_embeddings: false" if scaling.role == "tied_gain" else "")
            if scaling.place == "writer":
                what, remedy = what.replace("1/width", "1/depth"), "float32 weights, or no base depth"
            problems.append(Problem(what, str(parameter.dtype), "model", remedy))
    if zero_readout and spec.tied:
        what = "the head is the embedding: a head of zeros is an embedding of zeros, which learns nothing"
        problems.append(Problem(what, "zero_readout=True", "muP", "leave it out, or tie_word_embeddings: false"))
    return problems


def _unexpected_values(model: PreTrainedModel, spec: MupSpec) -> list[Problem]:
    """One problem if random tensors have another size than the architecture gives them."""
    found = []
    for name, parameter in model.named_parameters():
        scaling = spec.of(name)
        if scaling.own_std is None:
            continue
        with torch.no_grad(), gathered(parameter, write=False):
            std = float(parameter.detach().float().std())
            count = parameter.numel()
        # Five standard errors of both measurements, and 3 % for layers that were measured together.
        allowed = 0.03 + 5 * (scaling.own_std_error + 1 / math.sqrt(2 * count))
        if abs(std / scaling.own_std - 1) > allowed:
            found.append(f"{name} has standard deviation {std:.4g}, expected {scaling.own_std:.4g}")
    if not found:
        return []
    what = "muP scales what the architecture's own initialisation gives, but these are not such weights"
    remedy = "apply muP once, to a model with fresh weights (build_model); loaded or trained weights are not muP's"
    return [Problem(what, "; ".join(found[:4]) + (f" and {len(found) - 4} more" if found[4:] else ""), "model", remedy)]
