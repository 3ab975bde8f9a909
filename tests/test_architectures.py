"""The same command trains every family on real text; where documents cannot share a row it says so, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pretrain
from hfpretrain.errors import ConfigError

SMALL = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4"
LLAMA_LIKE = f"{SMALL},num_key_value_heads=2,intermediate_size=128,max_position_embeddings=128"
ISOLATED = {
    "gpt2": "n_embd=64,n_layer=2,n_head=4,n_positions=128",
    "llama": LLAMA_LIKE,
    "qwen3": f"{LLAMA_LIKE},head_dim=16",
    "gemma2": f"{LLAMA_LIKE},head_dim=16,sliding_window=32",
    "mixtral": f"{LLAMA_LIKE},num_local_experts=4,output_router_logits=true",
    "gpt_neox": f"{SMALL},intermediate_size=128",
    "falcon": f"{SMALL}",
    "phi3": LLAMA_LIKE,
    "olmo2": LLAMA_LIKE,
    "gpt_oss": f"{LLAMA_LIKE},head_dim=16,num_local_experts=4,sliding_window=32",
    "opt": f"{SMALL},ffn_dim=128,word_embed_proj_dim=64,max_position_embeddings=128",
}
# opt makes its mask without position_ids, so with its own attention an explicit mask is what helps
ATTENTION = {"opt": "sdpa"}
BY = {"falcon": "position_ids", "gpt_oss": "varlen with torch_varlen", "opt": "mask"}
LEAKING = {
    "mamba": "hidden_size=64,num_hidden_layers=2,state_size=8",
    "bloom": "hidden_size=64,n_layer=2,n_head=4",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real files of this repository's language: the json, email and html packages of the running interpreter."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(json.__file__).parents[1]
    sources = sorted([*library.glob("json/*.py"), *library.glob("email/*.py"), *library.glob("html/*.py")])
    rows = [json.dumps({"text": path.read_text(encoding="utf-8")}) for path in sources]
    (folder / "text.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def _arguments(corpus: Path, model_type: str, overrides: str, output_dir: Path) -> list[str]:
    settings = {
        "model_type": model_type,
        "config_overrides": overrides,
        "tokenizer_name": "train:512",
        "dataset": corpus / "text.jsonl",
        "validation_fraction": 0,
        "sequence_length": 128,
        "batch_tokens": 1024,
        "per_device_train_batch_size": 4,
        "max_steps": 20,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "output_dir": output_dir,
        "cache_dir": corpus / "cache",
        "preprocessing_num_workers": 1,
        "disable_tqdm": "true",
    }
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


def _losses(run: Path) -> list[float]:
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return [line["loss"] for line in history if "loss" in line]


def test_preflight_only_makes_no_step(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain.main([*_arguments(text, "llama", ISOLATED["llama"], tmp_path / "run"), "--preflight_only", "true"])
    printed = capsys.readouterr().out
    assert "nothing contradicts" in printed
    ours = [line for line in printed.splitlines() if not line.startswith("[")]  # DeepSpeed logs its accelerator there
    assert len(ours) <= 24  # one screen
    assert max(map(len, ours)) <= 120
    assert "'loss'" not in printed
    assert [path.name for path in (tmp_path / "run").glob("*")] == ["preflight.json"]
    with pytest.raises(ConfigError, match="see the one before it"):
        pretrain.main([*_arguments(text, "bloom", LEAKING["bloom"], tmp_path), "--preflight_only", "true"])


@pytest.mark.parametrize("model_type", [*ISOLATED, *LEAKING])
def test_loss_falls(model_type: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leaks = model_type in LEAKING
    overrides = (LEAKING if leaks else ISOLATED)[model_type]
    arguments = _arguments(text, model_type, overrides, tmp_path)
    arguments += ["--attn_implementation", ATTENTION.get(model_type, "auto")]
    if leaks:
        with pytest.raises(ConfigError, match=r"see the one before it[\s\S]*packing: single"):
            pretrain.main(arguments)
        arguments += ["--packing", "single"] if model_type == "mamba" else ["--isolate_documents", "false"]
    pretrain.main(arguments)
    assert f"documents are kept apart by {BY.get(model_type, '')}" in capsys.readouterr().out or leaks
    losses = _losses(tmp_path)
    assert len(losses) == 20
    assert losses[0] == pytest.approx(6.24, abs=0.7)  # ln(512) nats, give or take what initialisation adds
    assert sum(losses[-3:]) / 3 < losses[0] - 0.7
    assert (tmp_path / "model.safetensors").is_file()
