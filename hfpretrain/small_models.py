"""A tiny model of every causal language model architecture in transformers, on the CPU with random weights.

What is measured on every architecture takes `causal_model_types` and `tiny_model` from here. A tiny config is the
default config of its model type with every size replaced according to the name of the attribute, so that an
architecture added to transformers tomorrow is likely to work unseen. What a name cannot tell is in OVERRIDES.
`python benchmarks/architectures.py` lists which can be built and why the others cannot.
"""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 256
MAX_LAYERS = 8
MAX_PARAMETERS = 20_000_000  # more than this means that a size was not recognised by its name
INPUT_SHAPE = (2, 16)  # rows, tokens

# The first pattern found in the attribute's name gives its new value. Zero and negative values stay: they mean "off".
SIZES: tuple[tuple[str, int], ...] = (
    (r"(?<!type_)vocab(_size|$)", VOCABULARY),
    (r"max_.*position|^n_(positions|ctx)$|max_seq_len|context_length|model_max_length", 160),  # 128 and what some add
    (r"size_per_layer_input$", 16),
    (r"(intermediate|ffn_hidden|feed_forward)_size|ffn_dim|^(dff|dim_ff|d_inner|n_inner)$", 128),
    (r"rank$", 16),
    (r"experts?_per_tok|^moe_(topk|top_k|k)$", 2),
    (r"zero_expert_num", 2),
    (r"shared_experts$", 1),
    (r"experts$", 4),
    (r"(qk|index)_head_dim$", 32),  # the sum of the parts with and without rotation; at least the part with
    (r"head_?dim(_swa)?$|kv_channels|d_head$|dim_head$|attention_head_size|query_pre_attn_scalar", 16),
    (r"^rotary_dim$", 8),
    (r"mamba_(n|num)_heads|n_mamba_heads", 8),  # times a head size of 16 is twice the hidden size
    (r"mamba_d_ssm", 128),
    (r"linear_num_key_heads", 2),
    (r"d_state$|state_size$", 16),
    (r"(hidden|embedding)_size(_global)?$|^(n_embd|d_model)$|emb(ed|edding)?(_proj)?_dim$|lru_width", 64),
    (r"^adapter_(in_dim|out_dim|input_size)$", 64),
    (r"(^|_)(heads?|query_groups)$", 4),
    (r"index_topk$|index_block_size", 8),
)
# As above, but a value that is smaller already stays.
LIMITS: tuple[tuple[str, int], ...] = (
    (r"topk_group$|^first_k_dense_replace$|^num_dense_layers$", 1),
    (r"n_group$|expert_group$|n_?groups$", 2),
    (r"index_topk_blocks", 4),
    (r"(^|_)(block_size|chunk_size|chunk_length)$", 16),
    (r"window(_size|_len)?$|(local_attention|attention_chunk_size)$", 32),
    (r"num_kv_shared_layers", 0),  # the layer to share with is not among the few that are left
)
SIZES_OF_NONE = {"head_dim": 16, "num_key_value_heads": 4}  # not every architecture derives them from the others
KEY_VALUE_HEADS = r"(key_value|kv)(_n)?_heads$"
QUERY_HEADS = r"attention_heads$|^n_heads?$"
DEPTH = r"^(n_layers?|num_blocks|num_layers_per_stack|(num_)?((en|de)coder_|hidden_)?layers|max_window_layers)$"
LAYER_INDICES = r"layer_ids$|idxs$|^moe_layers$|cross_attention_layers|mlp_only_layers|layer_indices"
TOKEN_IDS = r"token_(id|index)s?$|^(pad|bos|eos|unk|mask)_index$"
CAUSAL_FLAGS = ("is_decoder", "causal")  # off by default where the architecture was made as an encoder

