"""What the modules of a model put out, and what they are fed with: the material of the coordinate check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Activation:
    """One module in one forward pass, in float32.

    Attributes:
        output: the first floating-point tensor that it returns.
        fed: the floating-point tensor that it was called with; None where there was none or several. A module that
            returns what one of its children made has that child's.
        fed_by: the module that made it; "" where none returned just that.
    """

    output: Tensor
    fed: Tensor | None
    fed_by: str


def activations(model: nn.Module, tokens: Tensor) -> dict[str, Activation]:
    """Module name -> its activation in `model(input_ids=tokens)`, in the order of the forward pass."""
    found: dict[str, Activation] = {}
    made: dict[int, tuple[Tensor, int, str]] = {}  # returned tensors are held, so that no id is used twice

    def maker(tensor: Tensor) -> str:
        _, version, name = made.get(id(tensor), (None, -1, ""))
        return name if version == tensor._version else ""  # else something was done to it since, in place

    def note(name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple | list) else [output]
            returned = next((x for x in outputs if _is_float(x)), None)
            if returned is None:
                return
            inputs = [x for x in tree_leaves((args, kwargs)) if _is_float(x)]
            fed, fed_by = (inputs[0].detach().float().clone(), maker(inputs[0])) if len(inputs) == 1 else (None, "")
            if child := maker(returned):
                fed, fed_by = found[child].fed, found[child].fed_by
            made[id(returned)] = (returned, returned._version, name)
            found[name] = Activation(returned.detach().float().clone(), fed, fed_by)

        return hook

    handles = [
        module.register_forward_hook(note(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        with torch.no_grad():
            model(input_ids=tokens)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
