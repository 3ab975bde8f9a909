"""Configuration and initial weights: what the seed decides, and that nothing else does."""

import math
import re

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from hfpretrain.errors import ConfigError
from hfpretrain.initialisation import drawn_parameters, initialise, initialiser, module_seed
from hfpretrain.model import build_model, load_config, load_model, parameter_count, true_shape

LLAMA_LIKE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "head_dim": 16,
}
FAMILIES = {
    "llama": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE,
    "gemma2": LLAMA_LIKE,
    "olmo2": LLAMA_LIKE,
    "phi3": LLAMA_LIKE,
    "mixtral": {**LLAMA_LIKE, "num_local_experts": 4},
    "gpt2": {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "gpt_neox": {k: v for k, v in LLAMA_LIKE.items() if k not in ("num_key_value_heads", "head_dim")},
    "bloom": {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "opt": {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
    },
    "falcon": {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
}


class FakeTokenizer:
    def __init__(self, size: int, bos: int | None, eos: int, pad: int | None) -> None:
        self.size, self.bos_token_id, self.eos_token_id, self.pad_token_id = size, bos, eos, pad

    def __len__(self) -> int:
        return self.size


def tiny(model_type: str, **changes) -> PreTrainedConfig:
    settings = {**FAMILIES[model_type], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, **changes}
    return CONFIG_MAPPING[model_type](**settings)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_matrix_has_the_standard_deviation_of_the_config(model_type):
    model = build_model(tiny(model_type), seed=0)
    checked = 0
    for name, p in model.named_parameters():
        if p.ndim < 2:
            assert len(set(p.tolist())) == 1, f"{name}: gains and biases are constant in these families"
            continue
        std = getattr(model.config, "initializer_range", None) or model.config.init_std
        if model_type == "gpt2" and name.endswith("c_proj.weight"):
            std /= math.sqrt(2 * model.config.n_layer)  # GPT-2 paper: residual projections by 1/sqrt(N)
        # The sample's std scatters by std / sqrt(2 n); six of those is a miss once in 1e9.
        assert abs(p.std().item() / std - 1) < 6 / math.sqrt(2 * p.numel()), name
        assert abs(p.mean().item()) < 6 * std / math.sqrt(p.numel()), name
        checked += 1
    assert checked >= 6


def test_weights_depend_on_seed_and_name_only():
    base = weights(build_model(tiny("llama"), seed=5))
    torch.manual_seed(99)
    again = weights(build_model(tiny("llama"), seed=5))
    assert all(torch.equal(base[name], again[name]) for name in base)
    deeper = weights(build_model(tiny("llama", num_hidden_layers=4), seed=5))
    assert all(torch.equal(base[name], deeper[name]) for name in base)
    other = weights(build_model(tiny("llama"), seed=6))
    assert not any(torch.equal(base[name], other[name]) for name in base if base[name].ndim > 1)
    matrices = [tensor for name, tensor in base.items() if re.search("[qo]_proj", name)]
    assert len({tensor.flatten()[0].item() for tensor in matrices}) == len(matrices), "no two modules share a stream"


def test_the_values_are_those_of_torch_with_the_modules_own_seed():
    model = build_model(tiny("llama"), seed=5)
    name = "model.layers.1.self_attn.q_proj"
    stream = torch.Generator().manual_seed(module_seed(5, name))
    expected = torch.empty(64, 64).normal_(0.0, 0.02, generator=stream)
    assert torch.equal(model.get_submodule(name).weight, expected)


def test_ties_are_tied_and_the_random_state_is_restored():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = build_model(tiny("llama", tie_word_embeddings=True), seed=1)
    untied = build_model(tiny("llama"), seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.embed_tokens.weight, untied.model.embed_tokens.weight)
    assert parameter_count(untied) - parameter_count(model) == 96 * 64
    assert parameter_count(model) == model.num_parameters()
    assert model.config.use_cache is False
    assert model.dtype == torch.float32


def test_mamba_state_follows_its_formula():
    settings = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    config = CONFIG_MAPPING["mamba"](**settings, bos_token_id=1, eos_token_id=2, pad_token_id=None)
    model = build_model(config, seed=0)
    mixer = model.backbone.layers[1].mixer
    assert torch.allclose(mixer.A_log.exp(), torch.arange(1.0, 9.0).expand(64, 8))
    assert torch.equal(mixer.D, torch.ones(64))
    step = nn.functional.softplus(mixer.dt_proj.bias)
    assert config.time_step_min * 0.99 <= step.min()
    assert step.max() <= config.time_step_max * 1.01
    drawn = drawn_parameters(model)
    assert "backbone.layers.1.mixer.A_log" not in drawn
    assert "backbone.layers.1.mixer.in_proj.weight" in drawn


def test_lower_precision_is_the_rounded_float32_model():
    full, half = build_model(tiny("gpt2"), seed=2), build_model(tiny("gpt2"), seed=2, dtype=torch.bfloat16)
    for (name, a), (_, b) in zip(full.named_parameters(), half.named_parameters(), strict=True):
        assert b.dtype == torch.bfloat16
        assert torch.equal(a.to(torch.bfloat16), b), name


class Odd(LlamaForCausalLM):
    """Initialises a far descendant from the top, has a module only torch initialises, and may forget a weight."""

    forget = False

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.mix = nn.Bilinear(4, 4, 4)
        if self.forget:
            self.lost = nn.Parameter(torch.empty(3))
        self.constant = nn.Parameter(torch.full((2,), 7.0))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            self.model.layers[0].mlp.up_proj.weight.data.mul_(2.0)


def test_what_a_module_touches_is_measured_however_far_away():
    plain, odd = build_model(tiny("llama"), seed=4), Odd(tiny("llama"))
    initialise(odd, seed=4)
    far = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(odd.get_parameter(far), 2 * plain.get_parameter(far))
    other = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(odd.get_parameter(other), plain.get_parameter(other))
    torch.manual_seed(0)
    stream = torch.random.fork_rng(devices=[])
    with stream:
        torch.manual_seed(module_seed(4, "mix"))
        reference = nn.Bilinear(4, 4, 4)
    assert torch.equal(odd.mix.weight, reference.weight)
    assert odd.constant.tolist() == [7.0, 7.0]


def test_one_initialiser_for_many_seeds_draws_what_single_ones_do():
    model = Odd(tiny("llama"))
    draw = initialiser(model)
    for seed in (3, 5, 3):
        draw(seed)
        fresh = Odd(tiny("llama"))
        initialise(fresh, seed=seed)
        differing = [n for n, p in fresh.named_parameters() if not torch.equal(p, model.get_parameter(n))]
        assert not differing


def test_a_weight_that_nothing_writes_is_an_error(monkeypatch):
    monkeypatch.setattr(Odd, "forget", True)
    with pytest.raises(RuntimeError, match="never initialises lost"):
        initialise(Odd(tiny("llama")), seed=0)


def test_config_from_a_model_type_follows_the_tokenizer():
    tokenizer = FakeTokenizer(300, bos=None, eos=299, pad=299)
    config = load_config(model_type="gpt2", config_overrides={"hidden_size": 48, "n_head": 4}, tokenizer=tokenizer)
    assert (config.vocab_size, config.n_embd, config.use_cache) == (300, 48, False)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (299, 299, None)
    assert load_config(model_type="gpt2", vocab_size=320, tokenizer=tokenizer).vocab_size == 320
    assert load_config(model_type="gpt2", config_overrides={"vocab_size": 512}, tokenizer=tokenizer).vocab_size == 512


def test_a_padding_token_of_its_own_is_kept_and_eos_as_padding_is_not():
    """nn.Embedding(padding_idx=eos) would zero EOS and never train it."""
    for pad, expected in ((299, None), (0, 0), (None, None)):
        config = load_config(model_type="llama", tokenizer=FakeTokenizer(300, bos=1, eos=299, pad=pad))
        assert config.pad_token_id == expected


def test_config_from_a_folder_keeps_its_sizes(tmp_path):
    tiny("gemma2").save_pretrained(tmp_path)
    config = load_config(config_name=str(tmp_path), tokenizer=FakeTokenizer(50, bos=1, eos=2, pad=None))
    assert (config.model_type, config.vocab_size, config.hidden_size) == ("gemma2", 96, 64)
    with pytest.raises(ConfigError, match="layer_types"):
        load_config(config_name=str(tmp_path), config_overrides={"num_hidden_layers": 3})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "llama", "config_overrides": {"hiden_size": 8}}, "did you mean hidden_size"),
        ({"model_type": "lama"}, "did you mean llama"),
        ({}, "give one of the three"),
        ({"model_type": "llama", "config_name": "x"}, "give one of the three"),
    ],
)
def test_config_errors_name_the_remedy(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config(**settings)


def test_stored_weights_load_and_a_checkpoint_with_gaps_is_refused(tmp_path):
    model = build_model(tiny("llama"), seed=1)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, config=load_config(model_name_or_path=str(tmp_path)))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    deeper = tiny("llama", num_hidden_layers=3)
    with pytest.raises(ConfigError, match="lacks 9 weights"):
        load_model(tmp_path, config=deeper)


def test_true_shape_prefers_the_partitioned_truth():
    parameter = nn.Parameter(torch.zeros(0))
    assert true_shape(parameter) == (0,)
    parameter.ds_shape = torch.Size([3, 5])
    assert true_shape(parameter) == (3, 5)
    assert isinstance(build_model(tiny("gpt2"), seed=0), PreTrainedModel)
