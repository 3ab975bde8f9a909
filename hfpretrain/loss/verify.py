"""Is the loss at the head this model's loss? Measured on the model at hand, never looked up in a list of names.

What a model does between its head's scores and its logits (scale, softcap, a padded vocabulary cut off) is found by
letting the head answer with known numbers and looking at what comes out. Then loss and gradients at the head are
compared with those that autograd finds through the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfpretrain.errors import Problem
from hfpretrain.loss.head import head_sums
from hfpretrain.loss.liger import liger_can, liger_sums
from hfpretrain.loss.sums import IGNORE_INDEX, LogitTransform, LossSums, count_targets, logits_sums, shift_labels

if TYPE_CHECKING:
    from hfpretrain.loss.fuse import FusedLoss

_ROWS, _TOKENS, _SEED = 2, 16, 20260101
_SEEN = 8  # tokens that stay when those behind them are changed
_Z_LOSS_WEIGHT = 1e-2  # large enough that a wrong z-loss shows
_SAME = 1e-4  # relative difference of float32 results; agreeing models reach 1e-6
_ROUNDINGS = 8.0  # for half precision: so many roundings of its last digit
_NEVER = -1e30  # a logit below this is masked: no probability in any float type


@dataclass(frozen=True)
class Verdict:
    """How the loss of a model is computed.

    Attributes:
        path: "fused": at the head, no logits are kept; "logits": from the model's final logits; "refused": neither is
            this model's loss.
        reason: why, a clause.
        difference: largest relative difference that was measured on this path: of the loss and, fused, of the
            gradients of hidden states and head; NaN where nothing could be compared.
        transform: what the model does to the head's scores; None unless fused.
        kernel: what computes it there, `head_sums` or on CUDA `liger_sums`.
        own_loss: what the model itself makes of the same labels, nats per token, without router loss; None if it
            makes nothing of them. It may differ, where a model is trained on more than the next token.
        our_loss: token-mean cross-entropy from its logits.
    """

    path: Literal["fused", "logits", "refused"]
    reason: str
    difference: float = float("nan")
    transform: LogitTransform | None = None
    kernel: Callable[..., LossSums] = head_sums
    own_loss: float | None = None
    our_loss: float | None = None

    def __str__(self) -> str:
        where = {"fused": "at the head, without logits", "logits": "from the logits", "refused": "cannot be computed"}
        text = f"{where[self.path]}: {self.reason}"
        own, ours = self.own_loss, self.our_loss
        if own is not None and ours is not None and abs(own - ours) > 1e-2 * abs(ours):
            text += f"; the model's own loss is another: {own:.4f} nats per token, ours {ours:.4f}"
        return text

    def problem(self, model_name: str) -> Problem:
        return Problem(
            what=f"the next-token loss of {model_name} cannot be computed right",
            given=self.reason,
            source="model arguments",
            remedy="another architecture, or a configuration of it that is a causal language model (is_decoder: true)",
        )


@torch.no_grad()
def verify(fused: FusedLoss, forward: nn.Module, device: torch.device) -> Verdict:
    """Look at the model's own logits, then try the loss at the head against them; see `FusedLoss.verify`."""
    with _evaluating(forward):
        batch = _Batch.on(device, fused.model.config.get_text_config().vocab_size)
        try:
            logits = fused.forward_logits(forward, batch.inputs).logits
            changed = fused.forward_logits(forward, batch.with_later_tokens_changed).logits
        except Exception as error:
            return Verdict("refused", f"its forward pass fails on {_ROWS} x {_TOKENS} tokens: {_first_line(error)}")
        if wrong := _not_causal(logits, changed):
            return Verdict("refused", wrong)
        batch.labels.clamp_(max=_visible(logits) - 1)  # a padded vocabulary may have no such token
        ours = logits_sums(logits, batch.labels).cross_entropy / count_targets(batch.labels)
        losses: dict[str, Any] = {"own_loss": _own_loss(fused, forward, batch), "our_loss": float(ours)}
        try:
            transform = _measure_transform(fused, forward, batch)
            kernel, difference, by = _try_kernels(fused, batch, transform)
            with fused.on_trial(transform, kernel):
                whole = forward(**batch.inputs, labels=batch.labels)
            rounding = abs(float(whole.cross_entropy / whole.target_tokens / ours) - 1.0)
        except _NotFusableError as why:
            return Verdict("logits", str(why), **losses)
        except Exception as error:
            return Verdict("logits", f"the trial of the loss at the head fails: {_first_line(error)}", **losses)
    if not rounding <= (limit := _limit(logits)):
        reason = f"the loss at the head differs from the one from its logits by {rounding:.1e} (limit {limit:.0e})"
        return Verdict("logits", reason, difference=rounding, **losses)
    reason = f"{by}the head's scores are its logits {transform}; loss and gradients agree to {difference:.1e}"
    return Verdict("fused", reason, difference=difference, transform=transform, kernel=kernel, **losses)


