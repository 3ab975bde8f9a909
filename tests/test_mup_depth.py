"""Depth scaling without multipliers is CompleteP: equal to the form with residual multipliers in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_mup_apply import SMALL, config_of, losses
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from hfpretrain.errors import ConfigError
from hfpretrain.model import build_model, name_template
from hfpretrain.mup.apply import apply
from hfpretrain.mup.depth import depth_laws
from hfpretrain.mup.infer import infer
from hfpretrain.mup.layers import set_depth
from hfpretrain.mup.probe import probe_model
from hfpretrain.mup.rules import Multipliers, at_depth
from hfpretrain.mup.spec import MupSpec
from hfpretrain.mup.stream import watch_stream
from hfpretrain.small_models import tiny_config
from hfpretrain.training.optimizer import parameter_groups

BASE_WIDTH, WIDTH_RATIO, BASE_DEPTH, DEPTH_RATIO = 16, 2, 1, 3
LR, DECAY, EPS = 1e-2, 0.3, 1e-4  # an epsilon as large as the gradients, so that its exponents matter
GPT2 = {"n_embd": 32, "n_head": 8, "n_positions": 32, "n_layer": 3, "vocab_size": 96, "initializer_range": 0.1} | {
    f"{where}_pdrop": 0.0 for where in ("embd", "resid", "attn")
}
CASES: dict[str, dict[str, Any]] = {
    "llama tied": {"tie_word_embeddings": True},
    "llama untied": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "gpt2": GPT2,
    "mixtral": {"tie_word_embeddings": False, "num_local_experts": 4},
}


def deep_config(case: str) -> Any:
    """At twice the base width and three times the base depth."""
    model_type, *_ = case.split()
    if model_type == "gpt2":
        return CONFIG_MAPPING["gpt2"](**GPT2)
    return config_of(model_type, WIDTH_RATIO, num_hidden_layers=BASE_DEPTH * DEPTH_RATIO, **CASES[case])


def textbook(model: PreTrainedModel, *, eps_in_branches: float = DEPTH_RATIO) -> list[dict[str, Any]]:
    """CompleteP, table 1 with alpha = 1, with its multipliers in the forward pass.

    Tensor Programs V for the width: what goes into the head and into a router is divided by the width ratio.
    """
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] / WIDTH_RATIO,))
    groups: list[dict[str, Any]] = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("self_attn", "mlp", "attn"):  # a residual branch, of all three architectures

            def divided(_: nn.Module, __: Any, out: Any) -> Any:
                return (out[0] / DEPTH_RATIO, *out[1:]) if isinstance(out, tuple) else out / DEPTH_RATIO

            module.register_forward_hook(divided)
        if name.endswith("mlp.gate") and "Router" in type(module).__name__:
            module.register_forward_pre_hook(lambda _, args: (args[0] / WIDTH_RATIO, *args[1:]))
    for name, parameter in model.named_parameters():
        inside = ".layers." in name or ".h." in name
        hidden = inside and parameter.ndim > 1 and not name.endswith("mlp.gate.weight")
        decays = parameter.ndim > 1 and not any(word in name for word in ("embed", "wte", "wpe"))
        with torch.no_grad():
            if hidden:
                parameter.div_(math.sqrt(WIDTH_RATIO))
            if name.endswith("c_proj.weight"):  # GPT-2's own initialisation at the base depth, not at this one
                parameter.mul_(math.sqrt(DEPTH_RATIO))
        group = {
            "params": [parameter],
            "lr": LR / WIDTH_RATIO if hidden else LR,
            "weight_decay": (DECAY * WIDTH_RATIO if hidden else DECAY) if decays else 0.0,
            "eps": EPS / WIDTH_RATIO / (eps_in_branches if inside else 1.0),
        }
        groups.append(group)
    return groups


@pytest.mark.parametrize("case", CASES)
def test_equal_to_residual_multipliers(case: str) -> None:
    config = deep_config(case)
    spec = infer(config, base_width=BASE_WIDTH, base_depth=BASE_DEPTH)
    ours, theirs, wrong = (build_model(config, seed=3).double() for _ in range(3))
    for model in (ours, theirs, wrong):
        model.set_experts_implementation("eager")  # the grouped product takes no float64
    with torch.no_grad():
        for model in (ours, theirs, wrong):  # biases that are not zero, so that their multipliers show
            for index, (name, parameter) in enumerate(model.named_parameters()):
                if name.endswith("bias"):
                    generator = torch.Generator().manual_seed(index)
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    apply(ours, spec)
    mine = losses(ours, parameter_groups(ours, weight_decay=DECAY, lr=LR, eps=EPS, mup=spec), 25)
    reference = losses(theirs, textbook(theirs), 25)
    assert max(abs(a - b) for a, b in zip(mine, reference, strict=True)) < 1e-9
    assert reference[0] - reference[-1] > 0.5  # it did learn
    # An epsilon that does not follow the depth is another training: the comparison would see it.
    other = losses(wrong, textbook(wrong, eps_in_branches=1.0), 5)
    assert max(abs(a - b) for a, b in zip(mine, other, strict=False)) > 1e-5


def test_at_the_base_depth_it_is_the_spec_of_the_width_alone() -> None:
    config = deep_config("gpt2")
    width_only = infer(config, base_width=BASE_WIDTH)
    same = infer(config, base_width=BASE_WIDTH, base_depth=3)
    assert same == width_only
    assert same.fingerprint == width_only.fingerprint
    assert infer(config, base_width=BASE_WIDTH, base_depth=1).fingerprint != width_only.fingerprint


def test_rules_by_hand() -> None:
    """Four times the depth: 1/4 in the writers; what the architecture does by itself is taken off."""
    own = Multipliers(init=0.5, lr=0.25, weight_decay=4.0, eps=0.125)
    assert at_depth(own, "outside", depth_ratio=4) == own
    assert at_depth(own, "branch", depth_ratio=4) == Multipliers(0.5, 0.25, 4.0, 0.125 / 4)
    assert at_depth(own, "writer", depth_ratio=4) == Multipliers(0.5 / 4, 0.25 / 4, 16.0, 0.125)
    of_gpt2 = at_depth(own, "writer", depth_ratio=4, own_init_exponent=-0.5)
    assert of_gpt2 == Multipliers(0.5 / 2, 0.25 / 4, 16.0, 0.125)
    of_minicpm3 = at_depth(own, "writer", depth_ratio=4, forward_exponent=-0.5)
    assert of_minicpm3 == Multipliers(0.5 / 2, 0.25 / 2, 8.0, 0.125 / 2)


# architecture: what writes into its stream, by hand; (1 + weight) where that is the gain
WRITERS = {
    "gemma2": {"post_attention_layernorm.weight (1 + w)", "post_feedforward_layernorm.weight (1 + w)"},
    "olmo2": {"post_attention_layernorm.weight", "post_feedforward_layernorm.weight"},
    "gpt_neox": {f"{m}.{kind}" for m in ("attention.dense", "mlp.dense_4h_to_h") for kind in ("weight", "bias")},
    "deepseek_v3": {
        *("self_attn.o_proj.weight", "mlp.experts.down_proj", "mlp.shared_experts.down_proj.weight"),
        "mlp.down_proj.weight",  # of the first layer, which is dense
    },
    "mamba": {"mixer.out_proj.weight"},
    "minicpm3": {"self_attn.o_proj.weight", "mlp.down_proj.weight"},
}


def test_what_writes_into_the_stream() -> None:
    for model_type, expected in WRITERS.items():
        base = tiny_config(model_type)
        own = set_depth(base, 2 * base.num_hidden_layers)
        assert len(own.layer_types if model_type == "gemma2" else range(own.num_hidden_layers)) == 4
        laws, notes = depth_laws(probe_model(own), probe_model(base), overrides={})
        found = {
            name_template(name).partition(".*.")[2] + (" (1 + w)" if law.one_plus else "")
            for name, law in laws.items()
            if law.place == "writer"
        }
        assert found == expected, model_type
        assert {law.forward_exponent for law in laws.values()} == {-0.5 if model_type == "minicpm3" else 0.0}
        outside = {name for name, law in laws.items() if law.place == "outside"}
        assert outside == {name for name in laws if ".layers." not in name}, model_type
        assert bool(notes) == (model_type == "minicpm3")


def test_a_gain_of_one_plus_weight_writes() -> None:
    base = config_of("gemma2", sliding_window=16, query_pre_attn_scalar=4)
    config = set_depth(base, 4)
    spec = infer(config, base_width=BASE_WIDTH, base_depth=2)
    model = build_model(config, seed=0)
    apply(model, spec)
    gain = model.model.layers[3].post_attention_layernorm.weight
    torch.testing.assert_close(1 + gain, torch.full_like(gain, 0.5))
    assert not model.model.layers[3].input_layernorm.weight.any()
    with pytest.raises(ConfigError, match="holds 1/depth - 1 to some percent only"):
        apply(build_model(config, seed=0, dtype=torch.bfloat16), spec)


def test_the_depth_in_gpt2s_initialisation_is_not_scaled_twice() -> None:
    """0.1 / sqrt(2 * 3) by itself; CompleteP wants a third of what it is at the base depth, 0.1 / sqrt(2 * 1) / 3."""
    config = deep_config("gpt2")
    model, spec = build_model(config, seed=0), infer(config, base_width=32, base_depth=BASE_DEPTH)
    before = model.transformer.h[2].mlp.c_proj.weight.std().item()
    assert before == pytest.approx(0.1 / math.sqrt(6), rel=0.05)
    apply(model, spec)
    assert model.transformer.h[2].mlp.c_proj.weight.std().item() == pytest.approx(0.1 / math.sqrt(2) / 3, rel=0.05)
    assert any("c_proj.weight is initialised with a power -0.5 of the depth" in note for note in spec.notes)


def change_of_the_stream(depth: int, spec: MupSpec | None) -> float:
    """RMS change of what leaves the last layer after four steps.

    The embeddings are of size 1. Where they are small (0.02 by default) the stream is mostly branches at the base depth
    and less so the deeper the model is: what is flat for many layers comes down to that from above.
    """
    model = build_model(config_of(num_hidden_layers=depth, tie_word_embeddings=False), seed=0)
    if spec is not None:
        apply(model, spec)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1 / SMALL["initializer_range"])
    left: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: left.append(args[0].detach()))
    losses(model, parameter_groups(model, weight_decay=0.0, lr=LR, eps=1e-12, mup=spec), 5)  # noted before each step
    return float((left[4] - left[0]).square().mean().sqrt())


def test_the_streams_change_is_flat_in_depth_and_grows_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """CompleteP's coordinate check: depths of 2 to 16, at one width."""
    monkeypatch.setattr("hfpretrain.mup.measure.MAX_SEEDS", 1)  # laws of the width are not looked at here
    depths = (2, 4, 8, 16)
    slopes = {}
    for with_depth in (True, False):
        changes = []
        for depth in depths:
            config = config_of(num_hidden_layers=depth, tie_word_embeddings=False)
            deeper = with_depth and depth > depths[0]
            spec = infer(config, base_width=BASE_WIDTH, base_depth=depths[0]) if deeper else None
            changes.append(change_of_the_stream(depth, spec))
        x, y = (torch.tensor([math.log2(value) for value in values]) for values in (depths, changes))
        slopes[with_depth] = float(((x - x.mean()) * y).sum() / (x - x.mean()).square().sum())
    assert abs(slopes[True]) < 0.15
    assert slopes[False] > 0.4


