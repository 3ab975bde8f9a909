"""The plan of a run that is not started: counts as `recipes/pretrain.py` derives them, and its model without memory.

`check_plan` finds everything that cannot be, `model_facts` counts the model, and the functions below turn both into
figures for `recipes/plan.py`. No data is read: a tokenizer that is to be trained has the size that it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hfpretrain.arguments import DataArguments, PretrainArguments
from hfpretrain.arguments.planning import PlanRequest
from hfpretrain.data.packing import pack_concat
from hfpretrain.data.tokenizer import byte_tokenizer, load_tokenizer
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.memory_estimate import estimate_memory
from hfpretrain.model import load_config
from hfpretrain.model_counts import NotCountable, count_model
from hfpretrain.planning import budget, storage
from hfpretrain.planning.figures import Figure
from hfpretrain.planning.flops import PEAK_FLOPS, TokenCost, peak_flops, token_cost
from hfpretrain.planning.memory import Fit, MemoryEstimate, Placement, device_bytes, largest_on_line
from hfpretrain.preflight.model import check_positions
from hfpretrain.training.batch_ramp import batch_lr_factor
from hfpretrain.training.run_length import RunLength, derive
from hfpretrain.training.throughput import token_flops

# What `derive` cannot do without.
_LENGTHS = {
    *("batch_tokens", "total_tokens", "max_steps", "sequence_length", "per_device_train_batch_size", "world_size"),
    *("batch_ramp", "batch_ramp_lr", "gradient_accumulation_steps", "log_noise_scale", "optim"),
    *("warmup_steps", "warmup_fraction", "decay_steps", "decay_fraction", "decay_shape", "min_lr_ratio"),
    *("lr_scheduler_type",),
}
_PLACEMENT = {"world_size", "zero_stage", "offload_optimizer", "offload_params", "deepspeed", "bf16", "fp16"}
_MODEL = {"params", "model_type", "config_name", "model_name_or_path", "config_overrides"}


def check_plan(request: PlanRequest) -> tuple[RunLength, PreTrainedConfig | None]:
    """(lengths as pretrain.py derives them, the model's configuration; None with params).

    Raises:
        ConfigError: everything that is wrong with the request, at once.
    """
    values, problems, bad = request.values, list(request.problems), request.bad_fields
    run, config = None, None
    if not bad & _LENGTHS:
        try:
            run = derive(*_stand_ins(values), world_size=values.world_size)
        except ConfigError as error:
            problems += error.problems
    if not bad & _PLACEMENT:
        problems += placement_of(values).problems()
    if peak_flops(values.device) is None:
        what = "the peak of this device is not known"
        problems.append(Problem(what, str(values.device), values.sources["device"], "one of " + ", ".join(PEAK_FLOPS)))
    if not bad & _MODEL and sum(bool(getattr(values, name)) for name in _MODEL - {"config_overrides"}) == 1:
        try:
            config = planned_config(values)
        except ConfigError as error:
            problems += error.problems
        except OSError as error:  # transformers finds no such configuration or tokenizer
            given = values.config_name or values.model_name_or_path or values.tokenizer_name
            remedy = "correct the name, or copy it onto this machine"
            problems.append(Problem(str(error).split("\n")[0], str(given), "config_name, tokenizer_name", remedy))
        if config is not None and "sequence_length" not in bad:
            args, data_args = _stand_ins(values)
            problems += check_positions(config, data_args, args)
    refuse(problems)
    assert run is not None
    return run, config


def _stand_ins(values: SimpleNamespace) -> tuple[PretrainArguments, DataArguments]:
    """The values in place of both dataclasses, of which only fields are read."""
    return cast(PretrainArguments, values), cast(DataArguments, values)


def planned_config(values: SimpleNamespace) -> PreTrainedConfig | None:
    """The configuration that pretrain.py would build the model from, its vocabulary included; None with params."""
    if values.params is not None:
        return None
    name, size, tokenizer = str(values.tokenizer_name or ""), None, None
    if name == "bytes":
        tokenizer = byte_tokenizer()
    elif name.startswith("train:") and name.removeprefix("train:").replace("_", "").isdecimal():
        size = int(name.removeprefix("train:").replace("_", ""))
    elif name:
        tokenizer = load_tokenizer(name, texts=None, cache_dir=Path(values.cache_dir))
    return load_config(
        model_type=values.model_type,
        config_name=values.config_name,
        model_name_or_path=values.model_name_or_path,
        config_overrides=values.config_overrides,
        vocab_size=size,
        tokenizer=tokenizer,
    )


@dataclass(frozen=True)
class ModelFacts:
    """What is known of the planned model.

    Attributes:
        parameters: all of them.
        active: N of the papers' 6 N D: all of a dense model, of experts those that a token meets.
        parts: role -> (parameters, those in matrix products, multiplications of a token); None where it is not counted.
        cost: FLOPs of a token; None with a bare number of parameters.
        width: hidden size.
        tied: the head is the input embedding.
        notes: what is not known, and why.
    """

    parameters: int
    active: float
    parts: dict[str, tuple[int, int, float]] | None = None
    cost: TokenCost | None = None
    width: int | None = None
    tied: bool = False
    notes: tuple[str, ...] = ()

    @property
    def inner_parameters(self) -> float | None:
        """`active` without embedding and head, where roles are known."""
        if self.parts is None:
            return None
        return self.active - sum(self.parts[role][0] for role in ("embedding", "head") if role in self.parts)

    def inner_flops(self, tokens: int) -> float | None:
        """Training FLOPs without the head, attention over whole rows, where roles are known: DeepSeek LLM's C."""
        if self.cost is None or self.parts is None:
            return None
        return tokens * (self.cost.training_full_attention - 3 * self.cost.matrices.get("head", 0.0))


def model_facts(values: SimpleNamespace, config: PreTrainedConfig | None) -> ModelFacts:
    """Counted by `hfpretrain.model_counts`; by the rules of `training.throughput` where that cannot be."""
    if config is None:
        return ModelFacts(values.params, values.params)
    lengths = {"sequence_length": values.sequence_length, "document_tokens": documents_of(values)}
    try:
        counts = count_model(config)
    except NotCountable as reason:
        return _ruled(config, values.sequence_length, str(reason))
    cost = token_cost(
        {part.role: part.active for part in counts.parts},
        [(attention.window, attention.width) for attention in counts.attention],
        mixing_flops=counts.mixing_flops,
        **lengths,
    )
    experts = counts.of("experts")
    return ModelFacts(
        parameters=counts.parameters,
        active=counts.parameters - experts.multiplied + experts.active,
        parts={part.role: (part.parameters, part.multiplied, part.active) for part in counts.parts},
        cost=cost,
        width=counts.width or None,
        tied=counts.tied,
    )


def documents_of(values: SimpleNamespace) -> float | None:
    """Mean length of what a token can attend to; None: whole rows."""
    length: float | None = values.mean_document_tokens
    return length if values.isolate_documents or values.packing == "single" else None


def _ruled(config: PreTrainedConfig, sequence_length: int, reason: str) -> ModelFacts:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever transformers says to sizes that do not fit together
        what = f"transformers cannot build this model: {' '.join(str(error).split())}"
        remedy = "correct config_overrides, or plan with --params"
        raise ConfigError([Problem(what, str(config.model_type), "config_overrides", remedy)]) from error
    row = pack_concat(np.array([sequence_length]), sequence_length)
    flops = token_flops(model, row, isolate_documents=True)
    weights = 2.0 * flops.matmul_parameters
    full, causal = (flops.full / 3 - weights, flops.causal / 3 - weights)
    note = (
        f"parameters by role are not counted, the forward pass needs values ({reason}); N is that of "
        "training/throughput.py, without the input embedding, and documents and windows are not taken into account"
    )
    cost = TokenCost(matrices={"weights": weights}, attention={None: causal}, full_attention=full)
    return ModelFacts(flops.parameters, flops.matmul_parameters, cost=cost, notes=(note,))


# --- figures --------------------------------------------------------------------------------------------------------


def run_figures(values: SimpleNamespace, run: RunLength) -> list[Figure]:
    """Length, batch and ramp, and what padding would waste."""
    grows = len(run.ramp.stages) > 1 or run.growth is not None
    figures = budget.step_figures(
        num_steps=run.num_steps,
        batch_tokens=run.batch_tokens,
        total_tokens=run.total_tokens,
        unused_tokens=run.unused_tokens,
        micro_batches_per_step=run.micro_batches_per_step,
        sequence_length=run.sequence_length,
        warmup_steps=run.warmup_steps,
        decay_steps=run.decay_steps,
        grows=grows,
    )
    if len(run.ramp.stages) > 1:
        figures += budget.stage_figures(_stages(run))
    if values.mean_document_tokens is not None:
        waste = budget.padding_waste(values.mean_document_tokens, run.sequence_length)
        figures.append(Figure("padding_waste", waste, "share", "1 - mean / L with one document a row; packed 0"))
    return figures


def _stages(run: RunLength) -> list[tuple[int, int, int, float]]:
    length, stages = run.sequence_length, run.ramp.stages
    ends = [stage.first_step for stage in stages[1:]] + [run.num_steps]
    return [
        (
            stage.first_row * length,
            stage.rows * length,
            end - stage.first_step,
            batch_lr_factor(stage.rows, run.rows_per_step, run.lr_rule),
        )
        for stage, end in zip(stages, ends, strict=True)
    ]


def checkpoint_figures(values: SimpleNamespace, run: RunLength, parameters: int) -> list[Figure]:
    """Checkpoints of a run, with the rotation of pretrain.py."""
    every = values.save_steps
    return storage.storage_figures(
        parameters=parameters,
        num_steps=run.num_steps,
        save_steps=math.ceil(run.num_steps * every) if every < 1 else int(every),  # below 1 a share, as in transformers
        save_total_limit=values.save_total_limit,
        storage_gbps=values.storage_gbps,
        zero_stage=stage_of(values),
    )


def placement_of(values: SimpleNamespace, config: PreTrainedConfig | None = None) -> Placement:
    """Where the run puts weights, gradients and optimizer state: DeepSpeed's configuration, or the plan's flags."""
    deepspeed: Any = values.deepspeed_config or {}
    dtype = "float32"
    for name, key in (("bfloat16", "bf16"), ("float16", "fp16")):
        enabled = deepspeed.get(key, {}).get("enabled", "auto")
        if getattr(values, key) if enabled == "auto" else enabled:
            dtype = name
    if values.deepspeed_config is not None:
        width = None if config is None else getattr(config.get_text_config(), "hidden_size", None)
        return Placement.from_deepspeed(deepspeed, world_size=values.world_size, dtype=dtype, hidden_size=width)
    offloads = {"offload_optimizer": values.offload_optimizer, "offload_params": values.offload_params}
    return Placement(values.world_size, values.zero_stage, dtype, **offloads)


def memory_of(values: SimpleNamespace, run: RunLength, config: PreTrainedConfig | None) -> MemoryEstimate:
    """What one rank takes; only what does not depend on the batch where there is a number of parameters alone."""
    attention = values.attn_implementation
    return estimate_memory(
        config,
        placement=placement_of(values, config),
        parameters=values.params,
        sequence_length=run.sequence_length,
        rows=values.per_device_train_batch_size,
        micro_batches=run.micro_batches_per_step,
        optimizer=str(getattr(values.optim, "value", values.optim)),
        gradient_checkpointing=values.gradient_checkpointing,
        attn_implementation=None if attention == "auto" else attention,
    )


def memory_figures(values: SimpleNamespace, run: RunLength, estimate: MemoryEstimate) -> tuple[list[Figure], list[str]]:
    """(components of one rank and whether they fit on the device, what to say about it)."""
    asked = values.device_memory_gb
    size = device_bytes(values.device) if asked is None else int(asked * 1e9)
    figures, notes = estimate.figures(), [f"memory leaves out {what}" for what in estimate.left_out]
    if size is None:
        return figures, [*notes, f"the memory of {values.device} is not known here: give --device_memory_gb"]
    fit = Fit(estimate, size, estimate.peak_bytes, _largest_micro_batch(estimate, size, run))
    figures.append(
        Figure("device_memory", size, "bytes", "of one device", "data sheet" if asked is None else "as given")
    )
    figures.append(Figure("memory_margin", fit.margin_bytes, "bytes", "device memory - memory_peak"))
    if fit.largest_micro_batch is not None:
        formula = "rows that fit, by a line through passes of b and 2 b rows; at most a rank's rows of a step"
        figures.append(Figure("largest_micro_batch", fit.largest_micro_batch, "rows", formula, "a pass without memory"))
    return figures, [f"memory {fit}", *notes]


def _largest_micro_batch(estimate: MemoryEstimate, size: int, run: RunLength) -> int | None:
    """Rows that fit on the line through two passes, at most a rank's rows of a step; None without a pass.

    `estimate.largest_micro_batch` measures every size that it tries, up to thousands of rows.
    """
    if estimate.activations is None or estimate.measure is None:
        return None
    rows, most = estimate.activations.rows, math.ceil(run.rows_per_step / run.world_size)
    points = [(rows, estimate.peak_bytes), (2 * rows, estimate.with_rows(2 * rows).peak_bytes)]
    return max(min(largest_on_line(points, size, default=rows), most), 0)


def stage_of(values: SimpleNamespace) -> int | None:
    """The ZeRO stage, from the plan's flag or the DeepSpeed configuration."""
    config: Any = values.deepspeed_config
    stage: int | None = values.zero_stage
    return stage if config is None else int(config.get("zero_optimization", {}).get("stage", 0))


def run_notes(values: SimpleNamespace, run: RunLength, facts: ModelFacts) -> list[str]:
    """What is allowed about a run, but worth a line."""
    notes = list(facts.notes)
    if values.model_type and not values.tokenizer_name and "vocab_size" not in values.config_overrides:
        notes.append("no tokenizer_name: the vocabulary is the architecture's default; a run takes the tokenizer's")
    share = budget.warmup_share(run.warmup_steps, run.num_steps)
    if not 0.005 <= share <= 0.04:
        notes.append(f"the warm-up is {share:.1%} of the run; 0.5 to 4 % is usual")
    if run.growth is not None:
        notes.append("the batch grows by measurement: steps are the most there can be, the batch is the largest")
    if facts.active < facts.parameters:
        notes.append("the published laws are of dense models; they are given the parameters that one token meets")
    if values.gradient_checkpointing and values.sources["mfu"] == "default":
        notes.append(
            f"mfu {values.mfu:g} is the default; with gradient_checkpointing 3/4 of it is the same device speed"
        )
    if values.mup_base_width is None and not values.mup_base_config:
        notes.append(
            "muP in place of a law: recipes/tune_lr.py finds the rate on a narrow model, --mup_base_width carries it"
        )
    return notes


def as_json(sections: Sequence[Any]) -> list[dict[str, Any]]:
    """One mapping a figure, with its section."""
    return [{"section": section.title, **vars(figure)} for section in sections for figure in section.figures]
