"""Put the loss on a model: with labels its forward returns loss sums instead of logits, if that is proven to be right.

The head module learns to answer differently. While the model's own forward runs, the head only notes what goes into
it and returns logits of no positions, so that everything else of the model (router losses, outputs, checkpointing) is
as it was; then the head is called once more, with the targets, and makes the loss where its weight is: under ZeRO-3 a
weight is only whole inside its own module's forward.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hfpretrain.errors import refuse
from hfpretrain.loss.forward import LogitsForward
from hfpretrain.loss.head import head_nats
from hfpretrain.loss.sums import IGNORE_INDEX, LogitTransform, LossSums, logits_nats, logits_sums, shift_labels
from hfpretrain.loss.verify import Verdict, verify

HeadAnswer = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


@dataclass
class LossOutput(ModelOutput):
    """What a model with a fused loss returns for labels: 0-d tensors; only `loss` carries a gradient.

    Attributes:
        loss: (cross_entropy + z_loss_weight * z_square + router) / num_items_in_batch, in nats per target token; the
            number of targets of this batch where num_items_in_batch is not given. Without the z-loss in eval mode.
        cross_entropy, z_square, log_z, logit_max, target_tokens: see `LossSums`.
        router: coefficient * balancing loss * target tokens, so that it weighs the same however a batch is cut.
    """

    loss: Tensor | None = None
    cross_entropy: Tensor | None = None
    z_square: Tensor | None = None
    log_z: Tensor | None = None
    logit_max: Tensor | None = None
    router: Tensor | None = None
    target_tokens: Tensor | None = None


def fuse_loss(model: PreTrainedModel, *, z_loss_weight: float = 1e-4) -> FusedLoss:
    """Give `model` a forward that returns `LossOutput` for labels, verified on a small batch. Undone by `.remove()`.

    Works with a stock Trainer, made afterwards. For a model that is wrapped or partitioned first (DDP, ZeRO), make
    `FusedLoss(model)` before and call its `verify(wrapped_model)` after that.

    Raises:
        ConfigError: neither path computes the loss of this model right; says why.
    """
    fused = FusedLoss(model, z_loss_weight=z_loss_weight)
    verdict = fused.verify()
    if verdict.path == "refused":
        fused.remove()
        refuse([verdict.problem(type(model).__name__)])
    return fused


class FusedLoss:
    """The loss on one model instance; no other instance and no class of transformers is touched.

    Attributes:
        verdict: how the loss is computed and why; None until `verify` was called.
    """

    def __init__(self, model: PreTrainedModel, *, z_loss_weight: float = 1e-4) -> None:
        before: FusedLoss | None = model.__dict__.get("_fused_loss")
        if before is not None:
            before.remove()
        self.model = model
        self.z_loss_weight = z_loss_weight
        self.verdict: Verdict | None = None
        self.forward_logits = LogitsForward(model)
        self.answer: HeadAnswer | None = None  # instead of the head's own
        self.head = _plain_head(model)
        self._original = model.forward
        self._active = True
        if self.head is not None:
            own = type(self.head)
            self.head.__class__ = type(own.__name__, (_LossHead, own), {"__module__": own.__module__})
            self.head.__dict__["_fused_loss"] = self
        model.__dict__["_fused_loss"] = self
        self._forward = _forward_like(self._original)
        model.forward = types.MethodType(self._forward, model)

    def verify(self, wrapped: nn.Module | None = None, *, device: torch.device | None = None) -> Verdict:
        """Compare with the model's own logits on a few tokens, through `wrapped` if given, and decide the path.

        Under DDP or ZeRO every rank must call this; all see the same tokens and the global random state is not used.
        `device` is where inputs belong, if that is not where the parameters are (offload).
        """
        self.verdict = None
        forward = self.model if wrapped is None else wrapped
        self.verdict = verify(self, forward, self.model.device if device is None else device)
        return self.verdict

    def remove(self) -> None:
        """Give the model its own forward and head back.

        Raises:
            RuntimeError: something has wrapped the forward since (accelerate's mixed precision does); unwrap it first.
        """
        if getattr(self.model.forward, "__func__", None) is not self._forward:
            raise RuntimeError(
                f"the forward of this {type(self.model).__name__} was wrapped after the loss was put on it; unwrap it "
                "first, for example with accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
            )
        del self.model.forward
        if self.model.forward != self._original:  # an instance's own before
            self.model.forward = self._original
        if self.head is not None:
            self.head.__class__ = type(self.head).__mro__[2]
            del self.head._fused_loss
        del self.model._fused_loss

    @contextmanager
    def head_answers(self, answer: HeadAnswer) -> Iterator[None]:
        """While this lasts, `answer(the head's own forward, hidden)` is what the head returns."""
        self.answer = answer
        try:
            yield
        finally:
            self.answer = None

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """While this lasts, the model's own forward gets the labels."""
        self._active = False
        try:
            yield
        finally:
            self._active = True

    @contextmanager
    def on_trial(self, transform: LogitTransform, kernel: Callable[..., LossSums]) -> Iterator[None]:
        """While this lasts, the loss is computed at the head, verified or not."""
        before, self.verdict = self.verdict, Verdict("fused", "on trial", transform=transform, kernel=kernel)
        try:
            yield
        finally:
            self.verdict = before

    def hidden_states(self, forward: Callable[..., Any], inputs: Mapping[str, Any]) -> tuple[list[Tensor], Any]:
        """What goes into the head in this forward pass, once per call of the head; and the outputs, without logits."""
        seen: list[Tensor] = []

        def note(_: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
            seen.append(hidden)
            return hidden.new_empty(*hidden.shape[:-2], 0, self.vocabulary)

        with self.head_answers(note):
            outputs = self.forward_logits(forward, inputs)
        return seen, outputs

    @property
    def vocabulary(self) -> int:
        """Scores that the head makes, a padded head's own number."""
        weight = self.head.weight
        return int(getattr(weight, "ds_shape", weight.shape)[0])

    def sums(self, labels: Tensor, inputs: Mapping[str, Any]) -> tuple[LossSums, Any]:
        """Loss sums and the model's other outputs, at the head or from the logits as the verdict says."""
        if self._verified.path != "fused":
            outputs = self.forward_logits(self._original, inputs)
            return logits_sums(outputs.logits, labels, z_loss_weight=self._weight), outputs
        (hidden,), outputs = self.hidden_states(self._original, inputs)
        targets = shift_labels(labels, hidden.shape[-2]).to(hidden.device).flatten()
        return LossSums(*self.head(hidden.flatten(0, -2), targets)), outputs

    @torch.no_grad()
    def nats(self, forward: Callable[..., Any], inputs: Mapping[str, Any], targets: Tensor) -> Tensor:
        """-log p of every target, row by row, float32 [targets that are not `IGNORE_INDEX`] (float64 for float64).

        Only those positions go through the head, a chunk at a time; where the verdict is not "fused", the model makes
        all its logits itself.

        Args:
            forward: the model or its wrapper; eval mode is the caller's business.
            targets: [B, T], what each position is to predict (not shifted).
        """
        how = self._verified
        if how.path != "fused":
            return logits_nats(self.forward_logits(forward, inputs).logits, targets)
        found: list[Tensor] = []

        def answer(_: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
            weight, bias = self.head.weight, self.head._parameters.get("bias")
            on_device = targets.to(hidden.device)
            where = on_device != IGNORE_INDEX
            found.append(head_nats(hidden[where], weight, on_device[where], bias_V=bias, transform=how.transform))
            return hidden.new_empty(*hidden.shape[:-2], 0, self.vocabulary)

        with self.head_answers(answer):
            self.forward_logits(forward, inputs)
        (nats,) = found
        return nats

    @property
    def _verified(self) -> Verdict:
        if self.verdict is None:
            raise RuntimeError("the loss of this model was not verified yet: call FusedLoss.verify() first")
        return self.verdict

    @property
    def _weight(self) -> float:
        return self.z_loss_weight if self.model.training else 0.0

    def output(self, labels: Tensor, num_items_in_batch: Tensor | int | None, inputs: Mapping[str, Any]) -> LossOutput:
        sums, outputs = self.sums(labels, inputs)
        router = self.forward_logits.router_loss(outputs, like=sums.total) * sums.target_tokens
        items = sums.target_tokens if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        loss = (sums.total + router) / items.to(sums.total.device).clamp(min=1)
        parts = {name: getattr(sums, name) for name in ("cross_entropy", "z_square", "log_z", "logit_max")}
        return LossOutput(loss=loss, router=router.detach(), target_tokens=sums.target_tokens, **parts)


class _LossHead(nn.Module):
    """Comes before the head's own class. Under ZeRO-3 its weight is whole only while this runs."""

    _fused_loss: FusedLoss
    weight: Tensor

    @torch.compiler.disable
    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        fused = self._fused_loss
        if targets is not None:
            how = cast(Verdict, fused.verdict)
            sums = how.kernel(
                hidden,
                self.weight,
                targets,
                bias_V=self._parameters.get("bias"),
                z_loss_weight=fused._weight,
                transform=how.transform,
            )
            # a tuple: DeepSpeed's hooks find the tensor whose backward they precede
            return sums.total, sums.cross_entropy, sums.z_square, sums.log_z, sums.logit_max, sums.target_tokens
        return super().forward(hidden) if fused.answer is None else fused.answer(super().forward, hidden)


def _plain_head(model: PreTrainedModel) -> Any:
    """The model's head if it is a module with one matrix and perhaps a bias, else None."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module) or not {"weight"} <= set(head._parameters) <= {"weight", "bias"}:
        return None
    weight = head._parameters["weight"]
    matrix = weight is not None and len(getattr(weight, "ds_shape", weight.shape)) == 2
    return head if matrix and not list(head.children()) else None


def _forward_like(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model that carries a fused loss; without labels its own.

    It refers to its model by `self` only, so that a copy of the model runs on the copy. Its signature has what a
    Trainer looks for: the columns of the data, and **kwargs for num_items_in_batch.
    """

    @torch.compiler.disable(recursive=False)
    def forward(
        self: Any, *args: Any, labels: Tensor | None = None, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        fused: FusedLoss = self.__dict__["_fused_loss"]
        own = fused._original
        if labels is None or not fused._active:
            return own(*args, **(kwargs if labels is None else kwargs | {"labels": labels}))
        named = inspect.signature(own).bind_partial(*args).arguments if args else {}
        return fused.output(labels, num_items_in_batch, named | kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = dict(inspect.signature(original).parameters)
    named = [p for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    if "labels" not in parameters:
        named.append(inspect.Parameter("labels", inspect.Parameter.KEYWORD_ONLY, default=None))
    rest = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
    forward.__signature__ = inspect.Signature([own, *named, rest])
    return cast(Callable[..., Any], forward)
