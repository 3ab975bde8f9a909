"""What `equivalence_worker` also runs in its topology: a poisoned batch, and a plain DeepSpeed loop in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from hfpretrain.training.noise_scale import NoiseScale
from hfpretrain.training.optimizer import undo_first_step
from hfpretrain.training.trainer import PretrainTrainer

# 20 accepted steps come before anything is judged.
SPIKE_STEPS, POISONED, DEVIATIONS = 25, 22, 8.0
BF16_STEPS, BF16_MICRO_BATCHES, BF16_WIDTH, BF16_SEED = 2, 3, 64, 5
BF16_LEARNING_RATE, BF16_WEIGHT_DECAY = 1e-2, 0.5


class Estimates(TrainerCallback):
    """The noise estimate of each logged step alone."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.of_steps: list[dict[str, float] | None] = []

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "loss" in logs:
            last = self.trainer.noise_scale.last
            self.of_steps.append(None if last is None else asdict(last))


class Untouched(TrainerCallback):
    """Whether each step left weights and moments on this rank as they were, to the bit, and its gradients cleared."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.untouched: list[bool] = []
        self.cleared: list[bool] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._before = self._state()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        after = self._state()
        same = len(after) == len(self._before) and all(map(torch.equal, self._before, after))
        self.untouched.append(same)
        grads = [parameter.grad for parameter in self.trainer.causal_lm.parameters()]
        self.cleared.append(all(grad is None or not grad.any() for grad in grads))

    def _state(self) -> list[torch.Tensor]:
        """Weights as the model has them (its shards under ZeRO 3), as the optimizer has them, and the moments."""
        optimizer = self.trainer.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        held = [getattr(p, "ds_tensor", p) for p in self.trainer.causal_lm.parameters()]
        masters = [p for group in optimizer.param_groups for p in group["params"]]
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [value.detach().clone() for value in (*held, *masters, *moments) if isinstance(value, torch.Tensor)]


def run_spike(make: Callable[..., PretrainTrainer], output: Path, *, protected: bool) -> None:
    """Train; at one step the hidden states of the last rank alone are 30 times what they should be."""
    watch = Untouched()
    trainer = make(SPIKE_STEPS, skip_spikes=DEVIATIONS if protected else 0.0, callbacks=[watch])
    watch.trainer = trainer
    last_rank = trainer.args.process_index == trainer.args.world_size - 1

    def poison(module: nn.Module, _: Any, hidden: torch.Tensor) -> torch.Tensor | None:
        hit = module.training and last_rank and trainer.state.global_step == POISONED
        return hidden * 30 if hit else None

    trainer.model.model.norm.register_forward_hook(poison)  # type: ignore[union-attr]
    trainer.train()
    mine = {"untouched": watch.untouched, "cleared": watch.cleared}
    ranks: list[Any] = [mine] * trainer.args.world_size
    if trainer.args.world_size > 1:
        dist.all_gather_object(ranks, mine)
    if trainer.args.process_index == 0:
        engine_steps = getattr(trainer.model_wrapped, "global_steps", None)
        record = {"log": trainer.state.log_history, "ranks": ranks, "engine_steps": engine_steps}
        (output / f"spike-{'protected' if protected else 'alone'}.json").write_text(json.dumps(record))


def bf16_model() -> nn.Module:
    torch.manual_seed(BF16_SEED)
    return nn.Sequential(nn.Linear(BF16_WIDTH, 2 * BF16_WIDTH), nn.Tanh(), nn.Linear(2 * BF16_WIDTH, 8))


def bf16_batches(world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Uneven micro-batches of all ranks; rank r has r, r + world_size, ..."""
    generator = torch.Generator().manual_seed(BF16_SEED)
    sizes = [4 + 5 * k for k in range(world_size * BF16_MICRO_BATCHES)]
    return [(torch.randn(n, BF16_WIDTH, generator=generator), torch.randn(n, 8, generator=generator)) for n in sizes]


def run_bf16(stage: int, output: Path) -> None:
    """`NoiseScale` in a plain DeepSpeed loop whose weights and gradients are bfloat16; learning rate 0, clipping on."""
    import deepspeed

    model = bf16_model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": BF16_MICRO_BATCHES,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "gradient_clipping": 0.01,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    noise = NoiseScale(engine.module).attach()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = bf16_batches(world_size)
    total = sum(len(x) for x, _ in batches)
    for _ in range(BF16_STEPS):
        for index, (x, y) in enumerate(batches[rank::world_size]):
            is_last = index == BF16_MICRO_BATCHES - 1
            engine.set_gradient_accumulation_boundary(is_boundary=is_last)
            loss = (engine(x.bfloat16()).float() - y).square().sum() * world_size / total
            engine.backward(loss, scale_wrt_gas=False)
            noise.end_micro_batch(len(x))
        engine.step()
        noise.end_step(engine.get_global_grad_norm())
    norms = bf16_adamw_norms(config)
    if rank == 0:
        assert noise.last is not None
        (output / "bf16.json").write_text(json.dumps(asdict(noise.last) | {"adamw_norms": norms}))


def bf16_adamw_norms(config: dict[str, Any]) -> list[float]:
    """Gradient norms of steps of AdamW on one batch, the same on all ranks: they show where the step before has led."""
    import deepspeed

    model = bf16_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=BF16_LEARNING_RATE, weight_decay=BF16_WEIGHT_DECAY)
    settings = config | {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    undo_first_step(engine.optimizer)
    x, y = bf16_batches(1)[0]
    norms = []
    for _ in range(BF16_STEPS + 2):
        engine.backward((engine(x.bfloat16()).float() - y).square().sum())
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms
