"""Started on several ranks: is a model built under ZeRO-3 the very model that a plain build gives?

Prints one line `RESULT {...}` of JSON from rank 0: per family, the largest difference over all parameters and buffers,
the number of parameters compared and how many of them were partitioned.
"""

from __future__ import annotations

import json
import sys
import tempfile

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, TrainingArguments

from hfpretrain.launch_checks import close_process_group
from hfpretrain.model import build_model, parameter_count, true_shape

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
FAMILIES = {
    "llama": {**SMALL, **ATTENTION, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "mixtral": {**SMALL, **ATTENTION, "num_local_experts": 4},
    "mamba": {**SMALL, "state_size": 8, "rescale_prenorm_residual": True},
}
# Threshold 0: by default parameters this small would never stay partitioned, and the test would test nothing.
DEEPSPEED = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": 8,  # the arguments' default; "auto" would be filled in for a world of one here
}


def config_of(family: str) -> PreTrainedConfig:
    settings = dict(FAMILIES[family])
    return CONFIG_MAPPING[family](bos_token_id=1, eos_token_id=2, pad_token_id=None, **settings)


def main() -> None:
    transformers.logging.set_verbosity_error()
    plain = {family: build_model(config_of(family), seed=7) for family in FAMILIES}
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    with tempfile.TemporaryDirectory() as folder:
        # Turns ZeRO-3 on for as long as these arguments live: transformers only keeps a weak reference to them.
        arguments = TrainingArguments(folder, ddp_backend="gloo", deepspeed=DEEPSPEED, report_to=[])
        results = {}
        for family, reference in plain.items():
            torch.manual_seed(torch.distributed.get_rank())  # ranks need not agree on anything but the seed
            before = torch.get_rng_state()
            model = build_model(config_of(family), seed=7)
            if not torch.equal(before, torch.get_rng_state()):
                sys.exit("build_model changed the global random state")
            pairs = list(zip(reference.named_parameters(), model.named_parameters(), strict=True))
            difference = 0.0
            for (name, expected), (name_too, parameter) in pairs:
                if name != name_too or true_shape(parameter) != tuple(expected.shape):
                    sys.exit(f"{name} {tuple(expected.shape)} against {name_too} {true_shape(parameter)}")
                with deepspeed.zero.GatheredParameters([parameter]):
                    difference = max(difference, (parameter.detach() - expected).abs().max().item())
            for (_, expected), (_, buffer) in zip(reference.named_buffers(), model.named_buffers(), strict=True):
                difference = max(difference, (buffer - expected).abs().max().item())
            results[family] = {
                "difference": difference,
                "parameters": parameter_count(model),
                "parameters_plain": parameter_count(reference),
                "tensors": len(pairs),
                "partitioned": sum(p.numel() == 0 for p in model.parameters()),
                "world_size": torch.distributed.get_world_size(),
            }
        if torch.distributed.get_rank() == 0:
            print("RESULT", json.dumps(results), flush=True)
        del arguments
        torch.distributed.barrier()
        close_process_group()


if __name__ == "__main__":
    main()
