"""What a model adds to its residual stream, by watching one forward pass: which parameters each addition is linear in.

The stream is the tensor that enters the first of the repeated layers, and every sum of it and something else. What is
added is one branch's contribution. For every tensor that is computed it is noted in which parameters it is homogeneous
of degree one: if all of these are multiplied by c, so is the tensor. A matrix product takes its weight's place, a gain
that of the norm before it, a sum all of its terms' (several experts, a bias); after a nonlinearity nothing is known.
So a contribution ends up with the last linear map before the stream, whatever it is called.

That is a reading of the operations; `depth` then proves it on the model's own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Factor = tuple[str, bool]  # a parameter, and whether it is used as 1 + parameter
Linear = frozenset[Factor]

# What leaves its first operand's linearity as it is: rearrangements, sums, choices of entries.
_KEEPS = (
    *("alias", "clone", "contiguous", "copy", "constant_pad_nd", "cumsum", "detach", "embedding", "expand_copy"),
    *("flip", "gather", "index", "index_select", "mean", "neg", "permute_copy", "repeat", "repeat_interleave", "roll"),
    *("slice_copy", "squeeze_copy", "sum", "t_copy", "take_along_dim", "_to_copy", "transpose_copy", "tril", "triu"),
    *("unfold_copy", "unsqueeze_copy", "_unsafe_view", "view_copy", "_reshape_alias_copy"),
)
# Positions of the terms of a sum; what is written into a part of a tensor counts as one.
_SUMS: dict[str, tuple[int, ...]] = {
    "add": (0, 1),
    "sub": (0, 1),
    "index_add": (0, 3),
    "scatter_add": (0, 3),
    "scatter": (0, 3),
    "index_put": (0, 2),
    "slice_scatter": (0, 1),
    "select_scatter": (0, 1),
    "masked_scatter": (0, 2),
    "masked_fill": (0, 2),
    "where": (1, 2),
}
# Positions of the two factors, and of a term that is added.
_PRODUCTS: dict[str, tuple[tuple[int, int], int | None]] = {
    "mul": ((0, 1), None),
    "mm": ((0, 1), None),
    "bmm": ((0, 1), None),
    "mv": ((0, 1), None),
    "dot": ((0, 1), None),
    "addmm": ((1, 2), 0),
    "addmv": ((1, 2), 0),
    "baddbmm": ((1, 2), 0),
    "linear": ((0, 1), 2),
    "convolution": ((0, 1), 2),
    "_grouped_mm": ((0, 1), None),
}
# Positions of gain and bias of what has forgotten its input's size.
_NORMS: dict[str, tuple[int, ...]] = {
    "native_layer_norm": (2, 3),
    "native_group_norm": (1, 2),
    "_fused_rms_norm": (2,),
}
_ZEROS = (
    *("zeros", "zeros_like", "new_zeros", "zero"),
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),  # written to before they are read
)


@dataclass(frozen=True)
class Flow:
    """What is known about a tensor.

    Attributes:
        linear: the parameters in which it is homogeneous of degree one, taken together (none: it is zero); None where
            that is not known of any.
        depends: all parameters it depends on other than through the stream.
        data: whether it is more than a function of parameters.
        bare: the parameter whose values these are.
        stream: it is the residual stream.
        lost: the operation after which nothing was known, for people.
    """

    linear: Linear | None = None
    depends: frozenset[str] = frozenset()
    data: bool = True
    bare: str = ""
    stream: bool = False
    lost: str = ""


_ZERO = Flow(linear=frozenset(), data=False)
_CONSTANT = Flow()
_STREAM = Flow(stream=True)


@dataclass(frozen=True)
class Contribution:
    """What one branch adds to the stream.

    Attributes:
        layer: index of the layer that was running.
        flow: see `Flow`.
        value: the tensor that was added.
    """

    layer: int
    flow: Flow
    value: Tensor


@dataclass
class Stream:
    """One forward pass.

    Attributes:
        start: the parameters that what enters the first layer depends on.
        contributions: in order.
        sums: the stream after each of them.
        calls: indices of the layers as they ran.
        broken: why the tensor that leaves a layer is not the stream; "" where it always was.
    """

    start: frozenset[str] = frozenset()
    contributions: list[Contribution] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    broken: str = ""


def watch_stream(
    model: nn.Module, layers: Sequence[nn.Module], tokens: Tensor, *, sums: Sequence[Tensor] = ()
) -> Stream:
    """The residual stream of `model(input_ids=tokens)`, whose repeated layers are `layers`.

    Args:
        sums: of another pass over the same tokens; the stream is set to them after each addition, so that every branch
            reads what it read then, whatever this pass's branches add.
    """
    watch = _Watch(model, sums)
    handles = [
        handle
        for index, layer in enumerate(layers)
        for handle in (
            layer.register_forward_pre_hook(watch.entering(index), with_kwargs=True),
            layer.register_forward_hook(watch.leaving(index, last=len(layers) - 1)),
        )
    ]
    try:
        with watch, torch.no_grad():
            model(input_ids=tokens)
    finally:
        for handle in handles:
            handle.remove()
    return watch.stream


class _Watch(TorchDispatchMode):
    def __init__(self, model: nn.Module, sums: Sequence[Tensor]) -> None:
        super().__init__()
        self.stream = Stream()
        self._forced = sums
        self._shape: torch.Size | None = None  # of the stream, while it is followed
        self._layer = 0
        self._keep: list[Any] = []  # storages are known by address: none may be freed and its address used again
        self._flows = {
            _storage(p): Flow(frozenset({(name, False)}), frozenset({name}), data=False, bare=name)
            for name, p in model.named_parameters()
        }

    def entering(self, index: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.stream.calls.append(index)
            self._layer = index
            if self._shape is None and not self.stream.sums and (floats := _floats((args, kwargs))):
                self.stream.start = self._flow(floats[0]).depends
                self._flows[_storage(floats[0])] = _STREAM
                self._shape = floats[0].shape

        return hook

    def leaving(self, index: int, *, last: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            floats = _floats(output)
            flow = self._flow(floats[0]) if floats else _CONSTANT
            if not flow.stream and not self.stream.broken:
                gains = ", ".join(sorted(name for name, _ in flow.linear or ()))
                how = f"is scaled by {gains}" if gains else f"comes out of {flow.lost or 'something else'}"
                self.stream.broken = f"what leaves layer {index} {how}"
            if index == last:
                self._shape = None

        return hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        in_place = name.endswith("_") and not name.endswith("__")
        operation = name.rstrip("_") if in_place else name
        branch = self._contribution(operation, args, kwargs)
        flow = _STREAM if branch is not None else self._result(operation, args, kwargs)
        out = func(*args, **kwargs)
        if branch is not None:
            out = self._added(branch, out)
        read = {_storage(leaf) for leaf in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            storage = _storage(tensor)
            self._keep.append(tensor.untyped_storage())
            if in_place and not _is_whole(tensor):
                self._flows[storage] = _together([self._flow(tensor), flow], f"a partial {name}")
            elif in_place or storage not in read:  # else it is a view
                self._flows[storage] = flow
        return out

    def _contribution(self, operation: str, args: Any, kwargs: Any) -> Contribution | None:
        """What is added, if this is an addition to the stream."""
        if operation != "add" or self._shape is None or not all(isinstance(term, Tensor) for term in args[:2]):
            return None
        first, second = args[:2]
        of_stream = [self._flow(term).stream and self._is_all_of_it(term) for term in (first, second)]
        if of_stream[0] == of_stream[1] or self._flow(second if of_stream[0] else first).stream:
            return None
        value = second * kwargs.get("alpha", 1) if of_stream[0] else first.clone()
        return Contribution(self._layer, self._flow(second if of_stream[0] else first), value.clone())

    def _is_all_of_it(self, tensor: Tensor) -> bool:
        """Not a few of its rows; rows and tokens may be one dimension."""
        shape = self._shape
        return shape is not None and tensor.numel() == shape.numel() and tensor.shape[-1:] == shape[-1:]

    def _added(self, branch: Contribution, out: Tensor) -> Tensor:
        if len(self.stream.contributions) < len(self._forced):
            forced = self._forced[len(self.stream.contributions)]
            out = out.copy_(forced) if out.shape == forced.shape else out
        self.stream.contributions.append(branch)
        self.stream.sums.append(out.clone())
        return out

    def _flow(self, value: Any) -> Flow:
        if isinstance(value, Tensor):
            return self._flows.get(_storage(value), _CONSTANT)
        return _ZERO if value is None or value == 0 else _CONSTANT

    def _result(self, operation: str, args: Any, kwargs: Any) -> Flow:
        inputs = [self._flow(leaf) for leaf in _tensors((args, kwargs))]
        depends = frozenset[str]().union(*(flow.depends for flow in inputs))
        data = any(flow.data for flow in inputs) or not inputs
        if operation in _ZEROS:
            return _ZERO
        if operation == "copy" and len(args) > 1 and isinstance(args[1], Tensor):  # copy_(into, from)
            return self._flow(args[1])
        if operation in ("clone", "_to_copy", "alias", "detach") and (inputs[0].stream or inputs[0].bare):
            return inputs[0]
        if operation == "add" and (name := inputs[0].bare) and len(inputs) == 1 and _is_one(args[:2]):
            return Flow(frozenset({(name, True)}), depends, data=False)
        linear = self._linear(operation, args, kwargs)
        if linear is None:
            before = next((flow.lost for flow in inputs if flow.lost), "")
            return Flow(None, depends, data, lost=operation if operation not in _KEEPS or not before else before)
        return Flow(linear, depends, data)

    def _linear(self, operation: str, args: Any, kwargs: Any) -> Linear | None:
        def flows(positions: Iterable[int]) -> list[Flow]:
            return [self._flow(args[i]) for i in positions if i < len(args)]

        if operation in ("cat", "stack"):
            return _together([self._flow(tensor) for tensor in args[0]], operation).linear
        if operation in _SUMS:
            positions = _SUMS[operation]
            rest = [self._flow(leaf) for i, arg in enumerate(args) if i not in positions for leaf in _tensors(arg)]
            return _product(_together(flows(positions), operation), _hidden_behind(rest)).linear
        if operation in _PRODUCTS:
            (first, second), term = _PRODUCTS[operation]
            product = _product(*flows((first, second)))
            if term is None or term >= len(args):
                return product.linear
            return _together([product, self._flow(args[term])], operation).linear
        if operation in _NORMS:
            gain, *bias = flows(_NORMS[operation])
            x = self._flow(args[0])
            scaled = _product(replace(gain, linear=gain.linear or None), replace(x, linear=None))
            return _together([scaled, *bias], operation).linear
        if "scaled_dot_product" in operation:  # query, key, value
            return _product(self._flow(args[2]), _hidden_behind(flows((0, 1)))).linear
        if operation == "div":
            return _product(self._flow(args[0]), replace(self._flow(args[1]), linear=None)).linear
        if operation in _KEEPS:
            rest = [self._flow(leaf) for leaf in _tensors(args[1:])]
            return _product(self._flow(args[0]), _hidden_behind(rest)).linear
        return None


def _product(first: Flow, second: Flow) -> Flow:
    """Of two factors the one that depends on parameters alone says in what the product is linear, else the first."""
    depends = first.depends | second.depends
    for one, other in sorted(((first, second), (second, first)), key=lambda pair: pair[0].data):
        if one.linear is not None and not {name for name, _ in one.linear} & other.depends:
            return Flow(one.linear, depends)
    return Flow(None, depends)


def _together(terms: Sequence[Flow], operation: str) -> Flow:
    """A sum is homogeneous in all that its terms are, if none of them depends on another's in another way."""
    depends = frozenset[str]().union(*(term.depends for term in terms))
    data = any(term.data for term in terms)
    linear: Linear = frozenset().union(*(term.linear or frozenset() for term in terms))
    for term in terms:
        others = {name for name, _ in linear - (term.linear or frozenset())}
        if term.linear is None or (term.linear and others & term.depends):
            return Flow(None, depends, data, lost=term.lost or operation)
    return Flow(linear, depends, data)


def _hidden_behind(flows: Sequence[Flow]) -> Flow:
    """Some that a result depends on, but in no known way."""
    return Flow(None, frozenset[str]().union(*(flow.depends for flow in flows)))


def _is_one(terms: Sequence[Any]) -> bool:
    return any(not isinstance(term, Tensor) and term == 1 for term in terms)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _floats(values: Any) -> list[Tensor]:
    return [tensor for tensor in _tensors(values) if tensor.is_floating_point()]


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
