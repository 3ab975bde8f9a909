"""Which way keeps the documents of a row apart on this model: each is measured, the first that does is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hfpretrain.attention import TORCH_VARLEN
from hfpretrain.data.collator import PackedCollator
from hfpretrain.data.isolation import Leak, Way, measure_leak, measure_single
from hfpretrain.errors import Problem
from hfpretrain.loss.forward import LogitsForward


@dataclass(frozen=True)
class Separation:
    """What was found.

    Attributes:
        way: the first that isolates; None if no way does.
        tried: one line for each way that was measured, the chosen one last.
    """

    way: Way | None
    tried: tuple[str, ...]

    def problem(self, model_name: str) -> Problem:
        """What to say where no way isolates."""
        remedy = "packing: single for one document a row, or isolate_documents: false to leave them unseparated"
        if all(line.startswith("by single") for line in self.tried):
            what = f"{model_name} makes something else of a document in a padded batch than of the document alone"
            return Problem(what, "; ".join(self.tried), "packing", "another architecture: padding must not matter")
        what = f"{model_name} lets a document of a row see the one before it"
        return Problem(what, "; ".join(self.tried), "isolate_documents", remedy)


def separate(
    ways: Sequence[Way],
    causal_lm: PreTrainedModel,
    *,
    wrapped: torch.nn.Module,
    logits: Callable[[torch.nn.Module, Mapping[str, Any]], torch.Tensor],
    device: torch.device,
) -> Separation:
    """Measure the ways in turn, in eval mode, through any wrapper; the model gets the attention of the chosen one.

    Args:
        causal_lm: the model whose attention is changed; where no way isolates, it keeps its own.
        wrapped: what is called: the model or what it is wrapped in. Every rank must call this.
        logits: (wrapped, batch) -> logits [B, T, V].
    """
    own = _attentions(causal_lm)
    eager = causal_lm.config._attn_implementation == "eager"  # adds its mask to the scores
    ways = [replace(way, additive=eager) if way.mechanism == "mask" else way for way in ways]
    tried: list[str] = []
    was_training = wrapped.training
    wrapped.eval()
    try:
        for way in ways:
            try:
                leak = _measure(way, causal_lm, own, lambda batch: logits(wrapped, batch), device)
                tried.append(f"by {way}: {leak.detail}")
                isolated = leak.isolated
            except Exception as error:  # a model that does not take these inputs, or cannot have this attention
                tried.append(f"by {way}: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
                isolated = False
            _restore(own)
            if isolated:
                _set_attention(causal_lm, way.attn_implementation)
                return Separation(way, tuple(tried))
    finally:
        wrapped.train(was_training)
    return Separation(None, tuple(tried))


def assert_isolated(model: PreTrainedModel, collator: PackedCollator | None = None) -> Leak:
    """The verdict on a model that is not wrapped, in eval mode for as long as this takes; its documents must be apart.

    Args:
        collator: `PackedCollator()` if not given.

    Raises:
        AssertionError: documents see each other, or are not what they are alone; with the measured numbers.
    """
    forward = LogitsForward(model)

    def logits(batch: dict[str, Any]) -> torch.Tensor:
        found: torch.Tensor = forward(model, batch).logits
        return found

    was_training = model.training
    model.eval()
    try:
        leak = measure_leak(
            logits,
            vocab_size=model.config.get_text_config().vocab_size,
            device=model.device,
            collator=collator or PackedCollator(),
            alone=logits,
        )
    finally:
        model.train(was_training)
    if not leak.isolated:
        raise AssertionError(f"{type(model).__name__}: {leak.detail}")
    return leak


def _measure(
    way: Way,
    causal_lm: PreTrainedModel,
    own: _Attentions,
    logits: Callable[[dict[str, Any]], torch.Tensor],
    device: torch.device,
) -> Leak:
    """The way must also compute what the model's own attention does for documents alone, given input_ids only."""
    vocab_size = causal_lm.config.get_text_config().vocab_size

    def with_attention(name: str | None) -> Callable[[dict[str, Any]], torch.Tensor]:
        def forward(batch: dict[str, Any]) -> torch.Tensor:
            _restore(own)
            _set_attention(causal_lm, name)
            return logits(batch)

        return forward

    if way.mechanism == "single":
        return measure_single(with_attention(None), vocab_size=vocab_size, device=device)
    if way.attn_implementation is not None and "flash" in way.attn_implementation:
        # Refuses a window that is in the mask only, which flash attention never sees: too wide to show in few tokens.
        with_attention(TORCH_VARLEN)({"input_ids": torch.arange(8, device=device)[None] % vocab_size})
    return measure_leak(
        with_attention(way.attn_implementation),
        vocab_size=vocab_size,
        device=device,
        collator=way.collator(),
        alone=with_attention(None),
    )


_Attentions = list[tuple[PreTrainedConfig, str | None]]


def _attentions(causal_lm: PreTrainedModel) -> _Attentions:
    """The attention of the model and of every model inside it (a text model, an image model), by their configs."""
    configs = {id(m.config): m.config for m in causal_lm.modules() if isinstance(m, PreTrainedModel)}
    pending = list(configs.values())
    while pending:
        config = pending.pop()
        parts = [getattr(config, name, None) for name in config.sub_configs]
        new = {id(part): part for part in parts if isinstance(part, PreTrainedConfig) and id(part) not in configs}
        configs |= new
        pending += new.values()
    return [(config, config._attn_implementation) for config in configs.values()]


def _restore(attentions: _Attentions) -> None:
    """Part by part: a change that the outer model refuses may have changed an inner one (GOT-OCR2)."""
    for config, name in attentions:
        config._attn_implementation_internal = name  # the public setter would set the parts as well


def _set_attention(causal_lm: PreTrainedModel, name: str | None) -> None:
    """Raises ValueError where the model does not take it; None: leave it as it is."""
    if name is None:
        return
    if causal_lm.config._attn_implementation != name:
        causal_lm.set_attn_implementation(name)
    if (now := causal_lm.config._attn_implementation) != name:
        raise ValueError(f"the attention of {type(causal_lm).__name__} is {now} and cannot be changed to {name}")
