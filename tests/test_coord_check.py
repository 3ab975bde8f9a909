"""The coordinate check says flat where it is, and not flat, and where, when muP is wrong or absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_mup_apply import config_of

import coord_check as recipe
from hfpretrain.mup.coord_check import CoordCheck, _fit, coord_check

WIDTHS = (32, 64, 128)


def check(**changes: object) -> CoordCheck:
    settings = {"widths": WIDTHS, "steps": 2, "lr": 3e-3, **changes}
    config = config_of("mixtral", initializer_range=0.15, num_local_experts=4, tie_word_embeddings=False)
    return coord_check(config, **settings)


def test_slope_of_known_points() -> None:
    assert _fit([(32, 3.0), (64, 6.0), (128, 12.0)]) == pytest.approx(1.0)
    assert _fit([(32, 4.0), (32, 1.0), (128, 2.0), (128, 0.5)]) == pytest.approx(-0.5)
    assert _fit([(32, 0.0), (64, 0.0)]) == 0.0


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
