"""The memory of a run from its configuration: shapes from a model on the meta device, activations from a fake pass."""

from __future__ import annotations

import copy
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_utils import set_zero3_state

from hfpretrain.activation_memory import NotMeasurableError, operations_on, pass_memory, without_memory
from hfpretrain.attention import TORCH_VARLEN, register_torch_varlen
from hfpretrain.errors import refuse
from hfpretrain.loss import FusedLoss
from hfpretrain.loss.head import head_sums
from hfpretrain.loss.sums import LogitTransform
from hfpretrain.loss.verify import Verdict
from hfpretrain.planning.memory import Activations, MemoryEstimate
from hfpretrain.planning.optimizer_state import optimizer_kind
from hfpretrain.planning.placement import Model, Parameter, Placement
from hfpretrain.shallow import Shallow, shorten
from hfpretrain.training.optimizer import parameter_groups

LEFT_OUT = (
    "CUDA's context and NCCL's buffers (some hundred MiB to 2 GiB a device), fragmentation of torch's allocator",
    "work space inside kernels, such as cuBLAS's",
    "building the model and loading a checkpoint, which may need more for a moment; evaluation",
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHUNK_BYTES = {"cpu": 2**27, "cuda": 2**30}  # of `loss.head`


def estimate_memory(
    config: PreTrainedConfig | None = None,
    *,
    placement: Placement,
    parameters: int | None = None,
    sequence_length: int = 1024,
    rows: int = 1,
    micro_batches: int = 2,
    optimizer: str = "adamw_torch_fused",
    gradient_checkpointing: bool = False,
    fused_loss: bool = True,
    attn_implementation: str | None = None,
    device: str = "cuda",
) -> MemoryEstimate:
    """What a run takes on one rank. Nothing is allocated and nothing computed.

    Args:
        config: the model's; None: only a number of `parameters` is known, and activations are left out.
        rows: per_device_train_batch_size.
        micro_batches: of a step and rank; with one, gradients of earlier ones do not lie beside the activations.
        optimizer: as `--optim`; where its state is not known here, AdamW's is counted and `left_out` says so.
        fused_loss: the loss is computed at the head; else the model makes all its logits.
        attn_implementation: None or "auto": attention without a mask, as `torch_varlen` and flash-attn have it.
        device: "cuda" or "cpu", whose chunk of the loss is taken.

    Raises:
        ConfigError: what `placement.problems()` finds.
    """
    refuse(placement.problems())
    left_out = list(LEFT_OUT)
    kind = optimizer_kind(optimizer)
    if kind is None:
        left_out.append(f"the state of {optimizer}, which is not known here: AdamW's is counted in its place")
    name = "adamw" if kind is None else kind.name
    if config is None:
        left_out.append("activations, logits and buffers: a number of parameters has none; name a model")
        model = Model((Parameter((parameters or 0,)),))
        return MemoryEstimate(model, placement, name, micro_batches, None, None, tuple(left_out))
    measure = _Measure(
        config, sequence_length, placement, gradient_checkpointing, fused_loss, attn_implementation, device
    )
    activations = None
    try:
        activations = measure(rows)
    except NotMeasurableError as error:
        left_out.append(f"activations and logits: a pass without values cannot be made here ({error})")
    own = None if activations is None else lru_cache(maxsize=None)(measure)
    return MemoryEstimate(model_shapes(config), placement, name, micro_batches, activations, own, tuple(left_out))


def model_shapes(config: PreTrainedConfig) -> Model:
    """Parameters of a configuration in the order of the run's optimizer groups, and the size of its buffers."""
    model = _build(config, torch.device("meta"), None)
    names = {id(p): n for n, p in model.named_parameters()}
    found = []
    for index, group in enumerate(parameter_groups(model, weight_decay=0.0)):
        for p in group["params"]:
            hidden = group["name"] == "matrices" and p.dim() == 2 and p is not _head_weight(model)
            embedding = group["name"] == "embeddings"
            found.append(Parameter(tuple(p.shape), index, names[id(p)].rpartition(".")[0], hidden, embedding))
    frozen = [p for p in model.parameters() if not p.requires_grad]
    found += [Parameter(tuple(p.shape), None, names[id(p)].rpartition(".")[0]) for p in frozen]
    buffers = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in model.buffers()}
    return Model(tuple(found), sum(buffers.values()))


