"""Which parameters decay, and the optimizer over them.

Weight decay is for weights that are multiplied with activations. Which those are is decided from the type of the module
that holds a parameter and from its true shape (under ZeRO-3 `shape` reads (0,)), never from a name:

- `matrices`, decayed: weights of linear layers (GPT-2's Conv1D too, an untied output head too) and dense convolutions;
- `embeddings`: weights of nn.Embedding, learned positions included, and whatever is tied to one;
- `vectors`: biases, norm gains, and all else with fewer than two dimensions larger than 1;
- `state`: depthwise convolutions, and parameters that mark themselves with `_no_weight_decay`.

A bare parameter with two or more dimensions, held by a module of no known type, may be a stack of expert matrices, a
router, or Mamba's A_log. These are told apart by how the architecture initialises them: a matrix is drawn at random, a
state or a bias is a constant or a fixed pattern. That is a rule of thumb, so `describe_groups` lists each of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.pytorch_utils import Conv1D

from hfpretrain.errors import ConfigError, Problem
from hfpretrain.initialisation import drawn_parameters
from hfpretrain.model import true_shape

GROUPS = ("matrices", "embeddings", "vectors", "state")  # the first is the one whose learning rate is logged
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: dicts of `params`, `weight_decay` and `name` (one of `GROUPS`), empty ones left out.

    Every trainable parameter is in exactly one group; tied parameters count once. Only `matrices` decay.
    """
    roles, _ = parameter_roles(model)
    parameters = dict(model.named_parameters())
    groups = []
    for group in GROUPS:
        members = [parameters[name] for name, role in roles.items() if role == group and parameters[name].requires_grad]
        if members:  # an empty group is deleted by DeepSpeed but not by the scheduler, which then fails
            decay = weight_decay if group == "matrices" else 0.0
            groups.append({"params": members, "weight_decay": decay, "name": group})
    return groups


def parameter_roles(model: nn.Module) -> tuple[dict[str, str], set[str]]:
    """(name -> group for every parameter, names of those decided by their initialisation)."""
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    roles: dict[str, str] = {}
    undecided: list[str] = []
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        role = "embeddings" if id(parameter) in embedded else _role(module, parameter)
        roles[name] = role or ""
        if role is None:
            undecided.append(name)
    if undecided:
        # A plain nn.Module has no _init_weights to watch; a bare matrix is then the likelier case.
        drawn = drawn_parameters(model) if isinstance(model, PreTrainedModel) else set(undecided)
        roles.update({name: "matrices" if name in drawn else "state" for name in undecided})
    return roles, set(undecided)


def describe_groups(groups: Sequence[dict[str, Any]], model: nn.Module) -> str:
    """A table (group, tensors, parameters, weight decay, examples), and below it every decision by rule of thumb."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rows = [("group", "tensors", "parameters", "weight decay", "for example")]
    for group in groups:
        sizes = sum(int(torch.Size(true_shape(parameter)).numel()) for parameter in group["params"])
        templates = Counter(_template(names.get(id(parameter), "?")) for parameter in group["params"])
        examples = ", ".join(name for name, _ in templates.most_common(3))
        rows.append((group["name"], str(len(group["params"])), f"{sizes:,}", f"{group['weight_decay']:g}", examples))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]}"
        for row in rows
    ]
    roles, by_initialisation = parameter_roles(model)
    shapes = {name: true_shape(parameter) for name, parameter in model.named_parameters()}
    doubtful = sorted({(_template(name), shapes[name], roles[name]) for name in by_initialisation})
    if doubtful:
        lines.append("decided by how they are initialised (random: matrices; constant or a pattern: state):")
        lines += [f"  {name} {list(shape)} -> {role}" for name, shape, role in doubtful]
    return "\n".join(lines)


def build_optimizer(
    model: nn.Module, args: TrainingArguments, groups: Sequence[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The optimizer that `--optim` names (any that takes parameter groups), with the peak learning rate as its default.

    Raises ConfigError for optimizers that choose their own parameters (Muon and Dion factories, LOMO, GaLore, APOLLO):
    the groups, and with them the weight decay of this run, would be dropped.
    """
    hf_model: Any = model
    optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, hf_model)
    is_class = isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    if not is_class or {"params", "model", "optimizer_dict"} & kwargs.keys():
        what = "this optimizer chooses its parameters by itself, so the weight-decay groups would be dropped"
        remedy = "an optimizer over parameter groups: adamw_torch_fused, adafactor, lion_32bit, sgd, ..."
        raise ConfigError([Problem(what, str(getattr(args.optim, "value", args.optim)), "optim", remedy)])
    optimizer = optimizer_class(list(groups), **kwargs)
    if optimizer_class.__module__.startswith("bitsandbytes") and kwargs.get("optim_bits") == 8:
        _keep_embeddings_in_32_bits(model)
    return optimizer


def _role(module: nn.Module, parameter: nn.Parameter) -> str | None:
    """The group of a parameter that is not an embedding; None where the module's type does not say."""
    shape = true_shape(parameter)
    if getattr(parameter, "_no_weight_decay", False):
        return "state"
    if len(shape) < 2:
        return "vectors"
    if isinstance(module, (nn.Linear, Conv1D)):
        return "matrices"
    if isinstance(module, _ConvNd):
        return "state" if module.groups == module.in_channels else "matrices"
    # transformers finds its own norms by class name too; some gains have one row per head, hence two dimensions.
    if isinstance(module, _NORMS) or "norm" in type(module).__name__.lower():
        return "vectors"
    if sum(size > 1 for size in shape) < 2:
        return "vectors"  # such as RWKV's [1, 1, width]
    return None


def _template(name: str) -> str:
    """A parameter's name with its layer numbers starred out."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _keep_embeddings_in_32_bits(model: nn.Module) -> None:
    """bitsandbytes' own advice, and what the stock Trainer does. Not tested here: it needs a CUDA device."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
