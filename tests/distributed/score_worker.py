"""One rank of a scoring that is dealt over ranks: writes what it got; the model's forwards are counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM

from hfpretrain.bpb.score import measured
from hfpretrain.launch_checks import close_process_group
from tiny import tiny_config


def main(folder: Path) -> None:
    state = PartialState(cpu=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 97, size=n) for n in (0, 1, 8, 9, 16, 17, 40, 33, 5, 5, 60)]
    with measured(model) as scorer:
        calls = []
        model.model.register_forward_hook(lambda *_: calls.append(1))
        runs = [
            scorer.score(documents, prefix_id=1, max_length=8, stride=stride, batch_size=batch_size).nats.tolist()
            for stride, batch_size in ((8, 1), (8, 3), (8, 8), (3, 4))
        ]
    found = {"nats": runs, "forwards": len(calls)}
    (folder / f"{state.num_processes}-{state.process_index}.json").write_text(json.dumps(found))
    close_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
