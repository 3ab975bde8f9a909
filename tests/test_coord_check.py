"""The coordinate check says flat where it is, and not flat, and where, when muP is wrong or absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_mup_apply import config_of
from torch import Tensor, nn

import coord_check as recipe
from hfpretrain.mup.activations import activations
from hfpretrain.mup.coord_check import CoordCheck, coord_check
from hfpretrain.mup.slopes import Sizes, Slope, _fit, slope_of
from hfpretrain.small_models import tiny_config

WIDTHS = (32, 64, 128)


def check(**changes: object) -> CoordCheck:
    settings = {"widths": WIDTHS, "steps": 2, "lr": 3e-3, **changes}
    config = config_of("mixtral", initializer_range=0.15, num_local_experts=4, tie_word_embeddings=False)
    return coord_check(config, **settings)


def test_slope_of_known_points() -> None:
    assert _fit([(32, 3.0), (64, 6.0), (128, 12.0)]) == pytest.approx((1.0, 0.0))
    assert _fit([(32, 0.0), (64, 0.0)]) == (0.0, 0.0)
    # log2 x - mean: -1 or 1, log2 y: 2 0 1 -1. Slope -2/4; each misses by 1, so the error is sqrt(4 / (4 - 2) / 4).
    assert _fit([(32, 4.0), (32, 1.0), (128, 2.0), (128, 0.5)]) == pytest.approx((-0.5, 0.5**0.5))


def sizes(width: int, size: float, *, grows: bool = True, fed: float | None = None, fed_grows: bool = False) -> Sizes:
    shape, fed_shape = (2, width if grows else 8), (2, width if fed_grows else 8)
    return Sizes(width, shape, size, size, size, () if fed is None else fed_shape, "fc1", fed or 0.0, fed or 0.0)


def test_what_is_held_against_a_module() -> None:
    """n^-1/2 out of scores that are n^-1/2 is flat; out of anything that grows, or out of Theta(1), it is not."""
    halves = {64: 1.0, 256: 0.5}
    cases = [
        (slope_of("fc2", [sizes(n, y, fed=3 * y) for n, y in halves.items()], (), {}), True, 0.0),
        (slope_of("fc2", [sizes(n, y, fed=3.0) for n, y in halves.items()], (), {}), False, 0.5),
        (slope_of("fc2", [sizes(n, y, fed=3 * y, fed_grows=True) for n, y in halves.items()], (), {}), False, 0.5),
        (slope_of("fc2", [sizes(n, y) for n, y in halves.items()], (), {}), False, 0.5),
        (slope_of("fc2", [sizes(n, 1 / y, fed=1 / y) for n, y in halves.items()], (), {}), False, 0.5),  # never upwards
        (slope_of("head", [sizes(n, y, grows=False) for n, y in halves.items()], (), {}), True, -0.5),
    ]
    # Fed with what another module made: one that is fed with scores itself, and one that is not.
    for fed_with, flat in ((cases[0][0], True), (cases[5][0], False)):
        rows = [sizes(n, y, fed=y, fed_grows=True) for n, y in halves.items()]
        cases.append((slope_of("norm", rows, (), {"fc1": fed_with}), flat, 0.0 if flat else 0.5))
    for slope, flat, steepness in cases:
        assert (slope.flat, slope.steepness[0]) == (flat, pytest.approx(steepness))


def test_noise_is_no_slope_and_no_excuse() -> None:
    def slope(*rows: tuple[int, float]) -> Slope:
        return slope_of("gate", [sizes(width, size) for width, size in rows], (), {})

    noisy = slope((64, 1.0), (64, 16.0), (256, 2.0), (256, 32.0))  # slope 1/2, error sqrt(16 / 2 / 4)
    assert noisy.errors[0] == pytest.approx(2**0.5)
    assert (noisy.measured, noisy.flat) == (False, True)
    steep = slope((64, 1.0), (64, 2.0), (256, 64.0), (256, 128.0))  # slope 3, error sqrt(1 / 2 / 4)
    assert steep.errors[0] == pytest.approx(8**-0.5)
    assert (steep.measured, steep.flat) == (True, False)
    assert slope((64, 1.0), (256, 2.0)).measured  # one seed: nothing is known of its noise


class Bottleneck(nn.Module):
    """Returns what its last layer made, or that with something added in place."""

    def __init__(self, add: bool) -> None:
        super().__init__()
        self.narrow, self.wide, self.add = nn.Linear(6, 2), nn.Linear(2, 6), add

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wide(self.narrow(x))
        return y.add_(x) if self.add else y


def test_what_a_module_is_fed_with() -> None:
    for add in (False, True):
        embed = nn.Embedding(5, 6)
        model = nn.ModuleDict({"embed": embed, "block": Bottleneck(add)})
        model.forward = lambda input_ids, parts=model: parts["block"](parts["embed"](input_ids))  # type: ignore[method-assign]
        found = activations(model, torch.tensor([[1, 4, 2]]))
        assert list(found) == ["embed", "block.narrow", "block.wide", "block"]
        assert found["embed"].fed is None
        assert found["block.wide"].fed.shape == (1, 3, 2)
        assert torch.equal(found["block.wide"].fed, found["block.narrow"].output)
        assert (found["block.wide"].fed_by, found["block.narrow"].fed_by) == ("block.narrow", "embed")
        assert found["block"].fed_by == ("embed" if add else "block.narrow")
        assert torch.equal(found["block"].output, found["block.wide"].output) is not add
        assert found["block"].fed.shape == ((1, 3, 6) if add else (1, 3, 2))


# What muP puts into an activation on purpose, or cannot help: the gain before a tied head in the last layer (bart) and
# inside of the head (bert), an embedding that is multiplied by sqrt(width) later (ctrl) or before a norm (plbart), a
# low rank without a norm (axk2), a norm's output times sqrt(width) (dots3_note_text), sizes in a part of the
# configuration (dbrx).
@pytest.mark.parametrize("model_type", ["bart", "bert", "ctrl", "plbart", "axk2", "dots3_note_text", "dbrx"])
def test_architectures_that_need_it(model_type: str) -> None:
    config = tiny_config(model_type)
    assert coord_check(config, widths=(64, 256), steps=2).fault == ""
    assert coord_check(config, widths=(64, 256), steps=1, standard=True).fault != ""


def test_mup_is_flat_and_the_standard_parametrisation_is_not() -> None:
    good = check()
    assert (good.verdict, good.fault) == ("flat", "")
    assert {s.kind.rpartition(".")[2] for s in good.slopes if not s.grows} >= {"lm_head", "gate"}
    bad = check(standard=True)
    assert bad.verdict == "not flat"
    assert max(slope.size for slope in bad.slopes) > 0.4


def test_what_is_wrong_is_named() -> None:
    """A router that is treated as an embedding, and experts as vectors: both are known mistakes."""
    router = check(overrides={r".*mlp\.gate\.weight": "input"})
    assert "mlp.gate (roles: input)" in router.fault
    experts = check(overrides={r".*mlp\.experts\..*": "vector"})
    assert "mlp.experts (roles: vector)" in experts.fault


def test_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "check.json"
    flags = ["--model_type", "llama", "--config_overrides", "tie_word_embeddings=true", "--widths", "64", "128"]
    recipe.main([*flags, "--steps", "1", "--json", str(out), "--png", str(tmp_path / "check.png")])
    result = json.loads(out.read_text())
    assert result["verdict"] == "flat"
    assert result["widths"] == [64, 128]
    norm = next(slope for slope in result["slopes"] if slope["kind"] == "model.norm")
    assert abs(norm["size"]) < 0.05  # without the 1/width of the readout that its gain holds
    assert capsys.readouterr().out.rstrip().endswith("flat")
    assert (tmp_path / "check.png").stat().st_size > 10_000


def test_a_refusal_has_its_own_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "check.json"
    for flags in (["--model_type", "llama", "--widths", "64", "72"], ["--model_type", "llama", "--widths", "64"]):
        with pytest.raises(SystemExit) as stopped:
            recipe.main([*flags, "--json", str(out)])
        assert stopped.value.code == 2
        assert json.loads(out.read_text())["verdict"] == "refused"
        assert capsys.readouterr().out.startswith("refused: ")