@dataclass(eq=False)
class _Measure:
    """A run's pass, for any number of rows."""

    config: PreTrainedConfig
    sequence_length: int
    placement: Placement
    gradient_checkpointing: bool
    fused_loss: bool
    attn_implementation: str | None
    device: str

    def __post_init__(self) -> None:
        self._memoryless = without_memory()
        asked = self.attn_implementation
        varlen = asked in (None, "auto") or str(asked).startswith("flash")
        first = TORCH_VARLEN if varlen else asked
        # What one way cannot do, the next may: the whole model where it does not like to lose layers, the model's
        # own attention where ours refuses what it asks for.
        self._ways = [(first, True), (first, False), (None, True), (None, False)]
        self._built: tuple[PreTrainedModel, Shallow | None] | None = None

    def __call__(self, rows: int) -> Activations:
        while True:
            try:
                if self._built is None:
                    self._built = self._build(*self._ways[0])
                return self._measured(rows, *self._built)
            except NotMeasurableError:
                if len(self._ways) == 1:
                    raise
                del self._ways[0]
                self._built = None

    def _measured(self, rows: int, model: PreTrainedModel, shallow: Shallow | None) -> Activations:
        with self._memoryless, ExitStack() as stack:
            fused = FusedLoss(model, z_loss_weight=1e-4)
            if self.fused_loss and fused.head is not None:
                kernel = partial(head_sums, chunk_bytes=_CHUNK_BYTES[self.device])
                stack.enter_context(fused.on_trial(_transform(model, fused), kernel))
            else:
                fused.verdict = Verdict("logits", "asked for")
            tokens = torch.zeros(rows, self.sequence_length, dtype=torch.int64)
            half = self.placement.zero_stage is None and self.placement.dtype != "float32"

            def loss() -> torch.Tensor:
                batch = {"input_ids": tokens.clone(), "labels": tokens.clone()}
                with torch.autocast("cpu", _DTYPES[self.placement.dtype]) if half else nullcontext():
                    out = model(**batch)
                value: torch.Tensor = out.loss
                return value

            head = model.get_output_embeddings()
            head = head if isinstance(head, nn.Module) else None
            found = pass_memory(model, loss, head=head, shallow=shallow)
        return Activations(rows, found.points, found.saved, found.layers)

    def _build(self, attention: str | None, shallow: bool) -> tuple[PreTrainedModel, Shallow | None]:
        with self._memoryless:
            try:
                model = self._whole(attention)
            except Exception as error:  # each architecture has its own way to refuse an attention, or such tensors
                raise NotMeasurableError(f"it is not built: {type(error).__name__}: {error}") from error
            return model, shorten(model, model.config.get_text_config()) if shallow else None

    def _whole(self, attention: str | None) -> PreTrainedModel:
        register_torch_varlen()
        model = _build(self.config, torch.device("cpu"), attention)
        if self.placement.zero_stage is not None and self.placement.dtype != "float32":
            for parameter in model.parameters():  # DeepSpeed casts parameters and leaves buffers
                parameter.data = parameter.data.to(_DTYPES[self.placement.dtype])
        model.train()
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        return model


def _build(config: PreTrainedConfig, device: torch.device, attention: str | None) -> PreTrainedModel:
    """A model without values, never partitioned, also where ZeRO 3 is on."""
    kwargs: dict[str, Any] = {"dtype": torch.float32}
    if attention is not None:
        kwargs["attn_implementation"] = attention
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(device)
        stack.enter_context(no_init_weights())
        stack.enter_context(set_zero3_state())
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), **kwargs)
    model.tie_weights()
    model.config.use_cache = False
    return model


def _transform(model: PreTrainedModel, fused: FusedLoss) -> LogitTransform:
    """Whether the model caps its logits: does it take a tanh of what its head answers? The bound does not matter here.

    A scale works in place and takes no memory.
    """
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    try:
        seen = operations_on(fused.vocabulary, lambda: fused.hidden_states(model, {"input_ids": tokens}))
    except Exception:  # the pass itself will say why
        return LogitTransform()
    return LogitTransform(softcap=1.0 if "tanh" in seen else None)


def _head_weight(model: PreTrainedModel) -> Any:
    return getattr(model.get_output_embeddings(), "weight", None)
