"""What a model's parameters are for and what a token costs in each: one forward pass watched without memory.

The model is built of tensors that have shapes and nothing else, so that one of any size is counted in a few seconds.
Every matrix product of the pass is seen, with the module that is running and, through views, casts and look-ups, the
parameter it multiplies with. Roles follow from that, and from no name of a model:

- embedding: rows are looked up;                     - head: the last product that is as wide as the logits;
- experts: looked up as whole matrices, so that a token meets some of them; router: one row an expert, beside them;
- attention: of the module that attends (transformers' attention interface, or products of activations alone that grow
  with the row); recurrence: of a module with a convolution along the row, or with such products that do not grow;
- norm: of a module that does nothing but divide by a mean square or a variance, and scale;
- mlp: the rest of the repeated layers; other: the rest.

Not seen: a contraction written as a multiplication and a sum (the state of a recurrence); a window or chunks that an
attention does not name to transformers' interface. Both passes are short (`_ROW`), so what works in longer pieces is
counted as if the row filled one.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedConfig

from hfpretrain.model import name_template
from hfpretrain.product_watch import ProductWatch, WatchedPass

ROLES = ("embedding", "head", "attention", "recurrence", "mlp", "router", "experts", "norm", "other")
_COUNTED = "hfpretrain_counted"
_ROW = 128  # positions of the longer of two passes, or as many as the model has; what a token adds is their difference


@dataclass(frozen=True)
class Part:
    """Parameters of one role.

    Attributes:
        role: one of `ROLES`.
        parameters: all of them, tied ones once.
        multiplied: those that stand in matrix products, idle experts too.
        active: multiplications of a token with them: of a stack of experts the share that a token meets, and a matrix
            that is used twice counts twice. The N of 6 N D.
    """

    role: str
    parameters: int
    multiplied: int
    active: float


@dataclass(frozen=True)
class Attention:
    """Attention with one window.

    Attributes:
        window: positions that a token sees, itself included; None: all before it.
        width: query heads times (width of a key + width of a value) / 2, summed over the layers. A token costs
            4 * width FLOPs for each position that it attends to, forward: half for scores, half for weighted sums.
        layers: times that the interface was called; 0 where `width` comes from products outside of it.
    """

    window: int | None
    width: float
    layers: int


@dataclass(frozen=True)
class ModelCounts:
    """What `count_model` found.

    Attributes:
        parts: one for each role that occurs, in the order of `ROLES`.
        attention: one for each window that occurs.
        mixing_flops: forward FLOPs of a token in products of activations that do not grow with the row.
        tied: the head's matrix is the input embedding; it is a part of the head.
        width: last dimension of what goes into the head, the hidden size.
    """

    parts: tuple[Part, ...]
    attention: tuple[Attention, ...]
    mixing_flops: float
    tied: bool
    width: int

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def multiplied(self) -> int:
        return sum(part.multiplied for part in self.parts)

    @property
    def active(self) -> float:
        return sum(part.active for part in self.parts)

    def of(self, role: str) -> Part:
        """The part of this role, empty where it does not occur."""
        return next((part for part in self.parts if part.role == role), Part(role, 0, 0, 0.0))


class NotCountable(Exception):  # noqa: N818 (an outcome to report)
    """The pass needs values; the message says what stopped it."""


def count_model(config: PreTrainedConfig) -> ModelCounts:
    """Roles, products and attention of the causal language model of this configuration.

    Raises:
        NotCountable: its forward pass depends on values, such as experts in a loop over those that were chosen.
    """
    failure = ""
    for attention in (_COUNTED, "eager"):
        for fake in (False, True):
            watch = ProductWatch(with_mask=not fake)
            AttentionInterface.register(_COUNTED, watch.attend)
            AttentionMaskInterface.register(_COUNTED, _no_mask)
            try:
                longer = _row_length(config)
                with FakeTensorMode() if fake else nullcontext():
                    model = _without_memory(config, attention, device="cpu" if fake else "meta")
                    return _counts(model, *(watch.of(model, tokens) for tokens in (longer // 2, longer)))
            except Exception as error:  # whatever a model does where there are no values
                failure = failure or f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    raise NotCountable(failure)


def _row_length(config: PreTrainedConfig) -> int:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(_ROW, positions) if isinstance(positions, int) and positions > 1 else _ROW


def _no_mask(*_: Any, **__: Any) -> None:
    """A window is read off the attention's arguments, not off a mask."""


