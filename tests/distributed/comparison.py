"""Tiny models with different tokenizers and texts with every trap, for `recipes/compare_bpb.py`."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import normalizers

from hfpretrain.data.tokenizer import byte_tokenizer, load_tokenizer
from hfpretrain.model import build_model, load_config
from launching import REPOSITORY

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
PLAIN = [f"{n}: the quick brown fox jumps over {'the lazy dog ' * (n % 4)}" for n in range(12)]
EDGE = ["one\r\ntwo", "a\u2028b", "\ufeff\x00", "\U0001f468\u200d\U0001f469", "", "x", "\u1112\u1161\u11ab"]
TEXTS = PLAIN + EDGE  # the last one is decomposed Korean, which NFC shortens
LOSSY_ID = str(len(TEXTS) - 1)
RECIPE = REPOSITORY / "recipes" / "compare_bpb.py"


def build_world(folder: Path) -> None:
    """Folders bytes, bpe and nfc with models of 128 positions, and text.jsonl with the columns id, lang and text."""
    bpe = load_tokenizer("train:280", texts=PLAIN, cache_dir=folder / "cache")
    nfc = byte_tokenizer()
    nfc.backend_tokenizer.normalizer = normalizers.NFC()
    for seed, (name, tokenizer) in enumerate({"bytes": byte_tokenizer(), "bpe": bpe, "nfc": nfc}.items()):
        overrides = SIZES | {"max_position_embeddings": 128, "initializer_range": 0.3}
        config = load_config(model_type="llama", config_overrides=overrides, tokenizer=tokenizer)
        build_model(config, seed=seed).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = ({"id": n, "lang": f"l{n % 2}", "text": text} for n, text in enumerate(TEXTS))
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(world: Path, models: str, *more: str, output: Path | None = None) -> list[str]:
    named = [str(world / name) for name in models.split()]
    written = [] if output is None else ["--output", str(output)]
    columns = ["--id_column", "id", "--domain_column", "lang"]
    return ["--models", *named, "--data", str(world / "text.jsonl"), *columns, *written, *more]
