"""recipes/tune_lr.py on a tiny run: killed and continued, with the numbers of pretrain.py alone; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import pretrain
import tune_lr
from hfpretrain.arguments import ModelArguments, parse
from hfpretrain.errors import ConfigError, Problem
from hfpretrain.model import load_config
from hfpretrain.mup.width import scale_width
from hfpretrain.training.sweep import remaining_seconds
from hfpretrain.training.trainer import PretrainTrainer
from hfpretrain.training.trials import overrides_at, plan_trials
from runs import arguments, curve, weights_hash, write_text

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16}
LLAMA = ",".join(f"{name}={value}" for name, value in SIZES.items()) + ",num_key_value_heads=4,intermediate_size=128"
RATES = ["3e-3", "3e-2", "1e4"]  # too low, right, and so high that it diverges


def run_flags(folder: Path, **changes: Any) -> list[str]:
    settings = {
        "model_type": "llama",
        "config_overrides": f"{LLAMA},max_position_embeddings=32,initializer_range=0.1",
        "max_steps": 8,
        "logging_steps": 1,
        "save_steps": 3,
        "output_dir": str(folder / "tune"),
    }
    return arguments(folder, **(settings | changes))


def sweep_flags(folder: Path, **changes: Any) -> list[str]:
    widths = ["--widths", "16", "32", "--learning_rates", *RATES]
    return [*run_flags(folder, **changes), *widths, "--json", str(folder / "tune.json")]


class Killed(BaseException):
    """What no code of ours catches."""


def test_a_sweep_that_is_killed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "text.jsonl")
    killed_at = tmp_path / "tune" / "width-32" / "lr-0.03" / "seed-42"
    step = PretrainTrainer.training_step

    def die(self: PretrainTrainer, *args: Any, **kwargs: Any) -> Any:
        if Path(str(self.args.output_dir)) == killed_at and self.state.global_step == 5:
            raise Killed
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(PretrainTrainer, "training_step", die)
        with pytest.raises(Killed):
            tune_lr.main(sweep_flags(tmp_path))
    done = list((tmp_path / "tune").rglob("outcome.json"))
    assert [path.parent.parent.name for path in done] == ["lr-0.003"]  # the widest first, in the order of the rates
    assert (killed_at / "checkpoint-3").is_dir()
    before = {path: path.stat().st_mtime_ns for path in done[0].parent.rglob("*")}

    # The same command: what is done stays, what was half done goes on from its checkpoint, the rest is run.
    found = tune_lr.main([*sweep_flags(tmp_path), "--png", str(tmp_path / "tune.png")])
    assert {path: path.stat().st_mtime_ns for path in done[0].parent.rglob("*")} == before
    assert len(json.loads((killed_at / "run.json").read_text())["earlier_launches"]) == 1
    told = capfd.readouterr().out
    assert "6 trials, 1 of them done" in told
    assert "width 32, learning rate 10000, seed 42: diverged" in told
    assert "learning_rate: 0.03" in told  # its neighbour above diverged, so there is no parabola
    assert "mup_base_width: 16" in told
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "tune.json").read_text()) == json.loads(json.dumps(found))
    assert found["measured"] == "held-out loss"
    assert [width["width"] for width in found["widths"]] == [16, 32]
    for width in found["widths"]:
        losses = {row["learning_rate"]: row["by_seed"][0] for row in width["losses"]}
        for rate, loss in losses.items():
            folder = tmp_path / "tune" / f"width-{width['width']}" / f"lr-{rate}" / "seed-42"
            scores = folder / "eval_results.json"
            assert loss == (json.loads(scores.read_text())["eval_loss"] if scores.exists() else None)
        assert losses[0.03] < losses[0.003]
        assert losses[1e4] is None
        assert width["best"] == 0.03

    # A trial's file runs by itself, and neither the sweep nor the kill changed a bit of it.
    alone = tmp_path / "alone"
    pretrain.main(["--config", str(killed_at / "trial.yaml"), "--output_dir", str(alone)])
    mine, theirs = (json.loads((folder / "eval_results.json").read_text()) for folder in (alone, killed_at))
    assert mine["eval_loss"] == theirs["eval_loss"]
    assert curve(alone) == curve(killed_at)
    assert weights_hash(alone) == weights_hash(killed_at)
    settings = yaml.safe_load((killed_at / "trial.yaml").read_text())
    assert settings["config_overrides"]["hidden_size"] == 32
    assert (settings["mup_base_width"], settings["eval_strategy"], settings["save_total_limit"]) == (16, "no", 1)
    assert json.loads((killed_at / "config.json").read_text())["head_dim"] == 16

    # Again: nothing is left to run. Other settings, and other data under the same name: refused, nothing is touched.
    monkeypatch.setattr(pretrain, "main", None)
    assert tune_lr.main([*sweep_flags(tmp_path), "--per_device_train_batch_size", "1"]) == found
    with pytest.raises(ConfigError) as caught:
        tune_lr.main(sweep_flags(tmp_path, max_steps=9))
    (problem,) = caught.value.problems
    assert problem.what.startswith("6 trials in this folder were begun with other settings")
    assert problem.given == "max_steps: 8 then, 9 now"
    with pytest.raises(ConfigError, match=r"mup_base_width: 16 then, None now"):
        tune_lr.main([*sweep_flags(tmp_path), "--standard"])
    record = json.loads(done[0].read_text())
    done[0].write_text(json.dumps(record | {"data_fingerprint": "another"}))
    with pytest.raises(ConfigError, match="trained on different data"):
        tune_lr.main(sweep_flags(tmp_path))


def test_without_held_out_text_the_last_tenth_counts(tmp_path: Path) -> None:
    """One seed after another, no muP; 20 steps, so the mean of the last two log lines, which have as many tokens."""
    write_text(tmp_path / "text.jsonl")
    flags = run_flags(tmp_path, max_steps=20, validation_fraction=0, save_strategy="no")
    words = [*flags, "--widths", "32", "--learning_rates", "1e-3", "1e-2", "3e-2", "--standard"]
    with pytest.raises(ConfigError, match="no log line is about the last tenth"):
        tune_lr.main([*words, "--logging_steps", "3"])
    found = tune_lr.main(words)
    assert found["measured"] == "training loss over the last tenth"
    assert (found["form"], found["mup"], found["choice"]) == ("standard", {}, None)
    (width,) = found["widths"]
    assert width["missing"] == pytest.approx([0.09, 0.27])  # falls up to the last rate
    for row in width["losses"]:
        folder = tmp_path / "tune" / "width-32" / f"lr-{row['learning_rate']}" / "seed-42"
        log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        last = [line["loss"] for line in log if "loss" in line][-2:]
        assert row["by_seed"] == [pytest.approx(sum(last) / 2, rel=1e-12)]
        assert not list(folder.glob("checkpoint-*"))
        assert "mup" not in json.loads((folder / "config.json").read_text())


def refused(words: str, folder: Path) -> list[Problem]:
    """What is said of these flags beside those of the run."""
    with pytest.raises(ConfigError) as caught:
        tune_lr.main([*run_flags(folder), *words.split()])
    assert not (folder / "tune").exists()
    return caught.value.problems


def test_everything_that_cannot_be_at_once(tmp_path: Path) -> None:
    found = refused("--widths 16 16 --learning_rates 1e-3 2e-3 --seeds 0 --preflight_only true", tmp_path)
    assert [problem.given for problem in found] == ["[16, 16]", "[0.001, 0.002]", "0", "preflight_only"]
    found = refused("--widths 24 32 40 --learning_rates 1e-3 2e-3 nan", tmp_path)
    assert [problem.given for problem in found] == ["[0.001, 0.002, nan]"]
    found = refused("--widths 24 32 40 --learning_rates 1e-3 2e-3 4e-3", tmp_path)
    assert len(found) == 2  # half a head, twice
    assert all("no whole numbers" in problem.what for problem in found)
    # Flags that neither recipe has are pretrain.py's to refuse; abbreviations are none.
    found = refused("--widths 16 --learning_rates 1 2 3 --learning_ratess 5 --width 8", tmp_path)
    assert len(found) == 2


def test_the_plan(tmp_path: Path) -> None:
    """Order, seeds, and which muP base a trial has."""
    plain = parse(run_flags(tmp_path, learning_rate=5.0, seed=7))
    trials = plan_trials(*plain, widths=[16, 32], learning_rates=[0.2, 0.1], seeds=2, standard=False)
    assert [(t.seed, t.width, t.learning_rate) for t in trials] == [
        (seed, width, rate) for seed in (7, 8) for width in (32, 16) for rate in (0.1, 0.2)
    ]
    assert {t.settings["mup_base_width"] for t in trials} == {16}
    assert all((t.settings["learning_rate"], t.settings["seed"]) == (t.learning_rate, t.seed) for t in trials)
    assert len({t.folder for t in trials}) == len(trials)
    own = parse([*run_flags(tmp_path), "--mup_base_width", "128", "--mup_weight_decay", "coupled"])
    (trial,) = plan_trials(*own, widths=[32], learning_rates=[0.1], seeds=1, standard=False)
    assert (trial.settings["mup_base_width"], trial.settings["mup_weight_decay"]) == (128, "coupled")
    (control,) = plan_trials(*own, widths=[32], learning_rates=[0.1], seeds=1, standard=True)
    assert not {name for name in control.settings if name.startswith("mup_")}


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "mamba", "zamba2", "qwen3_next", "youtu", "bart"])
def test_overrides_give_the_scaled_configuration(model_type: str) -> None:
    """Derived values too: youtu draws from its width, zamba2 its head size. Aliases: gpt2's width is n_embd."""
    given: dict[str, Any] = {"hidden_size": 1536} if model_type == "gpt2" else {}
    own = load_config(model_type=model_type, config_overrides=given)
    overrides = overrides_at(ModelArguments(model_type=model_type, config_overrides=given), own.hidden_size * 2)
    rebuilt = load_config(model_type=model_type, config_overrides=overrides)
    assert rebuilt.to_dict() == scale_width(own, 2).to_dict()
    assert rebuilt.hidden_size == 2 * own.hidden_size


