"""Tiny models and a ragged data set whose numbers can be recomputed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import Dataset
from transformers import AutoConfig, PretrainedConfig

VOCAB_SIZE, SEQUENCE_LENGTH, NUM_BLOCKS = 97, 24, 40

_LLAMA_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_LIKE | {"initializer_range": 0.1},
    "mixtral": _LLAMA_LIKE | {"initializer_range": 0.1, "num_local_experts": 4, "num_experts_per_tok": 2},
    # tied embeddings, and a loss that the stock Trainer counts wrongly
    "gpt2": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def tiny_config(model_type: str, **overrides: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **(TINY[model_type] | overrides))


class RaggedBlocks(Dataset):
    """Blocks of 1 to 4 documents with between 5 and all `SEQUENCE_LENGTH` real tokens: every row counts differently."""

    sequence_length = SEQUENCE_LENGTH

    def __len__(self) -> int:
        return NUM_BLOCKS

    def __getitem__(self, block: int) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(block)
        real = int(generator.integers(5, SEQUENCE_LENGTH + 1))
        cuts = np.sort(generator.choice(np.arange(1, real), size=int(generator.integers(0, 4)), replace=False))
        lengths = np.diff(np.concatenate(([0], cuts, [real])))
        input_ids = np.full(SEQUENCE_LENGTH, 2, dtype=np.int64)
        input_ids[:real] = generator.integers(3, VOCAB_SIZE, size=real)
        return {"input_ids": input_ids, "piece_lengths": lengths.astype(np.int64)}
