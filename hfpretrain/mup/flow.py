"""What an operation keeps of linearity: in which parameters its result is homogeneous of degree one.

If all of these parameters are multiplied by c, so is the tensor. A matrix product takes its weight's place, a gain that
of the norm before it, a sum all of its terms' (several experts, a bias); after a nonlinearity nothing is known. What
is not in the tables counts as a nonlinearity: the worst that an operation we do not know can do is a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
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


ZERO = Flow(linear=frozenset(), data=False)
CONSTANT = Flow()
STREAM = Flow(stream=True)


def result(operation: str, args: Any, kwargs: Any, known: Callable[[Tensor], Flow]) -> Flow:
    """What is known of the result of an operation (its name without the _ of one in place).

    Args:
        known: what is known of a tensor.
    """

    def flow_of(value: Any) -> Flow:
        if isinstance(value, Tensor):
            return known(value)
        return ZERO if value is None or value == 0 else CONSTANT

    inputs = [flow_of(leaf) for leaf in tensors((args, kwargs))]
    depends = frozenset[str]().union(*(flow.depends for flow in inputs))
    data = any(flow.data for flow in inputs) or not inputs
    if operation in _ZEROS:
        return ZERO
    if operation == "copy" and len(args) > 1 and isinstance(args[1], Tensor):  # copy_(into, from)
        return flow_of(args[1])
    if operation in ("clone", "_to_copy", "alias", "detach") and (inputs[0].stream or inputs[0].bare):
        return inputs[0]
    if operation == "add" and (name := inputs[0].bare) and len(inputs) == 1 and _is_one(args[:2]):
        return Flow(frozenset({(name, True)}), depends, data=False)
    linear = _linear(operation, args, flow_of)
    if linear is None:
        before = next((flow.lost for flow in inputs if flow.lost), "")
        return Flow(None, depends, data, lost=operation if operation not in _KEEPS or not before else before)
    return Flow(linear, depends, data)


def _linear(operation: str, args: Any, flow_of: Callable[[Any], Flow]) -> Linear | None:
    def flows(positions: Iterable[int]) -> list[Flow]:
        return [flow_of(args[i]) for i in positions if i < len(args)]

    if operation in ("cat", "stack"):
        return together([flow_of(tensor) for tensor in args[0]], operation).linear
    if operation in _SUMS:
        positions = _SUMS[operation]
        rest = [flow_of(leaf) for i, arg in enumerate(args) if i not in positions for leaf in tensors(arg)]
        return _product(together(flows(positions), operation), _hidden_behind(rest)).linear
    if operation in _PRODUCTS:
        (first, second), term = _PRODUCTS[operation]
        product = _product(*flows((first, second)))
        if term is None or term >= len(args):
            return product.linear
        return together([product, flow_of(args[term])], operation).linear
    if operation in _NORMS:
        gain, *bias = flows(_NORMS[operation])
        x = flow_of(args[0])
        scaled = _product(replace(gain, linear=gain.linear or None), replace(x, linear=None))
        return together([scaled, *bias], operation).linear
    if "scaled_dot_product" in operation:  # query, key, value
        return _product(flow_of(args[2]), _hidden_behind(flows((0, 1)))).linear
    if operation == "div":
        return _product(flow_of(args[0]), replace(flow_of(args[1]), linear=None)).linear
    if operation in _KEEPS:
        rest = [flow_of(leaf) for leaf in tensors(args[1:])]
        return _product(flow_of(args[0]), _hidden_behind(rest)).linear
    return None


def _product(first: Flow, second: Flow) -> Flow:
    """Of two factors the one that depends on parameters alone says in what the product is linear, else the first."""
    depends = first.depends | second.depends
    for one, other in sorted(((first, second), (second, first)), key=lambda pair: pair[0].data):
        if one.linear is not None and not {name for name, _ in one.linear} & other.depends:
            return Flow(one.linear, depends)
    return Flow(None, depends)


def together(terms: Sequence[Flow], operation: str) -> Flow:
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


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
