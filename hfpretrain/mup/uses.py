"""How a model uses its parameters, by watching one forward pass: which of their axes are summed over.

A Linear stores [out, in], Conv1D [in, out], experts either way round, a router is often no module at all: only what
happens in the forward pass says which axis of a tensor is its fan-in. Every matrix product that torch makes is seen; an
operand that is a view of a parameter is traced back to the parameter's axes by its strides.

A contraction that is written as a multiplication and a sum is not seen as one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operation -> position of an operand -> its contracted dimensions
_PRODUCTS: dict[str, dict[int, tuple[int, ...]]] = {
    "mm": {0: (1,), 1: (0,)},
    "addmm": {1: (1,), 2: (0,)},
    "bmm": {0: (2,), 1: (1,)},
    "baddbmm": {1: (2,), 2: (1,)},
    "mv": {0: (1,), 1: (0,)},
    "addmv": {1: (1,), 2: (0,)},
    "dot": {0: (0,), 1: (0,)},
    "linear": {0: (-1,), 1: (1,)},
    "_grouped_mm": {0: (-1,), 1: (-2,)},
}


@dataclass(frozen=True)
class Product:
    """One use of a parameter in a matrix product: its axes that are summed over, and the others."""

    contracted: frozenset[int]
    kept: frozenset[int]


@dataclass
class Uses:
    """What a forward pass did with one parameter.

    Attributes:
        touched: any operation saw it.
        looked_up: rows of it were taken by index (an embedding).
        products: its uses in matrix products.
        fed: root mean square of what it is multiplied with there, one number per use.
        copied: something computed from parameters alone, this one among them, went into a matrix product: which axes
            were contracted is then unknown.
    """

    touched: bool = False
    looked_up: bool = False
    products: set[Product] = field(default_factory=set)
    fed: list[float] = field(default_factory=list)
    copied: bool = False

    def merge(self, other: Uses) -> None:
        """Add what another parameter of the same kind went through, such as the same one of another layer."""
        self.touched |= other.touched
        self.looked_up |= other.looked_up
        self.products |= other.products
        self.fed = self.fed + other.fed
        self.copied |= other.copied


def watch_uses(model: nn.Module, tokens: Tensor) -> dict[str, Uses]:
    """Uses of every parameter (tied ones once) in `model(input_ids=tokens)`."""
    with _Watch(model) as watch, torch.no_grad():
        model(input_ids=tokens)
    return watch.uses


class _Watch(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = dict(model.named_parameters())
        self.uses = {name: Uses() for name in self.parameters}
        self._own = {_storage(parameter): name for name, parameter in self.parameters.items()}
        self._derived: dict[int, frozenset[str]] = {}  # storages that hold functions of parameters alone
        self._keep: list[Any] = []  # storages are known by address: none may be freed and its address used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._keep += [tensor.untyped_storage() for tensor in outputs]
        for tensor in inputs:
            if (name := self._own.get(_storage(tensor))) is not None:
                self.uses[name].touched = True
        operation = func.overloadpacket.__name__
        self._note_products(operation, args)
        if not func.is_view and operation != "embedding":  # which rows are looked up is data
            self._note_derived(inputs, outputs)
        return out

    def _note_products(self, operation: str, args: Any) -> None:
        if operation == "embedding":
            if (name := self._own.get(_storage(args[0]))) is not None:
                self.uses[name].looked_up = True
            return
        operands = _PRODUCTS.get(operation, {})
        if operation == "convolution" and args[1].shape[1] > 1:  # a depthwise one sums over no channel
            operands = {1: tuple(range(1, args[1].ndim))}
        for position, contracted in operands.items():
            tensor = args[position]
            name = self._own.get(_storage(tensor))
            if name is not None:
                self.uses[name].products.add(_product(tensor, self.parameters[name], contracted))
                others = [args[other] for other in operands if other != position]
                self.uses[name].fed += [float(other.square().mean().sqrt()) for other in others]
            for source in self._derived.get(_storage(tensor), ()):
                self.uses[source].copied = True

    def _note_derived(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        sources: set[str] = set()
        for tensor in inputs:
            storage = _storage(tensor)
            names = self._derived.get(storage, frozenset({self._own[storage]} if storage in self._own else ()))
            if not names and tensor.is_floating_point():  # data is in it
                sources = set()
                break
            sources |= names
        for storage in {_storage(tensor) for tensor in outputs} - self._own.keys():
            self._derived[storage] = frozenset(sources)


def _product(view: Tensor, parameter: Tensor, contracted: tuple[int, ...]) -> Product:
    summed = {dimension % view.ndim for dimension in contracted}
    axes: dict[bool, set[int]] = {True: set(), False: set()}
    for dimension, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if size > 1 and stride > 0:
            axes[dimension in summed].add(_axis(stride, parameter))
    return Product(contracted=frozenset(axes[True]), kept=frozenset(axes[False]))


def _axis(stride: int, parameter: Tensor) -> int:
    """The parameter's axis that a view's dimension runs along: the one with the largest stride that is not larger."""
    strides = {s: axis for axis, (n, s) in enumerate(zip(parameter.shape, parameter.stride(), strict=True)) if n > 1}
    return strides[max(s for s in strides if s <= stride)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