def test_it_is_said_and_stored() -> None:
    spec = infer(deep_config("llama untied"), base_width=BASE_WIDTH, base_depth=BASE_DEPTH)
    again = MupSpec.from_json(spec.to_json())
    assert (again, again.depth, again.base_depth) == (spec, 3, 1)
    old = {**spec.as_dict(), "notes": []}
    for key in ("depth", "base_depth"):
        old.pop(key)
    assert MupSpec.from_dict(old).fingerprint == spec.fingerprint  # one that was written before there was depth
    lines = spec.explain().splitlines()
    assert lines[0] == "muP from base width 16 to 32, base depth 1 to 3, weight decay independent"
    row = next(line for line in lines if line.startswith("model.layers.*.mlp.down_proj.weight"))
    assert row.split()[1:10] == ["hidden", "writer", "16x32", "32x64", "2", "0.2357", "0.1667", "6", "0.5"]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "part"),
    [
        ("bert", "what leaves layer 0 is scaled by bert.encoder.layer.0.output.LayerNorm"),
        ("bart", "an encoder and a decoder have a residual stream each"),
    ],
)
def test_a_stream_that_is_no_sum(model_type: str, part: str) -> None:
    config = tiny_config(model_type)
    config.is_encoder_decoder = model_type == "bart"
    with pytest.raises(ConfigError, match=part.replace(".", r"\.")):
        infer(config, base_width=64, base_depth=1)