def test_overrides_on_a_saved_configuration(tmp_path: Path) -> None:
    own = load_config(model_type="llama", config_overrides=SIZES | {"num_key_value_heads": 2, "vocab_size": 99})
    own.save_pretrained(tmp_path)
    given = {"num_hidden_layers": 3}
    overrides = overrides_at(ModelArguments(config_name=str(tmp_path), config_overrides=given), 32)
    rebuilt = load_config(config_name=str(tmp_path), config_overrides=overrides)
    names = ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size")
    assert [getattr(rebuilt, name) for name in names] == [32, 16, 2, 1, 3, 99]


def test_a_trial_file_says_what_the_run_said(tmp_path: Path) -> None:
    """Read back by pretrain.py's own parser: the same values, `none` and small numbers too."""
    unset = ["--report_to", "none", "--save_total_limit", "none"]
    given = parse([*run_flags(tmp_path), "--weight_decay", "1e-5", *unset])
    (trial,) = plan_trials(*given, widths=[64], learning_rates=[1e-5], seeds=1, standard=True)
    again = parse(["--config", str(trial.write())])
    assert again[2].learning_rate == 1e-5
    assert again[0].config_overrides == given[0].config_overrides
    assert vars(again[1]) == vars(given[1])
    before, after = ({**vars(args)} for args in (given[2], again[2]))
    changed = {name for name, value in before.items() if name in given[2].sources and value != after[name]}
    assert changed <= {"output_dir", "learning_rate", "eval_strategy", "do_eval"}


def test_time_left() -> None:
    assert remaining_seconds([256, 64, 64], {256: [100.0, 120.0], 128: [30.0]}) == 330.0  # 64: as long as 256, still
    assert remaining_seconds([64, 128], {256: [100.0], 64: [10.0], 128: [30.0]}) == 40.0
    assert remaining_seconds([], {256: [1.0]}) == 0.0