def _without_memory(config: PreTrainedConfig, attention: str, *, device: str) -> nn.Module:
    kwargs: dict[str, Any] = {"attn_implementation": attention, "dtype": torch.float32}
    # Whole matrices are then looked up for each token, so that nothing depends on which experts are chosen.
    kwargs["experts_implementation"] = "batched_mm"
    with torch.device(device), warnings.catch_warnings(action="ignore"):
        model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), **kwargs)
    model.config.use_cache = False
    return model.eval()


# --- what it means ---------------------------------------------------------------------------------------------------


def _counts(model: nn.Module, short: WatchedPass, long: WatchedPass) -> ModelCounts:
    parameters = dict(model.named_parameters())
    added = long.tokens - short.tokens
    active = {name: (flops - short.flops[name]) / (2 * added) for name, flops in long.flops.items()}
    growing, steady = _free(short, long)
    head = next((name for name, width in reversed(long.outputs.items()) if width == long.logits), None)
    roles = _roles(model, long, active, growing=set(growing), steady=set(steady), head=head)
    parts = []
    for role in ROLES:
        names = [name for name in parameters if roles[name] == role]
        if names:
            multiplied = sum(parameters[name].numel() for name in names if name in active)
            total = sum(parameters[name].numel() for name in names)
            parts.append(Part(role, total, multiplied, math.fsum(active.get(name, 0.0) for name in names)))
    widths: dict[int | None, float] = {}
    for window, width in long.attention:
        widths[window] = widths.get(window, 0.0) + width
    if growing:
        widths[None] = widths.get(None, 0.0) + math.fsum(growing.values()) / 4
    calls = Counter(window for window, _ in long.attention)
    return ModelCounts(
        parts=tuple(parts),
        attention=tuple(Attention(window, widths[window], calls[window]) for window in sorted(widths, key=str)),
        mixing_flops=math.fsum(steady.values()),
        tied=head is not None and head in long.looked_up,
        width=parameters[head].numel() // long.logits if head is not None else 0,
    )


def _free(short: WatchedPass, long: WatchedPass) -> tuple[dict[str, float], dict[str, float]]:
    """Products of activations alone, by module: (FLOPs of a token and a position of its row, FLOPs of a token).

    Over a row of n positions they cost c n + s n^2; rotary embeddings (position times frequency) are c, and a module
    without parameters.
    """
    growing, steady = {}, {}
    for module, flops in long.free_flops.items():
        before = short.free_flops[module]
        square = (flops / long.tokens - before / short.tokens) / (long.tokens - short.tokens)
        linear = flops / long.tokens - square * long.tokens
        if square * long.tokens > 1e-6 * flops / long.tokens:
            growing[module] = square
        if linear > 1e-6 * flops / long.tokens:
            steady[module] = linear
    return growing, steady


def _roles(
    model: nn.Module,
    seen: WatchedPass,
    active: dict[str, float],
    *,
    growing: set[str],
    steady: set[str],
    head: str | None,
) -> dict[str, str]:
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    stacks = {n for n in seen.gathered & active.keys() if active[n] < parameters[n].numel() * (1 - 1e-6)}
    holders = {_owner(name): parameters[name].shape[0] for name in stacks}
    embeddings = {_owner(name) for name in seen.looked_up}
    convolving = {name if any(modules[name].children()) else _owner(name) for name in seen.convolving}
    attention = {name for name in seen.attending | growing if not _holds(name, embeddings)}
    mixers = convolving | {name for name in steady if next(modules[name].parameters(), None) is not None}
    recurrence = {name for name in mixers if not _holds(name, embeddings | attention)}

    def role(name: str) -> str:
        owner, shape = _owner(name), parameters[name].shape
        if name == head:
            return "head"
        if name in seen.looked_up:
            return "embedding"
        if owner in holders and (name in stacks or name in seen.gathered):
            return "experts"
        if name in seen.gathered and name not in active:
            return "embedding"
        if owner in seen.normalising and not any(modules[owner].children()) and name not in active:
            return "norm"
        inside = [
            (len(mixer), kind)
            for kind, found in (("attention", attention), ("recurrence", recurrence))
            for mixer in found
            if _within(name, mixer)
        ]
        if inside:
            return max(inside)[1]
        if any(_within(name, _owner(holder)) and count in shape for holder, count in holders.items()):
            return "router"
        return "mlp" if name_template(name) != name else "other"

    return {name: role(name) for name in parameters}


def _owner(name: str) -> str:
    """The module of a parameter, or the parent of a module."""
    return name.rpartition(".")[0]


def _within(name: str, module: str) -> bool:
    return name.startswith(f"{module}.") or not module


def _holds(module: str, others: set[str]) -> bool:
    """Whether one of these modules is in this one, other than itself."""
    return any(_within(other, module) and other != module for other in others)
