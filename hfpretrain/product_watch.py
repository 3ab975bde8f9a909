"""One forward pass without values, watched: its matrix products, the parameter and the module of each, its attention.

Tensors have shapes and nothing else, so a model of any size passes in a few seconds. A parameter is followed through
views, casts and copies by its storage; what is looked up in it stands for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_VARIANCES = {"rsqrt", "native_layer_norm", "_fused_rms_norm", "native_group_norm", "linalg_vector_norm", "var_mean"}


@dataclass
class WatchedPass:
    """What a pass over one row showed; FLOPs are of the whole row."""

    tokens: int
    flops: Counter[str] = field(default_factory=Counter)  # parameter -> FLOPs of products with it
    free_flops: Counter[str] = field(default_factory=Counter)  # module -> FLOPs of products of activations alone
    outputs: dict[str, int] = field(default_factory=dict)  # parameter -> last dimension of a product, in order of use
    looked_up: set[str] = field(default_factory=set)
    gathered: set[str] = field(default_factory=set)  # parts of these were looked up otherwise than by an embedding
    attention: list[tuple[int | None, float]] = field(default_factory=list)  # (window, width) of each call
    attending: set[str] = field(default_factory=set)  # modules
    convolving: set[str] = field(default_factory=set)
    normalising: set[str] = field(default_factory=set)
    logits: int = 0


class ProductWatch(TorchDispatchMode):
    def __init__(self, *, with_mask: bool) -> None:
        super().__init__()
        self.with_mask = with_mask  # without one, transformers looks at position_ids, which have no values
        self.seen = WatchedPass(0)
        self.stack = [""]

    def of(self, model: nn.Module, tokens: int) -> WatchedPass:
        self.seen = WatchedPass(tokens)
        self.stack = [""]
        self.sources = {_storage(parameter): name for name, parameter in model.named_parameters()}
        self.keep: list[Any] = []  # storages are known by address: none may be freed and its address used again
        device = next(model.parameters()).device
        row = torch.ones(1, tokens, dtype=torch.long, device=device)
        mask = {"attention_mask": torch.ones_like(row)} if self.with_mask else {}
        with self._following(model), self, torch.no_grad():
            out = model(input_ids=row, **mask)
        self.seen.logits = int(out.logits.shape[-1])
        self.keep.clear()
        return self.seen

    @contextmanager
    def _following(self, model: nn.Module) -> Iterator[None]:
        """The stack holds the names of the modules that are running."""
        self.names = {module: name for name, module in model.named_modules()}
        hooks = []
        for module, name in self.names.items():
            hooks.append(module.register_forward_pre_hook(partial(self._enter, name)))
            hooks.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str, *_: Any) -> None:
        self.stack.append(name)

    def _leave(self, *_: Any) -> None:
        self.stack.pop()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """In place of transformers' attention functions: [B, H, T, D] -> [B, T, H, D], nothing is computed."""
        rows, heads, length, width = query.shape
        self.seen.attention.append((kwargs.get("sliding_window"), heads * (width + value.shape[-1]) / 2))
        self.seen.attending.add(self.names.get(module, self.stack[-1]))
        return query.new_empty(rows, length, heads, value.shape[-1]), None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operation = func.overloadpacket.__name__
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.keep += [tensor.untyped_storage() for tensor in outputs]
        if operation in _PRODUCTS:
            self._note_product(operation, args, out)
        elif operation == "embedding":
            self.seen.looked_up |= self._names_of(args[:1])
        elif not func.is_view:
            if operation in _VARIANCES:
                self.seen.normalising.add(self.stack[-1])
            self._pass_on(operation, (args, kwargs), outputs)
        return out

    def _note_product(self, operation: str, args: Any, out: Tensor) -> None:
        first, second = _PRODUCTS[operation]
        if operation == "convolution":  # [out, in / groups, width]
            flops = 2.0 * out.numel() * args[second][0].numel()
            self.seen.convolving.add(self.stack[-1])
        else:
            flops = 2.0 * out.numel() * args[first].shape[-1]
        weights = self._names_of((args[first], args[second]))
        for name in weights:
            self.seen.flops[name] += flops / len(weights)
            self.seen.outputs.pop(name, None)
            self.seen.outputs[name] = out.shape[-1]
        if not weights:
            self.seen.free_flops[self.stack[-1]] += flops

    def _pass_on(self, operation: str, args: Any, outputs: list[Tensor]) -> None:
        """What is computed from one parameter alone stands for it: a cast, a copy, matrices looked up in a stack."""
        inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        names = {self.sources.get(_storage(tensor)) for tensor in inputs}
        if len(names) != 1 or (name := names.pop()) is None:
            return
        if operation in ("index", "index_select", "gather"):
            self.seen.gathered.add(name)
        for tensor in outputs:
            self.sources.setdefault(_storage(tensor), name)

    def _names_of(self, tensors: Any) -> set[str]:
        return {name for tensor in tensors if (name := self.sources.get(_storage(tensor))) is not None}


# operation -> positions of its two factors; the last dimension of the first is summed over
_PRODUCTS = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "mv": (0, 1),
    "addmv": (1, 2),
    "convolution": (0, 1),
    "_grouped_mm": (0, 1),
}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
