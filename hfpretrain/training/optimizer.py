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

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.pytorch_utils import Conv1D

from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.initialisation import drawn_parameters
from hfpretrain.model import name_template, true_shape
from hfpretrain.mup.rules import Multipliers
from hfpretrain.mup.spec import MupSpec

_WIDTH = 118  # columns of the table of groups; further examples are cut
GROUPS = ("matrices", "embeddings", "vectors", "state")  # the first is the one whose learning rate is logged
# Those with AdamW's update, g / (sqrt(v) + eps) and a decoupled decay, however they store their state.
ADAMW = (
    *("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_torch_4bit"),
    *("adamw_torch_8bit", "adamw_anyprecision", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit"),
    "paged_adamw_8bit",
)
# Why not, by a word in the optimizer's name; the first that fits.
NOT_ADAMW = {
    "galore": "it works in a subspace of its own",
    "apollo": "it scales by the norm of channels or tensors",
    "schedule_free": "the weights it trains at are averages of its own",
    "sgd": "its step is proportional to the gradient, which shrinks with the width: it needs other exponents",
    "muon": "it makes updates orthogonal: their size follows from the shape, and it needs the spectral rule",
    "lion": "its sign update has muP's rates but no epsilon and a decay tuned otherwise; not measured here",
    "adafactor": "it factors the second moment, clips by the tensor's RMS, and its eps is a pair",
    "rmsprop": "its weight decay goes through the gradient, where it is divided by the gradient's size",
    "adagrad": "its weight decay goes through the gradient, where it is divided by the gradient's size",
    "ademamix": "its slow momentum adds a second, undivided time scale; not measured here",
    "stable_adamw": "it clips by the tensor's RMS, which couples its entries",
    "lomo": "it has no groups",
}
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    lr: float | None = None,
    eps: float = 1e-8,
    mup: MupSpec | None = None,
) -> list[dict[str, Any]]:
    """Groups for an optimizer: dicts of `params`, `weight_decay` and `name` (one of `GROUPS`), empty ones left out.

    Every trainable parameter is in exactly one group; tied parameters count once. Only `matrices` decay.

    Args:
        weight_decay, lr, eps: with `mup`, those of its base width.
        lr: stands in each group where given; it must be with `mup`.
        mup: splits the groups by its multipliers, which are put on lr, weight_decay and eps. Groups then also have
            `lr_multiplier` and `eps_multiplier`, and those that learn at `lr` itself come first: the first is logged.
    """
    if mup is not None and lr is None:
        raise ValueError("parameter_groups has a muP spec but no lr: give the learning rate of the base width as lr=")
    roles, _ = parameter_roles(model)
    split: dict[tuple[str, Multipliers], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = Multipliers() if mup is None else replace(mup.of(name).multipliers, init=1.0)
            # What does not decay must not be split by how much it would.
            key = own if roles[name] == "matrices" else replace(own, weight_decay=1.0)
            split.setdefault((roles[name], key), []).append(parameter)
    groups = []
    # An empty group is deleted by DeepSpeed but not by the scheduler, which then fails: there is none.
    for (role, own), members in sorted(split.items(), key=_base_rate_first):
        decay = weight_decay * own.weight_decay if role == "matrices" else 0.0
        group: dict[str, Any] = {"params": members, "weight_decay": decay, "name": role}
        if lr is not None:
            group["lr"] = lr * own.lr
        if mup is not None:
            group |= {"eps": eps * own.eps, "lr_multiplier": own.lr, "eps_multiplier": own.eps}
        groups.append(group)
    return groups


def _base_rate_first(item: tuple[tuple[str, Multipliers], list[nn.Parameter]]) -> tuple[bool, int, float, float]:
    role, own = item[0]
    return own.lr != 1.0, GROUPS.index(role), own.lr, own.eps


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
    """A table (group, tensors, parameters, weight decay, examples), and below it every decision by rule of thumb.

    With muP also each group's learning rate, that rate over the base width's, and its epsilon.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scaled = any("lr_multiplier" in group for group in groups)
    rows = [["group", "tensors", "parameters", "weight decay"] + ["lr", "of base", "eps"] * scaled + ["for example"]]
    for group in groups:
        sizes = sum(int(torch.Size(true_shape(parameter)).numel()) for parameter in group["params"])
        templates = Counter(name_template(names.get(id(parameter), "?")) for parameter in group["params"])
        row = [group["name"], str(len(group["params"])), f"{sizes:,}", f"{group['weight_decay']:g}"]
        if scaled:
            row += [f"{group['lr']:.4g}", f"{group['lr_multiplier']:.4g}", f"{group['eps']:.3g}"]
        rows.append([*row, ", ".join(name for name, _ in templates.most_common(3))])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [f"{row[0]:<{widths[0]}}", *(f"{row[i]:>{widths[i]}}" for i in range(1, len(widths)))]
        line = "  ".join([*cells, row[-1]])
        lines.append(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 4]} ...")
    roles, by_initialisation = parameter_roles(model)
    shapes = {name: true_shape(parameter) for name, parameter in model.named_parameters()}
    doubtful = sorted({(name_template(name), shapes[name], roles[name]) for name in by_initialisation})
    if doubtful:
        lines.append("decided by how they are initialised (random: matrices; constant or a pattern: state):")
        lines += [f"  {name} {list(shape)} -> {role}" for name, shape, role in doubtful]
    return "\n".join(lines)


def build_optimizer(
    model: nn.Module, args: TrainingArguments, groups: Sequence[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The optimizer that `--optim` names (any that takes parameter groups), with the peak learning rate as its default.

    Raises ConfigError for optimizers that choose their own parameters (Muon and Dion factories, LOMO, GaLore, APOLLO):
    the groups, and with them the weight decay of this run, would be dropped. With muP groups, also for all but AdamW.
    """
    if any("lr_multiplier" in group for group in groups):
        refuse(check_mup_optimizer(args))
    optimizer_class, kwargs = _class_and_kwargs(args, model)
    optimizer: torch.optim.Optimizer = optimizer_class(list(groups), **kwargs)
    if optimizer_class.__module__.startswith("bitsandbytes") and kwargs.get("optim_bits") == 8:
        _keep_embeddings_in_32_bits(model)
    return optimizer


def check_optimizer(args: TrainingArguments) -> list[Problem]:
    """What `build_optimizer` would refuse for any model: found without one."""
    try:
        _class_and_kwargs(args, nn.Linear(1, 1))
    except ConfigError as error:
        return error.problems
    return []


def _class_and_kwargs(args: TrainingArguments, model: nn.Module) -> tuple[Any, dict[str, Any]]:
    name, hf_model = str(getattr(args.optim, "value", args.optim)), cast(Any, model)
    try:
        optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, hf_model)
    except (ImportError, ValueError) as error:
        what = f"this optimizer cannot be made: {str(error).strip().splitlines()[0]}"
        raise ConfigError([Problem(what, name, "optim", "install what it needs, or adamw_torch_fused")]) from error
    is_class = isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    if not is_class or {"params", "model", "optimizer_dict"} & kwargs.keys():
        what = "this optimizer chooses its parameters by itself, so the weight-decay groups would be dropped"
        remedy = "an optimizer over parameter groups: adamw_torch_fused, adafactor, lion_32bit, sgd, ..."
        raise ConfigError([Problem(what, name, "optim", remedy)])
    return optimizer_class, kwargs


