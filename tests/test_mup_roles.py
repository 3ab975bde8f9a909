"""Roles by hand for every kind of tensor: Conv1D, experts, routers, low ranks, one key-value head, state spaces."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hfpretrain.errors import ConfigError
from hfpretrain.mup.infer import infer
from hfpretrain.mup.roles import Placed, place_all
from hfpretrain.mup.spec import MupSpec
from hfpretrain.mup.uses import watch_uses
from hfpretrain.mup.width import scale_width
from hfpretrain.small_models import tiny_config

# architecture: {role: pattern over parameter names without their layer}; all other parameters are vectors.
ROLES = {
    "gpt2": {
        "input": "transformer.(wte|wpe).weight",
        "hidden": "attn.(c_attn|c_proj).weight|mlp.(c_fc|c_proj).weight",  # Conv1D, [in, out]
        "tied_gain": "transformer.ln_f.(weight|bias)",
    },
    "gpt_oss": {
        "input": "model.embed_tokens.weight",
        "hidden": "self_attn.[qkvo]_proj.weight|mlp.experts.(gate_up|down)_proj",  # experts as [E, in, out]
        "output": "mlp.router.weight|lm_head.weight",
        "fixed": "mlp.router.bias",
    },
    "deepseek_v3": {
        "input": "model.embed_tokens.weight|self_attn.(q_b|kv_b)_proj.weight",
        "hidden": "self_attn.o_proj.weight|mlp.(shared_experts.)?(gate|up|down)_proj.weight|"
        "mlp.experts.(gate_up|down)_proj",
        "output": "self_attn.(q_a_proj|kv_a_proj_with_mqa).weight|mlp.gate.weight|lm_head.weight",
        "fixed": "self_attn.(q_a|kv_a)_layernorm.weight",
    },
    "falcon": {  # its query_key_value has many query heads and one key and value head
        "input": "transformer.word_embeddings.weight",
        "hidden": "self_attention.(query_key_value|dense).weight|mlp.dense_(h_to_4h|4h_to_h).weight",
        "tied_gain": "transformer.ln_f.(weight|bias)",
    },
    "mamba": {
        "input": "backbone.embeddings.weight|mixer.dt_proj.weight",
        "hidden": "mixer.(in|out)_proj.weight",
        "output": "mixer.x_proj.weight",
        "tied_gain": "backbone.norm_f.weight",
    },
}


def wide(model_type: str, **changes: Any) -> Any:
    return scale_width(type(config := tiny_config(model_type)).from_dict(config.to_dict() | changes), 2)


@pytest.fixture(scope="module")
def specs() -> dict[str, MupSpec]:
    return {name: infer(wide(name), base_width=64) for name in ROLES}


def test_roles_by_hand(specs: dict[str, MupSpec]) -> None:
    for model_type, expected in ROLES.items():
        for name, scaling in specs[model_type].parameters.items():
            key = re.sub(r"^.*?(layers|h)\.\*\.", "", name)
            found = [role for role, pattern in expected.items() if re.fullmatch(pattern, key)]
            assert scaling.role == (found or ["vector"])[0], f"{model_type} {name}"
        placed = {s.role for s in specs[model_type].parameters.values()} - {"vector"}
        assert placed == set(expected), model_type


def test_an_initialisation_that_knows_the_width_is_not_scaled_twice(specs: dict[str, MupSpec]) -> None:
    """Mamba draws out_proj with 1/sqrt(fan_in) by itself, in_proj with a constant."""
    out_proj = specs["mamba"].of("backbone.layers.0.mixer.out_proj.weight")
    assert (out_proj.multipliers.init, out_proj.multipliers.lr) == (1.0, 0.5)
    in_proj = specs["mamba"].of("backbone.layers.1.mixer.in_proj.weight")
    assert (in_proj.multipliers.init, in_proj.multipliers.lr) == (2**-0.5, 0.5)


def test_a_power_of_the_width_before_a_product_is_taken_out() -> None:
    """dots3 multiplies its normalised low ranks by sqrt(width / rank); dory's norms give length 1, not sqrt(width)."""
    spec = infer(scale_width(tiny_config("dots3_note_text"), 4), base_width=64)
    found = {
        name: scaling
        for name, scaling in spec.parameters.items()
        if (scaling.multipliers.init == 0.5) and (scaling.role != "hidden")
    }
    assert {re.sub(r".*self_attn\.", "", name): scaling.role for name, scaling in found.items()} == {
        "q_b_proj.weight": "input",
        "kv_b_proj.weight": "input",
        "indexer.wq_b.weight": "fixed",
    }
    for scaling in found.values():  # the weight is smaller by 4^-1/2, its gradients and Adam's epsilon larger by 4^1/2
        eps = 4**-0.5 if scaling.role == "input" else 4**0.5
        assert (scaling.multipliers.lr, scaling.multipliers.eps) == (0.5, eps)
    assert "q_b_proj.weight is multiplied by width^0.5: taken out of it" in spec.explain()
    head = infer(scale_width(tiny_config("dory"), 4), base_width=64).of("lm_head.weight").multipliers
    assert (head.init, head.lr, head.eps) == (0.5, 0.5, 0.5)  # an output's 1/4, times 4^1/2


