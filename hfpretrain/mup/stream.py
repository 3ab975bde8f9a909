"""The residual stream of a model and what is added to it, by watching one forward pass.

The stream is the tensor that enters the first of the repeated layers, and every sum of it and something else. What is
added is one branch's contribution; for each it is found in which parameters it is linear (`flow`), so that it ends up
with the last linear map before the stream, whatever it is called. That is a reading of the operations; `depth` then
proves it on the model's own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hfpretrain.errors import ConfigError, Problem
from hfpretrain.mup.flow import CONSTANT, STREAM, Flow, result, tensors, together


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

    Raises:
        ConfigError: the model fails.
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
    except Exception as error:  # anything may go wrong inside an architecture's forward pass
        what = f"{type(model).__name__} cannot run with {len(layers)} layers: {type(error).__name__}: {error}"
        remedy = "another base depth, or name the base model's settings yourself: base_config with that depth"
        raise ConfigError([Problem(what, f"{len(layers)} layers", "base depth", remedy)]) from error
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
                self._flows[_storage(floats[0])] = STREAM
                self._shape = floats[0].shape

        return hook

    def leaving(self, index: int, *, last: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            floats = _floats(output)
            flow = self._flow(floats[0]) if floats else CONSTANT
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
        flow = STREAM if branch is not None else result(operation, args, kwargs, self._flow)
        out = func(*args, **kwargs)
        if branch is not None:
            out = self._added(branch, out)
        read = {_storage(leaf) for leaf in tensors((args, kwargs))}
        for tensor in tensors(out):
            storage = _storage(tensor)
            self._keep.append(tensor.untyped_storage())
            if in_place and not _is_whole(tensor):
                self._flows[storage] = together([self._flow(tensor), flow], f"a partial {name}")
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

    def _flow(self, tensor: Tensor) -> Flow:
        return self._flows.get(_storage(tensor), CONSTANT)


def _floats(values: Any) -> list[Tensor]:
    return [tensor for tensor in tensors(values) if tensor.is_floating_point()]


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
