"""What is wrong with a model's configuration, for this text, this tokenizer and this launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations import deepspeed as hf_deepspeed

from hfpretrain.arguments import DataArguments, ModelArguments, PretrainArguments
from hfpretrain.attention import varlen_attentions
from hfpretrain.data.isolation import Way, ways
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.model import load_config
from hfpretrain.mup.infer import infer
from hfpretrain.mup.spec import MupSpec
from hfpretrain.training.optimizer import check_mup_optimizer
from hfpretrain.training.run_length import source_of

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_model(config: Any, tokenizer: Any, data_args: DataArguments, args: PretrainArguments) -> list[Problem]:
    """What a model's configuration cannot do with this data.

    Args:
        config: the `PretrainedConfig` that the model is built from.
        tokenizer: anything whose `len` is its number of ids.
    """
    return check_positions(config, data_args, args) + check_vocabulary(config, tokenizer, args)


def check_positions(config: Any, data_args: DataArguments, args: PretrainArguments) -> list[Problem]:
    """Rows longer than what the model has positions for; nothing where its configuration names no limit."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None or data_args.sequence_length <= positions:
        return []
    what = f"rows are longer than the {positions:_} positions of the model"
    remedy = f"sequence_length of at most {positions}, or max_position_embeddings in config_overrides"
    return [Problem(what, f"sequence_length={data_args.sequence_length}", source_of(args, "sequence_length"), remedy)]


def check_vocabulary(config: Any, tokenizer: Any, args: PretrainArguments) -> list[Problem]:
    """Ids that the tokenizer has and the embedding has not, and special ids that are not the tokenizer's."""
    problems, text = [], config.get_text_config()
    if len(tokenizer) > text.vocab_size:
        what = "the tokenizer has ids that the model's embedding does not have"
        given = f"{len(tokenizer):_} tokens, vocab_size={text.vocab_size:_}"
        remedy = f"vocab_size of at least {len(tokenizer)} in config_overrides, or the model's own tokenizer"
        problems.append(Problem(what, given, source_of(args, "tokenizer_name"), remedy))
    return problems + _special_id_problems(text, tokenizer, args)


def _special_id_problems(text: Any, tokenizer: Any, args: PretrainArguments) -> list[Problem]:
    """Ids of the start, the end and padding that the embedding does not have, or that are not the tokenizer's."""
    problems = []
    for name in SPECIAL_IDS:
        ids = getattr(text, name, None)
        for number in ids if isinstance(ids, list) else [ids]:
            own = number == getattr(tokenizer, name, None)  # of which its size says enough
            if number is not None and not own and not 0 <= number < text.vocab_size:
                what = f"the model's {name} is no row of its embedding of {text.vocab_size:_}"
                remedy = f"leave {name} out of config_overrides, the tokenizer's own is put there; or another tokenizer"
                problems.append(Problem(what, f"{name}={number}", source_of(args, "config_overrides"), remedy))
    end, ids = getattr(tokenizer, "eos_token_id", None), getattr(text, "eos_token_id", None)
    if not problems and end is not None and ids is not None and end not in (ids if isinstance(ids, list) else [ids]):
        what = f"documents end with the tokenizer's id {end}, and the model would stop at another"
        remedy = "leave eos_token_id out of config_overrides"
        problems.append(Problem(what, f"eos_token_id={ids}", source_of(args, "config_overrides"), remedy))
    return problems


def build_on_meta(config: PreTrainedConfig, *, attn_implementation: str | None) -> PreTrainedModel:
    """The model without memory or values, also where ZeRO-3 would partition what is built.

    Raises:
        ConfigError: transformers cannot build it: sizes that do not go together, an attention that is not there.
    """
    kwargs = {} if attn_implementation in (None, "auto") else {"attn_implementation": attn_implementation}
    try:
        with torch.device("meta"), _without_zero3():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **kwargs)
    except Exception as error:  # whatever a model's constructor raises
        lines = str(error).strip().splitlines() or [""]
        about = "attn_implementation" if kwargs and "attention" in str(error).lower() else "config_overrides"
        what = f"the model cannot be built: {type(error).__name__}: {lines[0]}"
        given = f"{about}={kwargs['attn_implementation']}" if about in kwargs else f"a {config.model_type}"
        remedy = "another attention, or auto" if about in kwargs else "sizes that go together; see the message"
        raise ConfigError([Problem(what, given, about, remedy)]) from error
    return model


@contextmanager
def _without_zero3() -> Iterator[None]:
    before = hf_deepspeed._hf_deepspeed_config_weak_ref
    hf_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        hf_deepspeed._hf_deepspeed_config_weak_ref = before


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
        overrides=model_args.mup_overrides,
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
