"""How logits are asked of any causal LM: which inputs its forward takes, and its router loss if it has one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel


class LogitsForward:
    """Calls a model, or its DDP or DeepSpeed wrapper, without labels: the loss is computed outside, as a token sum.

    Without labels a model adds nothing to its loss and returns the router's balancing loss as it is, so that each term
    can be weighted by tokens here. (Left to the model, the router loss is multiplied by the number of micro-batches.)

    Raises:
        ValueError: the model computes a router loss, but no coefficient for it was found on the model or its config.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        self._accepted = None if takes_any else set(parameters)
        self._router_coefficient = router_coefficient(model)
        # output_router_logits makes the model compute its router loss; False or absent: it has none
        self._has_router_loss = bool(getattr(model.config.get_text_config(), "output_router_logits", False))
        if self._has_router_loss and self._router_coefficient is None:
            raise ValueError(
                f"{type(model).__name__} has output_router_logits=true, but neither the model nor its config has "
                "router_aux_loss_coef. Set output_router_logits to false in config_overrides to train without it."
            )
        extra = {
            "use_cache": False,
            "output_router_logits": True if self._has_router_loss else None,
            "return_dict": True,
        }
        self._extra = {name: value for name, value in extra.items() if name in parameters and value is not None}

    def __call__(self, model: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
        """Model output with `.logits` [B, T, V]. Inputs that the forward does not know (position_ids) are left out."""
        known = inputs if self._accepted is None else {k: v for k, v in inputs.items() if k in self._accepted}
        return model(**(self._extra | dict(known)))

    def router_loss(self, outputs: Any, like: torch.Tensor) -> torch.Tensor:
        """Coefficient times the router's balancing loss of this forward pass, a 0-d tensor; 0 where there is none."""
        auxiliary = getattr(outputs, "aux_loss", None)
        if not self._has_router_loss or not isinstance(auxiliary, torch.Tensor) or not self._router_coefficient:
            return like.new_zeros(())
        return (self._router_coefficient * auxiliary).to(like)


def router_coefficient(model: PreTrainedModel) -> float | None:
    """The weight that this model's own loss gives to its router loss, None if it has no such thing."""
    for owner in (model, model.config.get_text_config()):
        value = getattr(owner, "router_aux_loss_coef", None)
        if isinstance(value, int | float):
            return float(value)
    return None
