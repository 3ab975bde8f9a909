"""Train the same steps in whatever topology this was started in; rank 0 writes losses, norms and final weights.

Cases are `model:rows at once`, `resume`, and `spike`, `bf16` of `signal_cases`.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import TrainingArguments

from hfpretrain.data.collator import PackedCollator
from hfpretrain.data.order import BlockOrder
from hfpretrain.data.steps import TrainingSteps
from hfpretrain.launch_checks import close_process_group
from hfpretrain.model import build_model
from hfpretrain.mup.apply import apply
from hfpretrain.mup.infer import infer
from hfpretrain.training.schedule import lr_factor
from hfpretrain.training.trainer import PretrainTrainer
from signal_cases import Estimates, run_bf16, run_spike
from tiny import SEQUENCE_LENGTH, RaggedBlocks, tiny_config

NUM_STEPS, ROWS, SEED = 6, 8, 3
SCHEDULE = {
    "schedule": "warmup_stable_decay", "num_steps": NUM_STEPS, "warmup_steps": 2, "decay_steps": 2, "min_lr_ratio": 0.1,
}  # fmt: skip
LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-2, 0.1, 1.3
Z_LOSS_WEIGHT = 1e-2  # a hundred times the usual one, so that a wrong z-loss shows
# Larger than the default: a key bias has no gradient but rounding noise, which Adam would turn into full-size updates.
EPSILON = 1e-6
MUP = {"mup": "llama", "mup_tied": "gpt2", "mup_moe": "mixtral"}  # cases, from half the width and, but for mup, depth
MUP_BASE_WIDTH, MUP_BASE_DEPTH = 16, 1
RESUME_AT = 3


def deepspeed_stage() -> int | None:
    """As `accelerate launch` was told, None without DeepSpeed."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return None
    config = json.loads(Path(os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text())
    return int(config["zero_optimization"]["stage"])


def make_trainer(
    model_type: str, per_device_rows: int, output: Path, num_steps: int = NUM_STEPS, save_steps: int = 0, **ours: Any
) -> PretrainTrainer:
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    args = TrainingArguments(
        output_dir=str(output / "run"),
        max_steps=num_steps,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_beta2=0.95,
        adam_epsilon=EPSILON,
        max_grad_norm=MAX_GRAD_NORM,
        logging_steps=1,
        save_strategy="steps" if save_steps else "no",
        save_steps=save_steps or 500,
        report_to=[],
        disable_tqdm=True,
        ignore_data_skip=True,
        ddp_find_unused_parameters=False,
        use_cpu=not deepspeed,
        ddp_backend="gloo" if launched else None,
    )
    steps = TrainingSteps(
        RaggedBlocks(),
        BlockOrder(len(RaggedBlocks()), SEED),
        batch_tokens=ROWS * SEQUENCE_LENGTH,
        sequence_length=SEQUENCE_LENGTH,
        per_device_train_batch_size=per_device_rows,
        rank=args.process_index,
        world_size=args.world_size,
        collator=PackedCollator(),
        num_steps=num_steps,
    )
    config = tiny_config(MUP.get(model_type, model_type))
    base_depth = None if model_type == "mup" else MUP_BASE_DEPTH
    mup = infer(config, base_width=MUP_BASE_WIDTH, base_depth=base_depth) if model_type in MUP else None
    model = build_model(config, seed=SEED)
    if mup is not None:
        apply(model, mup)
    factor = partial(lr_factor, **SCHEDULE | {"num_steps": num_steps})
    ours |= {"z_loss_weight": Z_LOSS_WEIGHT, "log_noise_scale": 1, "mup": mup}
    return PretrainTrainer(model, args, train_dataset=steps, lr_factor=factor, **ours)


def train(model_type: str, per_device_rows: int, output: Path) -> None:
    estimates = Estimates()
    trainer = make_trainer(model_type, per_device_rows, output, callbacks=[estimates])
    estimates.trainer = trainer
    trainer.train()
    args = trainer.args
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if args.process_index == 0:
        lines = [line for line in trainer.state.log_history if "loss" in line]
        engine = trainer.model_wrapped
        record = {
            **{name: [line[name] for line in lines] for name in ("loss", "z_loss", "log_z_mean", "logit_max")},
            "path": trainer.fused_loss.verdict.path,
            "grad_norm": [line["grad_norm"] for line in lines],
            "clip_fraction": [line["clip_fraction"] for line in lines],
            "learning_rate": [line["learning_rate"] for line in lines],
            "target_tokens": lines[-1]["target_tokens"],
            "world_size": args.world_size,
            "stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None,
            "estimates": estimates.of_steps,
            "noise": {name: lines[-1][name] for name in ("grad_sq", "grad_trace")},
            "engine": type(engine).__name__,
            "group_rates": engine.get_lr()
            if hasattr(engine, "get_lr")
            else [g["lr"] for g in trainer.optimizer.param_groups],
        }
        (output / f"{model_type}-{per_device_rows}.json").write_text(json.dumps(record))
        torch.save(
            {name: value.detach().float() for name, value in weights.items()},
            output / f"{model_type}-{per_device_rows}.pt",
        )


def resume(output: Path) -> None:
    """Train a model with muP to the end, and again from the middle; what the engine's groups then say."""
    found: dict[str, Any] = {}
    for name, checkpoint in (
        ("straight", None),
        ("resumed", str(output / "saved" / "run" / f"checkpoint-{RESUME_AT}")),
    ):
        trainer = make_trainer("mup_tied", 4, output / "saved", save_steps=RESUME_AT)
        trainer.train(resume_from_checkpoint=checkpoint)
        engine = trainer.model_wrapped
        groups = (engine if hasattr(engine, "get_lr") else trainer).optimizer.param_groups
        kept = ("lr", "eps", "weight_decay", "lr_multiplier", "eps_multiplier")
        found[name] = {
            "loss": [line["loss"] for line in trainer.state.log_history if "loss" in line],
            "groups": [{key: group[key] for key in kept} for group in groups],
            "group_rates": engine.get_lr() if hasattr(engine, "get_lr") else [group["lr"] for group in groups],
        }
    if trainer.args.process_index == 0:
        (output / "resume.json").write_text(json.dumps(found))


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    stage = deepspeed_stage()  # building TrainingArguments deletes the launcher's variable
    for case in sys.argv[2:]:
        if case == "spike":
            for protected in (False, True):
                run_spike(partial(make_trainer, "llama", 4, out), out, protected=protected)
        elif case == "resume":
            resume(out)
        elif case == "bf16":
            run_bf16(cast(int, stage), out)
        else:
            name, rows = case.split(":")
            train(name, int(rows), out)
    close_process_group()