# By model type, also of a sub-config.
OVERRIDES: dict[str, dict[str, Any]] = {
    # Several layer types exist, the default config has only one.
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    # The default config lacks what the model needs.
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},  # the first is dense
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "xmod": {"default_language": "en_XX"},
    # With its default a part would do nothing in so few layers or tokens.
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 2, "loop_layer_index_start": 2, "loop_layer_index_end": 4},
    # Constraints between sizes.
    "dory": {  # its saved form counts attention and MLP blocks as layers of their own; without them it is not halved
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "dots3_note_text": {"head_dim": 32},  # the parts with and without rotation together
    "mamba2": {"num_heads": 8},  # times a head size of 16 is twice the hidden size
    "reformer": {
        "axial_pos_embds": False,  # training would need rows of exactly the product of axial_pos_shape
        "hash_seed": 0,  # it draws its own seeds otherwise, and two passes differ
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
        "lsh_attention_probs_dropout_prob": 0.0,
    },
    "zamba": {  # attends to twice the hidden size; weights are tied from the second hybrid layer on
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
    # Made as an encoder, with a flag of its own for causal attention.
    "xlnet": {"attn_type": "uni"},
}


class NotBuildable(Exception):  # noqa: N818 (an outcome to report, as often as not)
    """No tiny model of this type can be made; the message says why."""


def causal_model_types() -> list[str]:
    """All model types that AutoModelForCausalLM knows, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The default config of `model_type`, shrunk; raises NotBuildable where none can be made."""
    try:
        config_class = CONFIG_MAPPING[model_type]
        return config_class.from_dict(_shrunk(config_class()))
    except Exception as error:
        raise NotBuildable(f"config: {_one_line(error)}") from error


def tiny_model(model_type: str, *, seed: int = 0) -> PreTrainedModel:
    """A float32 CPU model of `tiny_config(model_type)` in eval mode; the caller's random state is left as it was.

    Raises NotBuildable where it cannot be built, or gives no finite logits for input_ids alone.
    """
    config, config_without_storage = tiny_config(model_type), tiny_config(model_type)  # building may write into it
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                num_parameters = AutoModelForCausalLM.from_config(config_without_storage).num_parameters()
            if num_parameters <= MAX_PARAMETERS:
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        except Exception as error:
            raise NotBuildable(f"build: {_one_line(error)}") from error
        if num_parameters > MAX_PARAMETERS:
            raise NotBuildable(f"build: {num_parameters:,} parameters, a size was not recognised")
        model.config.use_cache = False
        _check_forward(model)
    return model


def _check_forward(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(8, 200, INPUT_SHAPE, generator=generator)  # no special tokens
    try:
        with torch.no_grad():
            logits = model(input_ids=input_ids).logits
    except Exception as error:
        raise NotBuildable(f"forward: {_one_line(error)}") from error
    if logits.shape[:-1] != INPUT_SHAPE:
        raise NotBuildable(f"forward: logits of shape {tuple(logits.shape)}")
    if not logits.isfinite().all():
        raise NotBuildable("forward: logits are not finite")


# -- shrinking --------------------------------------------------------------------------------------------------------


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings of `config` with every size reduced, sub-configs included.

    Works on the dict that config.json would hold, because a config validates on construction that its sizes agree, and
    because the text config of an encoder-decoder is a detached copy: what is set on it is lost.
    """
    settings = config.to_dict()
    depth = getattr(config, "num_hidden_layers", None) or 0
    num_layers = _layers_to_keep(config, depth) if isinstance(depth, int) else 2
    shrunk: dict[str, Any] = {}
    for name, value in settings.items():
        part = vars(config).get(name)
        if isinstance(part, PreTrainedConfig):
            shrunk[name] = _shrunk(part)
        elif name == "per_layer_config" and value:
            shrunk[name] = {i: _resized("", of_layer, 0, {}) for i, of_layer in value.items() if int(i) < num_layers}
        elif re.search(LAYER_INDICES, name) and isinstance(value, list):
            shrunk[name] = [index for index in value if index < num_layers]
        else:
            if isinstance(value, list | tuple) and len(value) == depth:
                value = value[:num_layers]
            shrunk[name] = _resized(name, value, num_layers, settings)
    return shrunk | OVERRIDES.get(config.model_type, {})


def _layers_to_keep(config: PreTrainedConfig, depth: int) -> int:
    """How many of the first layers show each value of every per-layer list, as far as MAX_LAYERS allow; at least 2."""
    num_layers = 2
    properties = [name for name, _ in inspect.getmembers(type(config), lambda member: isinstance(member, property))]
    for name in (*vars(config), *properties):
        with warnings.catch_warnings(action="ignore"):
            try:
                values = getattr(config, name)
            except Exception:
                continue  # a property that holds for other settings only
        if isinstance(values, list | tuple) and len(values) == depth:
            needed = max(values.index(value) for value in values) + 1
            num_layers = max(num_layers, needed if needed <= MAX_LAYERS else 0)
    return num_layers


def _resized(name: str, value: Any, num_layers: int, settings: dict[str, Any]) -> Any:
    """`value` of the attribute `name`, reduced; `settings` are its neighbours."""
    if isinstance(value, dict):
        return {key: _resized(key, entry, num_layers, value) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_resized(name, entry, num_layers, settings) for entry in value)
    if name in CAUSAL_FLAGS and not settings.get("is_encoder_decoder"):
        return True
    if name == "use_cache":
        return False
    if value is None:
        return SIZES_OF_NONE.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if re.search(TOKEN_IDS, name):
        return value if value < VOCABULARY else _token_id(name)
    if value <= 0:
        return value
    if re.search(DEPTH, name):
        return min(value, num_layers)
    if re.search(KEY_VALUE_HEADS, name):
        return _key_value_heads(value, settings)
    for pattern, size in SIZES:
        if re.search(pattern, name):
            return size
    return min([value, *(limit for pattern, limit in LIMITS if re.search(pattern, name))])


def _key_value_heads(value: int, settings: dict[str, Any]) -> int:
    """Multi-query stays multi-query; grouped-query gets 2 query heads per key-value head."""
    query_heads = [settings[name] for name in settings if re.search(QUERY_HEADS, name)]
    return 1 if value == 1 else 4 if value in query_heads else 2


def _token_id(name: str) -> int:
    """An id below the vocabulary size for a special token."""
    return {"pad": 0, "bos": 1, "eos": 2}.get(name.split("_")[0], 3)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
