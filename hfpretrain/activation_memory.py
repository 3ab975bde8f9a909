"""What a forward and backward pass allocates beside weights and gradients, without computing or allocating anything.

The model runs on fake tensors: shapes, types and the order of allocations and releases are those of the real pass, the
values do not exist. A mode that sees each operation adds up the storages that it makes and takes off those that are
released. So the count holds what autograd keeps for the backward pass and what is there for a moment only; memory that
a kernel takes inside itself is not seen.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from hfpretrain.shallow import Shallow


@dataclass
class PassMemory:
    """Bytes of one pass.

    Attributes:
        points: (live, gradient values made so far, of them of the loss): `live` without weights, and without gradients
            that are finished. Only those that no later point exceeds: gradients only grow.
        saved: bytes that are alive when the forward pass is done.
        layers: name of each module in a ModuleList -> bytes of `saved` that were made in it.
        loss: bytes of `saved` made by the head and after it.
    """

    points: tuple[tuple[int, int, int], ...] = ()
    saved: int = 0
    layers: dict[str, int] = field(default_factory=dict)
    loss: int = 0


class NotMeasurableError(Exception):
    """A pass needs values, which fake tensors do not have; the message says where."""


def without_memory() -> FakeTensorMode:
    """A context: tensors that are made inside have no memory; they claim to be on the CPU, whose kernels are chosen.

    It can be entered again, with the tensors of before.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def pass_memory(
    model: nn.Module, loss: Callable[[], Tensor], *, head: nn.Module | None = None, shallow: Shallow | None = None
) -> PassMemory:
    """The memory of `loss()` and its backward pass.

    Args:
        model: made inside `without_memory`, in the mode it is to be measured in (`train()`, checkpointing).
        loss: runs the model and returns a scalar; called once, inside `without_memory` as well.
        head: the module at which the loss begins.
        shallow: layers that were taken out of the model and are to be counted.

    Raises:
        NotMeasurableError: the pass depends on values (routing by a loop over chosen tokens, `.item()`).
    """
    counter = _Counter(model, head, shallow)
    try:
        with counter:
            value = loss()
            counter.end_of_forward()
            value.backward()
            del value
            counter.end_of_backward()
    except Exception as error:  # whatever an architecture does with a value that is not there
        raise NotMeasurableError(
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    finally:
        counter.remove()
    return counter.result


class _Shapes(TorchDispatchMode):
    """Sees each operation and what comes out of it."""

    def seen(self, func: Any, out: Any) -> None:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = _any_grouped_mm if func is torch.ops.aten._grouped_mm.default else func
        out = run(*args, **(kwargs or {}))
        self.seen(func, out)
        return out


def operations_on(width: int, run: Callable[[], Any]) -> set[str]:
    """Names of the operations in `run()` whose result has no values and a last dimension of `width`, such as tanh."""
    names: set[str] = set()

    class Watch(_Shapes):
        def seen(self, func: Any, out: Any) -> None:
            if isinstance(out, Tensor) and out.numel() == 0 and out.shape[-1:] == (width,):
                names.add(str(func.overloadpacket).rpartition(".")[2])

    with Watch():
        run()
    return names


class _Counter(_Shapes):
    """Live bytes by what was running when they were made."""

    def __init__(self, model: nn.Module, head: nn.Module | None, shallow: Shallow | None) -> None:
        super().__init__()
        self._shallow = shallow
        self.result = PassMemory()
        self._live: dict[int, tuple[int, str]] = {}
        self._weights = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._total = self._loss = self._done = 0
        self._place = math.inf  # of the layer whose gradients are made
        self._peaks: list[tuple[int, int, int, float]] = [(0, 0, 0, math.inf)]  # one for each finished gradient
        self._scope = ""
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            if isinstance(module, nn.ModuleList):
                for index, layer in enumerate(module):
                    self._watch_layer(f"{name}.{index}", layer)
        if head is not None:
            self._hooks.append(head.register_forward_pre_hook(lambda *_: self._enter("loss")))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                place = math.inf if shallow is None else shallow.place(name)
                taken = partial(self._take_gradient, place=place)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(taken))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def seen(self, func: Any, out: Any) -> None:
        tree_map_only(Tensor, self._note, out)

    def end_of_forward(self) -> None:
        measured: dict[str, int] = {}
        for size, scope in self._live.values():
            if scope == "loss":
                self.result.loss += size
            elif scope:
                measured[scope] = measured.get(scope, 0) + size
        self.result.layers = measured if self._shallow is None else self._shallow.layers(measured)
        self.result.saved = self._total + sum(self.result.layers.values()) - sum(measured.values())
        self._scope = ""

    def end_of_backward(self) -> None:
        kept: list[tuple[int, int, int]] = []
        for live, done, of_loss, place in reversed(self._peaks):
            if self._shallow is not None:
                # Below the layer whose turn it is, nothing is released yet; above it, gradients are made.
                own, values = self._shallow, self._shallow.values
                live += sum(self.result.layers[f"{own.path}.{i}"] for i in values if i < place)
                done += sum(size for i, size in values.items() if i > place)
            if not kept or live > kept[-1][0]:
                kept.append((live, done, of_loss))
        self.result.points = tuple(reversed(kept))

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._weights:
            return
        size = storage.nbytes()
        self._live[key] = (size, self._scope)
        weakref.finalize(storage, self._release, key)
        self._total += size
        if self._scope == "loss":
            self._loss += size
        if self._total > self._peaks[-1][0]:
            self._peaks[-1] = (self._total, self._done, self._loss, self._place)

    def _release(self, key: int) -> None:
        size, scope = self._live.pop(key, (0, ""))
        self._total -= size
        if scope == "loss":
            self._loss -= size

    def _take_gradient(self, parameter: Tensor, *, place: float) -> None:
        """A finished gradient is where its placement puts it: not ours."""
        self._done += parameter.numel()
        self._place = min(self._place, place)
        parameter.grad = None
        self._peaks.append((self._total, self._done, self._loss, self._place))

    def _watch_layer(self, name: str, layer: nn.Module) -> None:
        before: list[str] = []

        def enter(*_: Any) -> None:
            before.append(self._scope)
            self._enter(name)

        def leave(*_: Any) -> None:
            self._enter(before.pop() if before else "")

        self._hooks += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]

    def _enter(self, scope: str) -> None:
        self._scope = scope


def _any_grouped_mm(left: Tensor, right: Tensor, *others: Any, **named: Any) -> Tensor:
    """The product of experts for shapes alone: torch's rule for fake tensors knows bfloat16 only, its kernels more."""
    exact = left.dtype
    half = (left.to(torch.bfloat16), right.to(torch.bfloat16))
    return torch.ops.aten._grouped_mm.default(*half, *others, **named).to(exact)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
