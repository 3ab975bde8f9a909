"""One ramp, 1x -> 2x -> 3x -> 8x, for tests that train it whole, in pieces and on several ranks."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from equivalence_worker import EPSILON, LEARNING_RATE, MAX_GRAD_NORM, SEED, WEIGHT_DECAY, Z_LOSS_WEIGHT
from hfpretrain.data.collator import PackedCollator
from hfpretrain.data.order import BlockOrder
from hfpretrain.data.steps import StepRows, TrainingSteps
from hfpretrain.launch_checks import close_process_group
from hfpretrain.model import build_model
from hfpretrain.training.batch_ramp import BatchRamp, plan_ramp, ramp_lr_factor
from hfpretrain.training.trainer import PretrainTrainer
from tiny import SEQUENCE_LENGTH, RaggedBlocks, tiny_config

# 2, 4, 6 and 16 rows; the marks at 140 and 800 fall inside a step, so the next stage begins after it.
RAMP = plan_ramp(
    [(mark, rows * SEQUENCE_LENGTH) for mark, rows in ((0, 2), (140, 4), (432, 6), (800, 16))],
    sequence_length=SEQUENCE_LENGTH,
    num_steps=11,
)
ROWS = [2, 2, 2, 4, 4, 4, 6, 6, 6, 16, 16]
MIDDLES = [1, 4, 8, 10]  # steps done, in the middle of each stage


def factor(ramp: BatchRamp = RAMP) -> Any:
    """Warm-up over the first 2 steps of `RAMP`, decay over its last 2, both in tokens."""
    return partial(
        ramp_lr_factor,
        ramp=ramp,
        schedule="warmup_stable_decay",
        warmup_rows=4,
        decay_rows=32,
        decay_shape="1-sqrt",
        min_lr_ratio=0.1,
        largest_rows=ramp.stages[-1].rows,
        lr_rule="sqrt",
    )


def ramp_trainer(
    folder: Path, plan: StepRows | int, num_steps: int, *, lr_factor: Any = None, **arguments: Any
) -> PretrainTrainer:
    """A trainer in whatever topology this was started in; saves every step."""
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": num_steps,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "adam_beta2": 0.95,
        "adam_epsilon": EPSILON,
        "max_grad_norm": MAX_GRAD_NORM,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "ignore_data_skip": True,
        "include_num_input_tokens_seen": "all",
        "ddp_find_unused_parameters": False,
        "use_cpu": os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true",
        "ddp_backend": "gloo" if launched else None,
    }
    args = TrainingArguments(**(defaults | arguments))
    steps = TrainingSteps(
        RaggedBlocks(),
        BlockOrder(len(RaggedBlocks()), SEED),
        batch_tokens=plan,
        sequence_length=SEQUENCE_LENGTH,
        per_device_train_batch_size=2,
        rank=args.process_index,
        world_size=args.world_size,
        collator=PackedCollator(),
        num_steps=num_steps,
    )
    model = build_model(tiny_config("llama"), seed=SEED)
    rates = lr_factor or factor()
    return PretrainTrainer(model, args, train_dataset=steps, lr_factor=rates, z_loss_weight=Z_LOSS_WEIGHT)


def trained(trainer: PretrainTrainer, resume: Path | None = None) -> dict[str, Any]:
    """Train, and return what must not depend on interruptions: log lines without the clock's, and the weights."""
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    timed = ("second", "runtime", "peak_memory")
    lines = [
        {name: value for name, value in line.items() if not any(word in name for word in timed)}
        for line in trainer.state.log_history
        if "loss" in line
    ]
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    weights = {} if weights is None else {name: value.detach().float().clone() for name, value in weights.items()}
    return {"lines": lines, "weights": weights, "flos": trainer.state.total_flos}


def main(out: Path, resume_from: str | None = None) -> None:
    """Straight, then from the middle of each stage; or from one checkpoint that another topology wrote."""
    straight = trained(ramp_trainer(out / "run", RAMP, len(ROWS)), Path(resume_from) if resume_from else None)
    differing = []
    for step in [] if resume_from else MIDDLES:
        trainer = ramp_trainer(out / f"from-{step}", RAMP, len(ROWS), save_strategy="no")
        again = trained(trainer, out / "run" / f"checkpoint-{step}")
        same = [torch.equal(value, straight["weights"][name]) for name, value in again["weights"].items()]
        if again["lines"] != straight["lines"] or not all(same):
            differing.append(step)
    if int(os.environ.get("RANK", "0")) == 0:
        record = {"lines": straight["lines"], "differing": differing, "flos": straight["flos"]}
        (out / "record.json").write_text(json.dumps(record))
        torch.save(straight["weights"], out / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    close_process_group()