class _NotFusableError(Exception):
    """Why the loss cannot be computed at this model's head."""


@dataclass(frozen=True)
class _Batch:
    inputs: dict[str, Tensor]
    with_later_tokens_changed: dict[str, Tensor]
    labels: Tensor

    @classmethod
    def on(cls, device: torch.device, vocabulary: int) -> _Batch:
        generator = torch.Generator().manual_seed(_SEED)
        tokens = torch.randint(0, vocabulary, (_ROWS, _TOKENS), generator=generator)
        changed = tokens.clone()
        changed[:, _SEEN:] = (changed[:, _SEEN:] + vocabulary // 2) % vocabulary
        labels = tokens.clone()
        labels[0, :3] = labels[1, 9] = IGNORE_INDEX
        return cls({"input_ids": tokens.to(device)}, {"input_ids": changed.to(device)}, labels.to(device))


def _not_causal(logits: Any, changed: Tensor) -> str | None:
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != (_ROWS, _TOKENS):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        return f"its logits are {shape}, expected ({_ROWS}, {_TOKENS}, vocabulary) for {_ROWS} x {_TOKENS} tokens"
    if logits.isnan().any():
        return "its logits are not numbers"
    visible = logits[..., : _visible(logits)].float()
    difference = (visible - changed[..., : visible.shape[-1]].float())[:, :_SEEN].abs().max()
    if bool(difference != 0):  # a head of zeros, whose logits are all equal, has no deviation to divide by
        difference = difference / visible.std()
    if not float(difference) <= _limit(logits):
        return (
            "its logits depend on tokens that follow, or on chance: other tokens behind the first "
            f"{_SEEN} of {_TOKENS} change theirs by {float(difference):.1e} of their standard deviation"
        )
    return None


def _visible(logits: Tensor) -> int:
    """Number of leading columns before those of a padded vocabulary that are masked everywhere."""
    shown = (logits > _NEVER).flatten(0, -2).any(dim=0)
    count = int(shown.sum())
    return count if bool(shown[:count].all()) else len(shown)


def _own_loss(fused: FusedLoss, forward: nn.Module, batch: _Batch) -> float | None:
    """The model's own loss for labels, without its router loss."""
    try:
        with fused.bypassed():
            outputs = fused.forward_logits(forward, {**batch.inputs, "labels": batch.labels})
        return float(outputs.loss) - float(fused.forward_logits.router_loss(outputs, like=outputs.loss))
    except Exception:  # some need more than labels, some compute no loss: both are fine, ours does not depend on it
        return None


def _measure_transform(fused: FusedLoss, forward: nn.Module, batch: _Batch) -> LogitTransform:
    """Find scale, softcap and vocabulary from what the model makes of known scores."""
    if fused.head is None:
        raise _NotFusableError("its head is no module with one matrix and at most a bias")
    scores = _known_scores(fused.vocabulary).to(batch.labels.device)
    calls: list[tuple[int, ...]] = []

    def answer(_: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        calls.append(tuple(hidden.shape[:-1]))
        return scores

    with fused.head_answers(answer):
        logits = fused.forward_logits(forward, batch.inputs).logits.double()
    if calls != [(_ROWS, _TOKENS)]:
        raise _NotFusableError(f"its forward asks the head for positions {calls}, expected [({_ROWS}, {_TOKENS})]")
    kept = _visible(logits)
    x, y = scores[..., :kept], logits[..., :kept]
    smallest, largest = x.abs().argmin(), x.abs().argmax()
    scale = float(y.flatten()[smallest] / x.flatten()[smallest])
    bound = float(y.flatten()[largest].abs())
    capped = bound < 0.5 * abs(scale * float(x.flatten()[largest]))
    transform = LogitTransform(
        scale=1.0 if abs(scale - 1.0) < 1e-7 else scale,
        softcap=bound if capped else None,
        vocabulary=None if kept == fused.vocabulary else kept,
    )
    explained = x.clone()
    transform.apply_(explained)
    missed = float(((y - explained).abs() / explained.abs().clamp(min=1e-9)).max())
    if not missed < 1e-5:
        raise _NotFusableError(f"what it does between head and logits is neither scale nor softcap ({missed:.1e} off)")
    return transform


def _known_scores(vocabulary: int) -> Tensor:
    """Float64 [rows, tokens, V] of both signs, from 1e-4 to 1e6 in size, in a random order."""
    generator = torch.Generator().manual_seed(_SEED)
    total = _ROWS * _TOKENS * vocabulary
    sizes = torch.logspace(-4, 6, total, dtype=torch.float64)
    signs = torch.randint(0, 2, (total,), generator=generator) * 2 - 1
    return (sizes * signs)[torch.randperm(total, generator=generator)].view(_ROWS, _TOKENS, vocabulary)


def _try_kernels(
    fused: FusedLoss, batch: _Batch, transform: LogitTransform
) -> tuple[Callable[..., LossSums], float, str]:
    """The first kernel that agrees with the model, how well, and what to say about it."""
    remark = ""
    if liger_can(batch.labels.device, fused.head.weight.dtype, transform):
        try:
            return liger_sums, _gradient_difference(fused, batch, transform, liger_sums), "with liger-kernel; "
        except Exception as error:
            remark = f"not with liger-kernel ({_first_line(error)}); "
    return head_sums, _gradient_difference(fused, batch, transform, head_sums), remark


def _gradient_difference(
    fused: FusedLoss, batch: _Batch, transform: LogitTransform, kernel: Callable[..., LossSums]
) -> float:
    """Largest relative difference of loss, gradient of what goes into the head, of its weight and bias, in float32.

    Expected is what autograd makes of the model's own code from the head on, with the z-loss written out. Not through
    the wrapper: DeepSpeed's engine takes any backward pass through its outputs for one that it must reduce.
    """
    leaves: dict[str, Tensor] = {}

    def own_head_of_leaves(own: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        torch.set_grad_enabled(True)  # for the code after the head as well, until the caller's no_grad ends
        leaves["hidden"] = hidden.detach().float().requires_grad_()
        for name, parameter in fused.head._parameters.items():
            if parameter is not None:
                leaves[name] = parameter.detach().float().clone().requires_grad_()
        with torch.autocast(hidden.device.type, enabled=False), _replaced(fused.head, leaves):
            return own(leaves["hidden"])

    with torch.no_grad(), fused.head_answers(own_head_of_leaves):
        logits = fused.forward_logits(fused.model, batch.inputs).logits
        logits = logits[..., : _visible(logits)].flatten(0, 1).float()
        targets = shift_labels(batch.labels).flatten()
        total = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        total = total + _Z_LOSS_WEIGHT * (logits.logsumexp(-1).square() * (targets != IGNORE_INDEX)).sum()
        others = [parameter for parameter in fused.model.parameters() if parameter.requires_grad]
        with torch.autocast(total.device.type, enabled=False):
            expected = torch.autograd.grad(total, [*leaves.values(), *others], allow_unused=True)
    if any(gradient is not None for gradient in expected[len(leaves) :]):
        raise _NotFusableError("parameters stand between its head and its logits")
    with torch.enable_grad():
        ours = kernel(
            leaves["hidden"].flatten(0, -2),
            leaves["weight"],
            targets,
            bias_V=leaves.get("bias"),
            z_loss_weight=_Z_LOSS_WEIGHT,
            transform=transform,
        )
        made = torch.autograd.grad(ours.total, list(leaves.values()))  # only scales what is there
    pairs = [(ours.total.detach(), total.detach()), *zip(made, expected[: len(leaves)], strict=True)]
    difference = max(float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)) for a, b in pairs)
    if not difference <= (limit := _limit(logits.detach())):
        raise _NotFusableError(
            f"loss or gradient at its head differs from its own by {difference:.1e} (limit {limit:.0e})"
        )
    return difference


def _limit(logits: Tensor) -> float:
    """How much may differ by rounding: logits that fit into half precision without loss were computed in it."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(logits, logits.to(dtype).to(logits.dtype)):
            return _ROUNDINGS * torch.finfo(dtype).eps
    return _SAME


@contextmanager
def _replaced(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    own = dict(module._parameters)
    try:
        for name in own:
            if name in tensors:
                module._parameters[name] = tensors[name]  # type: ignore[assignment]
        yield
    finally:
        for name, parameter in own.items():
            module._parameters[name] = parameter


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode for all modules; each gets its own mode back."""
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for child, mode in modes.items():
            child.training = mode


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]
