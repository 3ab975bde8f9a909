"""Everything that contradicts in a run, before its first step.

The functions return problems in place of raising, so that one `refuse(a + b + c)` shows them all. How the processes
were started is checked in `hfpretrain.launch_checks`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedConfig

from hfpretrain.arguments import DataArguments, ModelArguments, PretrainArguments
from hfpretrain.arguments.rules import check_values
from hfpretrain.attention import varlen_attentions
from hfpretrain.data.documents import Documents, shared_documents
from hfpretrain.data.isolation import Way, ways
from hfpretrain.data.sources import SourceError, find_sources
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.launch_checks import check_deepspeed, check_launch, deepspeed_config
from hfpretrain.model import load_config
from hfpretrain.mup.infer import infer
from hfpretrain.mup.spec import MupSpec
from hfpretrain.training.evaluation import METRICS
from hfpretrain.training.optimizer import check_mup_optimizer
from hfpretrain.training.run_length import RunLength, derive, source_of

# Muennighoff et al. 2023 (arXiv:2305.16264): up to about 4 epochs, repeated text is worth nearly as much as new text.
EPOCHS_WORTH_REPEATING = 4


def check_start(data_args: DataArguments, args: PretrainArguments) -> RunLength:
    """The length of the run, once nothing about the arguments, the launcher and DeepSpeed's configuration contradicts.

    Raises:
        ConfigError: all contradictions at once.
    """
    problems = check_launch(args) + check_deepspeed(deepspeed_config(args), args) + check_eval_data(data_args, args)
    try:
        run = derive(args, data_args, world_size=args.world_size)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from error
    refuse(problems)
    return run


def check_arguments(model_args: ModelArguments, data_args: DataArguments, args: PretrainArguments) -> list[Problem]:
    """The rules that `parse` applies, for dataclasses that were built by hand."""
    values = SimpleNamespace(**{**vars(model_args), **vars(data_args), **vars(args)})
    return [problem for _, problem in check_values(values, sources=args.sources)]


def check_eval_data(data_args: DataArguments, args: PretrainArguments) -> list[Problem]:
    """Entries that are no name=source, names that are given twice or would be read as another metric, no such data."""
    problems = []
    seen: set[str] = set()
    for entry in data_args.eval_data:
        name, equals, source = entry.partition("=")
        what = ""
        remedy = "name=source, the name of letters, digits and - . _, such as wiki=wiki/*.jsonl"
        if not (equals and source and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)):
            what = "a held-out set is written name=source"
        elif name in seen:
            what, remedy = f"two held-out sets have the name {name}", "one name for each; one source may be a glob"
        elif name in METRICS:
            what = f"a held-out set named {name} would be logged as eval_{name}, which is a metric already"
            remedy = f"another name than {', '.join(METRICS)}"
        else:
            try:
                find_sources([source])
            except SourceError as error:
                what = f"this held-out data cannot be found: {str(error).removeprefix(f'{source}: ')}"
                remedy = "correct the source; it is one that --dataset takes"
        seen.add(name)
        if what:
            problems.append(Problem(what, entry, source_of(args, "eval_data"), remedy))
    return problems


def check_model(config: Any, tokenizer: Any, data_args: DataArguments, args: PretrainArguments) -> list[Problem]:
    """What a model's configuration cannot do with this data.

    Args:
        config: the `PretrainedConfig` that the model is built from.
        tokenizer: anything whose `len` is its number of ids.
    """
    problems = []
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and data_args.sequence_length > positions:
        what = f"rows are longer than the {positions:_} positions of the model"
        remedy = f"sequence_length of at most {positions}, or max_position_embeddings in config_overrides"
        source = source_of(args, "sequence_length")
        problems.append(Problem(what, f"sequence_length={data_args.sequence_length}", source, remedy))
    if len(tokenizer) > text.vocab_size:
        what = "the tokenizer has ids that the model's embedding does not have"
        given = f"{len(tokenizer):_} tokens, vocab_size={text.vocab_size:_}"
        remedy = f"vocab_size of at least {len(tokenizer)} in config_overrides, or the model's own tokenizer"
        problems.append(Problem(what, given, source_of(args, "tokenizer_name"), remedy))
    return problems


def mup_spec(
    config: PreTrainedConfig, model_args: ModelArguments, args: PretrainArguments, *, tokenizer: Any
) -> MupSpec | None:
    """The muP of this run; None where it is not asked for.

    Raises:
        ConfigError: an optimizer without muP's rules, and everything that `hfpretrain.mup.infer` refuses.
    """
    changes = model_args.mup_base_config
    if model_args.mup_base_width is None and not changes:
        return None
    refuse(check_mup_optimizer(args))
    base = None
    if changes:
        base = load_config(
            model_type=model_args.model_type,
            config_name=model_args.config_name,
            config_overrides=model_args.config_overrides | changes,
            tokenizer=tokenizer,
        )
    return infer(
        config,
        base_width=model_args.mup_base_width,
        base_config=base,
        base_depth=model_args.mup_base_depth,
        overrides=model_args.mup_overrides,
        depth_overrides=model_args.mup_depth_overrides,
        weight_decay_mode=model_args.mup_weight_decay,
    )


def isolation_ways(config: Any, model_args: ModelArguments, data_args: DataArguments) -> list[Way]:
    """The ways to keep documents apart that these arguments leave open; none if they shall see each other."""
    if data_args.packing == "single":
        return [Way("single")]
    if not data_args.isolate_documents:
        return []
    attention = model_args.attn_implementation
    return ways(
        config,
        attentions=varlen_attentions() if attention == "auto" else (),
        attn_implementation=attention,
        sequence_length=data_args.sequence_length,
    )


def model_notes(config: Any) -> list[str]:
    """What is allowed about a model's configuration, but worth one line before the first step."""
    notes = []
    text = config.get_text_config()
    if getattr(text, "router_aux_loss_coef", 0) and not getattr(text, "output_router_logits", False):
        notes.append(
            "the experts' load-balancing loss is off (output_router_logits is false): set it true in config_overrides"
        )
    if text.vocab_size % 64:
        padded = -(-text.vocab_size // 64) * 64
        notes.append(f"vocab_size {text.vocab_size:,} is no multiple of 64; {padded:,} lets a GPU use its matrix units")
    return notes


def check_data(
    *,
    num_blocks: int,
    num_validation_documents: int,
    run: RunLength,
    data_args: DataArguments,
    args: PretrainArguments,
    train: Documents | None = None,
    named: Mapping[str, Documents] | None = None,
) -> tuple[list[Problem], list[str]]:
    """(problems, notes) about the amount of data.

    Args:
        num_blocks: rows in one epoch of the training data.
        num_validation_documents: documents held out.
        train: the training documents, in which those of `named` are looked for.
        named: the sets of `eval_data`.
    """
    problems = []
    notes = []
    if num_blocks == 0:
        what = "the training data does not fill one row"
        remedy = "more data, or a shorter sequence_length"
        source = source_of(args, "sequence_length")
        problems.append(Problem(what, f"sequence_length={data_args.sequence_length}", source, remedy))
    else:
        epochs = run.ramp.total_rows / num_blocks
        line = f"{epochs:.2f} epochs of {num_blocks * run.sequence_length:,} tokens"
        if epochs > EPOCHS_WORTH_REPEATING:
            line += f"; repeats teach less beyond about {EPOCHS_WORTH_REPEATING} (Muennighoff et al. 2023)"
        notes.append(line)
    evaluates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
    if num_validation_documents == 0 and not data_args.eval_data and evaluates:
        what = "evaluation is asked for, but the hash held out no document"
        given = f"validation_fraction={data_args.validation_fraction}"
        remedy = "a larger validation_fraction, or eval_strategy: no"
        problems.append(Problem(what, given, source_of(args, "validation_fraction"), remedy))
    if train is not None:
        notes += _overlap_notes(train, named or {})
    return problems, notes


def _overlap_notes(train: Documents, named: Mapping[str, Documents]) -> list[str]:
    """A line for each held-out set that shares documents with the training data, or of which it was not counted."""
    notes = []
    for name, documents in named.items():
        shared = shared_documents(documents, train)
        if shared is None:
            notes.append(f"eval_data {name}: too large to look for its documents in the training data")
        elif shared:
            notes.append(f"eval_data {name}: {shared:,} of its {len(documents):,} documents are training data as well")
    return notes
