"""Small real models, built like the run's own but never partitioned, and a batch to send through them."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_utils import set_zero3_state

from hfpretrain.errors import ConfigError, Problem
from hfpretrain.initialisation import initialise

ROWS, TOKENS = 2, 16


def probe_model(config: PreTrainedConfig, *, seed: int = 0, device: str = "cpu") -> PreTrainedModel:
    """A float32 model of `config` in eval mode; on the meta device without memory and without initial values.

    Unpartitioned also where ZeRO-3 is on: each rank has all of it. Experts are run one by one, so that their weights
    reach a matrix product as they are and not as copies.

    Raises:
        ConfigError: the architecture cannot be built with these sizes.
    """
    config = copy.deepcopy(config)  # building may write into it
    kwargs = {"dtype": torch.float32, "experts_implementation": "eager"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(seed)  # for constructors that draw outside of _init_weights
        stack.enter_context(torch.device(device))
        stack.enter_context(no_init_weights())
        stack.enter_context(set_zero3_state())
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **kwargs)
        except Exception as error:  # anything may go wrong inside an architecture's constructor
            width = config.get_text_config().hidden_size
            what = f"{config.model_type} cannot be built at width {width}: {type(error).__name__}: {error}"
            remedy = "another base width, or name the base sizes yourself: base_config"
            raise ConfigError([Problem(what, f"width {width}", "base width", remedy)]) from error
    if device != "meta":
        initialise(model, seed=seed)
    model.tie_weights()
    model.config.use_cache = False
    return model.eval()


def probe_tokens(config: PreTrainedConfig, *, rows: int = ROWS, tokens: int = TOKENS, seed: int = 0) -> Tensor:
    """[rows, tokens] token ids, without the lowest few, which are often special."""
    size = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min(8, size // 2), size, (rows, tokens), generator=generator)


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the head's weight is the token embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", 0)
