"""What a forward and backward pass allocates beside weights and gradients, without computing or allocating anything.

The model runs on fake tensors: shapes, types and the order of allocations and releases are those of the real pass, the
values do not exist. A mode that sees each operation adds up the storages that it makes and takes off those that are
released. So the count holds what autograd keeps for the backward pass and what is there for a moment only; memory that
a kernel takes inside itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


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


@contextmanager
def without_memory() -> Iterator[None]:
    """Tensors that are made inside have no memory; they claim to be on the CPU, so that its kernels are chosen."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def pass_memory(model: nn.Module, loss: Callable[[], Tensor], *, head: nn.Module | None = None) -> PassMemory:
    """The memory of `loss()` and its backward pass.

    Args:
        model: made inside `without_memory`, in the mode it is to be measured in (`train()`, checkpointing).
        loss: runs the model and returns a scalar; called once, inside `without_memory` as well.
        head: the module at which the loss begins.

    Raises:
        NotMeasurableError: the pass depends on values (routing by a loop over chosen tokens, `.item()`).
    """
    counter = _Counter(model, head)
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


def operations_on(width: int, run: Callable[[], Any]) -> set[str]:
    """Names of the operations in `run()` whose result has no values and a last dimension of `width`, such as tanh."""
    seen: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.numel() == 0 and out.shape[-1:] == (width,):
                seen.add(str(func.overloadpacket).rpartition(".")[2])
            return out

    with Watch():
        run()
    return seen


class _Counter(TorchDispatchMode):
    """Live bytes by what was running when they were made."""

    def __init__(self, model: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.result = PassMemory()
        self._live: dict[int, tuple[int, str]] = {}
        self._weights = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._total = self._loss = self._done = 0
        self._peaks: list[tuple[int, int, int]] = [(0, 0, 0)]  # one for each number of finished gradients
        self._scope = ""
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            if isinstance(module, nn.ModuleList):
                for index, layer in enumerate(module):
                    self._watch_layer(f"{name}.{index}", layer)
        if head is not None:
            self._hooks.append(head.register_forward_pre_hook(lambda *_: self._enter("loss")))
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take_gradient))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            func = _any_grouped_mm
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, out)
        return out

    def end_of_forward(self) -> None:
        self.result.saved = self._total
        for size, scope in self._live.values():
            if scope == "loss":
                self.result.loss += size
            elif scope:
                self.result.layers[scope] = self.result.layers.get(scope, 0) + size
        self._scope = ""

    def end_of_backward(self) -> None:
        kept: list[tuple[int, int, int]] = []
        for point in reversed(self._peaks):
            if not kept or point[0] > kept[-1][0]:
                kept.append(point)
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
            self._peaks[-1] = (self._total, self._done, self._loss)

    def _release(self, key: int) -> None:
        size, scope = self._live.pop(key, (0, ""))
        self._total -= size
        if scope == "loss":
            self._loss -= size

    def _take_gradient(self, parameter: Tensor) -> None:
        """A finished gradient is where its placement puts it: not ours."""
        self._done += parameter.numel()
        parameter.grad = None
        self._peaks.append((self._total, self._done, self._loss))

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