def test_a_base_depth_without_every_kind_of_layer() -> None:
    config = set_depth(tiny_config("deepseek_v3"), 4)  # the first layer is dense
    with pytest.raises(ConfigError, match=r"not among those of the base depth.*\n.*mlp\.experts"):
        infer(config, base_width=64, base_depth=1)


def test_base_depths_that_cannot_be() -> None:
    config, base = deep_config("llama untied"), config_of(**CASES["llama untied"], num_hidden_layers=1)
    with pytest.raises(ConfigError, match="the base depth is no depth"):
        infer(config, base_width=BASE_WIDTH, base_depth=0)
    with pytest.raises(ConfigError, match="given twice, and the two differ"):
        infer(config, base_config=base, base_depth=2)
    with pytest.raises(ConfigError, match="none is given"):
        infer(config, base_width=BASE_WIDTH, depth_overrides={".*": "branch"})
    assert infer(config, base_config=base, base_depth=1) == infer(config, base_width=BASE_WIDTH, base_depth=1)


def laws_with(overrides: dict[str, Any]) -> dict[str, Any]:
    base = config_of()
    return depth_laws(probe_model(set_depth(base, 4)), probe_model(base), overrides=overrides)[0]


def test_overrides_are_proved_as_well() -> None:
    """The branch is linear in up_proj, too: the same training. Without one of them, or with both, it is not."""
    other = {r".*\.up_proj\.weight": "writer", r".*\.down_proj\.weight": "branch"}
    assert laws_with(other)["model.layers.3.mlp.up_proj.weight"].place == "writer"
    for wrong in ({r".*\.up_proj\.weight": "writer"}, {r".*\.down_proj\.weight": "branch"}):
        with pytest.raises(ConfigError, match="does not double what the branches add"):
            laws_with(wrong)
    with pytest.raises(ConfigError) as refused:
        laws_with({"(": "writer", ".*down_proj.weight": "writes", "nothing": "branch"})
    for part in ("no regular expression", "names no place", "matches no parameter"):
        assert part in str(refused.value)