def test_nothing_is_taken_out_where_nothing_is_put_in(specs: dict[str, MupSpec]) -> None:
    assert not [note for spec in specs.values() for note in spec.notes if "multiplied by width" in note]


def test_the_table_says_what_and_why(specs: dict[str, MupSpec]) -> None:
    lines = specs["gpt2"].explain().splitlines()
    assert lines[0] == "muP from base width 64 to 128, weight decay independent"
    row = next(line for line in lines if line.startswith("transformer.h.*.mlp.c_proj.weight"))
    assert row.split()[1:9] == ["hidden", "256x64", "512x128", "2", "0.7071", "0.5", "2", "0.5"]
    assert "doubles what goes into the head" in next(
        line for line in lines if line.startswith("transformer.ln_f.weight")
    )


class Oddities(nn.Module):
    """One of each thing that a name or a type would get wrong; `width` and `heads` grow."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.router = nn.Parameter(torch.randn(5, width))
        self.transposed = nn.Parameter(torch.randn(width, 2 * width))
        self.experts = nn.Parameter(torch.randn(3, 2 * width, width))
        self.per_head = nn.Parameter(torch.randn(heads, 4, 4))
        self.bias_table = nn.Parameter(torch.randn(7, heads))
        self.joined = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
        self.mixed = nn.Parameter(torch.randn(width, 3 * width + 8))
        self.cube = nn.Parameter(torch.randn(heads, width, width))
        self.unused = nn.Linear(width, 9)
        self.unused_conv1d = Conv1D(6, width)
        self.unused_image = nn.Conv2d(3, width, kernel_size=2)
        self.heads = heads

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        scores = x @ self.router.T
        x = x + (x @ self.transposed) @ self.experts[1]
        by_head = x[:, : self.heads * 4].reshape(-1, self.heads, 4).transpose(0, 1)
        by_head = torch.bmm(by_head, self.per_head) + self.bias_table[0, :, None, None]
        x = x @ torch.cat([layer.weight for layer in self.joined]).T + by_head.sum()
        x = x[:, : self.cube.shape[1]] @ torch.cat([self.mixed, self.mixed], dim=1)
        return x[:, : self.cube.shape[1]] @ self.cube[0] + scores.sum()


def place(overrides: dict[str, Any] | None = None) -> tuple[dict[str, Placed], list[Any]]:
    small, double = Oddities(16, 4), Oddities(32, 8)
    shapes = {
        name: (tuple(parameter.shape), tuple(other.shape))
        for (name, parameter), other in zip(small.named_parameters(), double.parameters(), strict=True)
    }
    return place_all(small, shapes, watch_uses(small, torch.arange(8).view(2, 4)), overrides or {})


def test_what_a_forward_pass_shows() -> None:
    placed, problems = place()
    roles = {name: (where.role, where.fan_in) for name, where in placed.items()}
    assert roles == {
        "embed.weight": ("input", ()),
        "router": ("output", (1,)),
        "transposed": ("hidden", (0,)),  # [in, out]
        "experts": ("hidden", (1,)),  # [E, in, out]
        "per_head": ("input", ()),  # heads grow, what is summed over does not
        "bias_table": ("vector", ()),
        **{f"joined.{i}.weight": ("hidden", (1,)) for i in (0, 1)},  # through a copy: the type says it
        **{f"joined.{i}.bias": ("vector", ()) for i in (0, 1)},
        "unused.weight": ("output", (1,)),
        "unused.bias": ("fixed", ()),
        "unused_conv1d.weight": ("output", (0,)),
        "unused_conv1d.bias": ("fixed", ()),
        "unused_image.weight": ("input", ()),  # 3 colours, whatever the width
        "unused_image.bias": ("vector", ()),
    }
    assert len(problems) == 2
    mixed, cube = problems
    assert mixed.what == "the muP role of mixed is unclear"
    assert mixed.given == "[16, 56] against [32, 104]: used through a copy"
    assert mixed.remedy.endswith("overrides={r'mixed': ROLE}")
    assert "more than two of its dimensions grow" in cube.given


def test_overrides() -> None:
    placed, problems = place({"mixed|cube": "vector", "router": "input"})
    assert (problems, placed["mixed"].role, placed["router"].role) == ([], "vector", "input")
    _, problems = place({"mixed|cube": "hiden", "nothing": "input", "(": "input"})
    texts = " ".join(map(str, problems))
    for part in ("names no muP role", "matches no parameter", "is no regular expression", "role of cube is unclear"):
        assert part in texts
    # A fan-in that cannot be known is not guessed: its two dimensions grow by 2 and by 104 / 56.
    assert "grow differently" in str(place({"mixed": "hidden"})[1][0])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="give exactly one of base_width and base_config"):
        infer(wide("llama"))
    with pytest.raises(ConfigError, match="a multiple of 16; or name"):
        infer(wide("llama"), base_width=40)
    deeper = tiny_config("llama")
    deeper.num_hidden_layers += 1
    with pytest.raises(ConfigError, match="has not the parameters of the one at base width"):
        infer(wide("llama"), base_config=deeper)


def test_sizes_that_do_not_run_are_refused() -> None:
    """Three key-value heads cannot be shared among four query heads: seen in a forward pass only."""
    config = tiny_config("llama")
    broken = type(config).from_dict(config.to_dict() | {"num_key_value_heads": 3})
    with pytest.raises(ConfigError, match="llama cannot run at width 64"):
        infer(tiny_config("llama"), base_config=broken)


def test_a_tied_head_without_a_gain_is_refused() -> None:
    """OLMo's norms have no parameters."""
    with pytest.raises(ConfigError, match="tie_word_embeddings: false in config_overrides"):
        infer(wide("olmo", tie_word_embeddings=True), base_width=64)


def test_the_gain_may_be_the_last_layers() -> None:
    """OPT that normalises after its blocks has no other norm before the head."""
    spec = infer(wide("opt", do_layer_norm_before=False), base_width=64)
    roles = [spec.of(f"model.decoder.layers.{layer}.final_layer_norm.weight").role for layer in (0, 1)]
    assert roles == ["vector", "tied_gain"]


def test_a_fixed_key_value_head_is_an_output() -> None:
    spec = infer(wide("llama", num_key_value_heads=1), base_width=64)
    assert spec.of("model.layers.0.self_attn.k_proj.weight").role == "output"
    assert spec.of("model.layers.0.self_attn.q_proj.weight").role == "hidden"