def check_mup_optimizer(args: TrainingArguments) -> list[Problem]:
    """A problem if muP's rules, which are those of AdamW, do not hold for `--optim`; says why."""
    name = str(getattr(args.optim, "value", args.optim))
    if name in ADAMW:
        return []
    reason = next((why for word, why in NOT_ADAMW.items() if word in name), "nobody has derived or measured its rules")
    what = f"muP's learning rates, weight decay and epsilon are those of AdamW, and {name} is none: {reason}"
    return [Problem(what, name, "optim", "adamw_torch_fused or another AdamW, or no muP")]


def undo_first_step(optimizer: Any) -> None:
    """Take back the step that DeepSpeed makes when it builds its optimizer of ZeRO 0 in half precision.

    To have its states in memory it lets the inner optimizer step with zero gradients (deepspeed 0.19.8,
    `FP16_UnfusedOptimizer.initialize_optimizer_states`): Adam counts it, so that its bias correction is one step ahead
    for ever, and weights decay once more. At the other stages, and in float32, nothing is done. Not after loading a
    checkpoint.
    """
    if not {"fp16_groups", "fp32_groups", "initialize_optimizer_states"} <= set(dir(optimizer)):
        return
    optimizer.optimizer.state.clear()
    for half, whole in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(half, whole, strict=True):
            master.data.copy_(parameter.data)


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


def _keep_embeddings_in_32_bits(model: nn.Module) -> None:
    """bitsandbytes' own advice, and what the stock Trainer does. Not tested here: it needs a CUDA device."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