class Layer(nn.Module):
    """One branch of each kind, chosen by `kind`."""

    def __init__(self, width: int, kind: str, shared: nn.Linear) -> None:
        super().__init__()
        self.kind, self.shared = kind, shared
        self.inner, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(width))
        self.experts = nn.Parameter(torch.randn(2, width, width))

    def branch(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        match self.kind:
            case "gain behind":
                return nn.functional.rms_norm(self.last(hidden), x.shape[-1:]) * self.gain
            case "nonlinear":
                return torch.tanh(self.last(hidden))
            case "product of two":  # of degree two in both together, linear in the first
                return self.last(hidden) * torch.sigmoid(self.last(x))
            case "experts":
                out = torch.zeros_like(hidden)
                for expert in (0, 1):
                    rows = torch.arange(expert, len(x), 2)
                    out.index_add_(0, rows, hidden[rows] @ self.experts[expert] * torch.sigmoid(x[rows, :1]))
                return out + self.shared(hidden) * 0.5 + self.last(hidden)
            case "shared":
                return self.shared(hidden)
        return self.last(hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "scaled stream":
            x = 0.5 * x
        out = self.branch(x)
        return out.add_(x) if self.kind == "in place" else x + out


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, shared = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList([Layer(4, kind, shared) for _ in range(2)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("plain", {"last.weight", "last.bias"}),
        ("in place", {"last.weight", "last.bias"}),
        ("gain behind", {"gain"}),
        ("experts", {"experts", "last.weight", "last.bias", "shared.weight", "shared.bias"}),
        ("shared", {"shared.weight", "shared.bias"}),
        ("nonlinear", None),
        ("product of two", None),
    ],
)
def test_every_kind_of_branch(kind: str, expected: set[str] | None) -> None:
    model = Model(kind)
    stream = watch_stream(model, list(model.layers), torch.arange(8))
    assert (stream.broken, stream.calls, stream.start) == ("", [0, 1], {"embed.weight"})
    assert len(stream.contributions) == 2
    for branch in stream.contributions:
        linear = branch.flow.linear
        found = None if linear is None else {name.split(".", 2)[2] for name, one_plus in linear if not one_plus}
        assert found == expected
        assert "embed.weight" not in branch.flow.depends
    torch.testing.assert_close(stream.sums[-1], model(torch.arange(8)))


def test_a_stream_that_is_scaled_on_its_way_is_none() -> None:
    model = Model("scaled stream")
    assert "what leaves layer 0 comes out of" in watch_stream(model, list(model.layers), torch.arange(8)).broken


def test_branches_read_the_stream_that_they_are_given() -> None:
    """With the sums of another pass, doubled writers double each contribution, though layer 1 reads layer 0's."""
    model, ids = Model("plain"), torch.arange(8)
    once = watch_stream(model, list(model.layers), ids)
    with torch.no_grad():
        for layer in model.layers:
            layer.last.weight.mul_(2)
            layer.last.bias.mul_(2)
    held = watch_stream(model, list(model.layers), ids, sums=once.sums)
    free = watch_stream(model, list(model.layers), ids)
    torch.testing.assert_close(held.contributions[1].value, 2 * once.contributions[1].value)
    assert not torch.allclose(free.contributions[1].value, 2 * once.contributions[1].value, rtol=1e-2)
