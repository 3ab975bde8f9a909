"""The anatomy of a step: one item of the dataloader is one optimizer step, and every target token weighs the same.

What is ours is what happens between two optimizer updates (`training_step`), where the data comes from (the step number
*is* the position in the data), and what is read off the gradients on the way. Right at DDP and DeepSpeed ZeRO 0-3
alike. `training.trainer` makes a whole run of it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainingArguments
from transformers.utils import logging

from hfpretrain.data.steps import StepSampler, TrainingSteps
from hfpretrain.loss import FusedLoss, LossOutput, count_targets
from hfpretrain.training.counters import LocalSums, LogWindow, StepSums
from hfpretrain.training.noise_scale import NoiseScale
from hfpretrain.training.saving import WholeCheckpointTrainer
from hfpretrain.training.spikes import SpikeGuard
from hfpretrain.training.throughput import Throughput, TokenFlops, device_peak_flops

logger = logging.get_logger(__name__)

MicroBatch = dict[str, Any]


class NonFiniteLossError(RuntimeError):
    """The loss is NaN or infinite; raised before the update, so the weights are those of the step before."""


class StepTrainer(WholeCheckpointTrainer):
    """A Trainer whose steps come from `TrainingSteps`; for the arguments see `training.trainer.PretrainTrainer`."""

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        train_dataset: TrainingSteps,
        flops: TokenFlops | None,
        z_loss_weight: float,
        log_noise_scale: int,
        skip_spikes: float,
        **kwargs: Any,
    ) -> None:
        if args.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, expected 1: a TrainingSteps item "
                "already holds all micro-batches of its step; set batch_tokens and per_device_train_batch_size instead"
            )
        if args.max_steps not in (-1, len(train_dataset)):
            raise ValueError(f"max_steps is {args.max_steps}, but the training steps are {len(train_dataset)}: say one")
        args.max_steps = len(train_dataset)
        super().__init__(model=model, args=args, train_dataset=train_dataset, **kwargs)
        self.causal_lm = model  # what is in every wrapper, and what a checkpoint holds
        self.steps = train_dataset
        self.flops = flops or TokenFlops()
        self.fused_loss = FusedLoss(model, z_loss_weight=z_loss_weight)
        self.noise_scale = NoiseScale(model, every=log_noise_scale) if log_noise_scale else None
        self.spikes = SpikeGuard(skip_spikes, device=args.device) if skip_spikes else None
        self.throughput = Throughput(world_size=args.world_size, peak_flops=device_peak_flops())
        self.target_tokens_seen = 0
        self._stop_asked = False  # here, perhaps in the middle of a step
        self._stopping = False  # by all ranks alike
        self._window = LogWindow()
        self._grad_norm: float | None = None
        self._step_done: StepSums | None = None
        self._step_batch_tokens = 0  # of the step that runs, or ran last

    # -- data: the step number is the position ------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Steps from `state.global_step` on, this rank's share of each: accelerate must not shard it again."""
        workers = self.args.dataloader_num_workers
        return DataLoader(
            self.steps,
            batch_size=None,
            sampler=StepSampler(lambda: self.state.global_step, self.steps),
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers and workers > 0,
            prefetch_factor=self.args.dataloader_prefetch_factor if workers > 0 else None,
            generator=torch.Generator(),  # else making the iterator draws from the global RNG and a resume differs
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[MicroBatch]], num_batches: int, device: torch.device
    ) -> tuple[list[list[MicroBatch]], torch.Tensor]:
        """The next step's micro-batches and its number of target tokens over all micro-batches and ranks."""
        self.throughput.start_step()
        self._step_batch_tokens = self.steps.batch_tokens(self.state.global_step)
        micro_batches = next(epoch_iterator)
        target_tokens = torch.stack([count_targets(micro["labels"]) for micro in micro_batches]).sum().to(device)
        if self.args.world_size > 1:
            dist.all_reduce(target_tokens)
        return [micro_batches], target_tokens

    def get_total_train_batch_size(self, args: TrainingArguments) -> float:  # type: ignore[override]
        """Rows of a step, of a ramp their mean: the Trainer takes it times the steps for the rows of the run."""
        return self.steps.plan.rows_of(len(self.steps))[0] / max(len(self.steps), 1)

    def floating_point_ops(self, inputs: Any) -> float:  # type: ignore[override]
        """This rank's share of the step's FLOPs: the Trainer sums over ranks."""
        return self.flops.causal * self._step_batch_tokens / self.args.world_size

    def _track_num_input_tokens(self, inputs: Any) -> None:
        self.state.num_input_tokens_seen += self._step_batch_tokens

    # -- one step -----------------------------------------------------------------------------------------------------

    def training_step(  # type: ignore[override]
        self, model: torch.nn.Module, inputs: list[MicroBatch], num_items_in_batch: torch.Tensor
    ) -> torch.Tensor:
        """Forward and backward over all micro-batches of the step; under DeepSpeed the update as well.

        Each micro-batch back-propagates its token sum * world_size / step_tokens. DDP and ZeRO average gradients over
        ranks, which cancels world_size and leaves d(sum of all tokens' loss) / step_tokens, however the tokens fall on
        ranks and micro-batches.

        Returns: the token-mean cross-entropy of the step over all ranks, the same 0-d tensor on each.
        """
        model.train()
        sums = LocalSums(self.args.device)
        for index, micro in enumerate(inputs):
            is_last = index == len(inputs) - 1
            with self._accumulation(model, is_last):
                output = self._loss_output(model, self._prepare_inputs(micro), num_items_in_batch)
                sums.add(output)
                if is_last:
                    total = self._gather(sums.row(), num_items_in_batch)
                    self._announce(total)
                self._backward(model, cast(torch.Tensor, output.loss) * self.args.world_size, is_last)
                if self.noise_scale is not None:
                    self.noise_scale.end_micro_batch(cast(torch.Tensor, output.target_tokens))
        self.target_tokens_seen += total.target_tokens
        self._window.add(total)
        self._step_done = total
        return torch.tensor(total.loss, device=self.args.device)

    def _loss_output(self, model: torch.nn.Module, micro: MicroBatch, step_tokens: torch.Tensor) -> LossOutput:
        """Sums over one micro-batch, and its share of the token-mean loss of the whole step."""
        with self.compute_loss_context_manager():
            output = model(**micro, num_items_in_batch=step_tokens)
        return cast(LossOutput, output)

    @contextlib.contextmanager
    def _accumulation(self, model: torch.nn.Module, is_last: bool) -> Iterator[None]:
        self.accelerator.gradient_state._set_sync_gradients(is_last)
        # Only DDP may skip the reduction: ZeRO 2 and 3 partition gradients in every micro-batch and forbid no_sync.
        skip_reduction = not is_last and not self.is_deepspeed_enabled
        try:
            with self.accelerator.no_sync(model) if skip_reduction else contextlib.nullcontext():
                yield
        finally:  # the state is one for the whole process: a step that fails half-way must not switch others off
            self.accelerator.gradient_state._set_sync_gradients(True)

    def _backward(self, model: torch.nn.Module, loss: torch.Tensor, is_last: bool) -> None:
        if not self.is_deepspeed_enabled:
            self.accelerator.backward(loss)
            return
        # What accelerate's engine wrapper does, spelt out, because the reduced gradient can be read only in between.
        engine = cast(Any, model)
        engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        engine.backward(loss, scale_wrt_gas=False)
        if is_last:
            self._grad_norm = self._unpartitioned_grad_norm(engine)
            engine.step()
            if self._grad_norm is None:
                self._grad_norm = engine.get_global_grad_norm()

    def _unpartitioned_grad_norm(self, engine: Any) -> float | None:
        """ZeRO 0 in fp32 keeps no norm (DeepSpeed#7255): take it from the reduced gradients before they are clipped."""
        if engine.zero_optimization() or engine.bfloat16_enabled() or engine.fp16_enabled():
            return None
        grads = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))

    def _gather(self, sums: torch.Tensor, step_tokens: torch.Tensor) -> StepSums:
        """Add up all ranks' sums in rank order (the same bits everywhere) and stop before a non-finite update."""
        mine = torch.cat([sums, sums.new_tensor([float(self._stop_asked)])])
        ranks = [torch.empty_like(mine) for _ in range(self.args.world_size)] if self.args.world_size > 1 else [mine]
        if self.args.world_size > 1:
            dist.all_gather(ranks, mine)
        rows = torch.stack(ranks).tolist()
        bad = [rank for rank, row in enumerate(rows) if not all(map(math.isfinite, row))]
        if bad:
            step = self.state.global_step
            raise NonFiniteLossError(
                f"loss is not finite at step {step} on rank(s) {bad} (sums per rank: {[row[0] for row in rows]}); data "
                f"position {self.steps.position(step)}. The update was not made: weights are those after step {step}. "
                "Resume from the last checkpoint with a lower learning rate or longer warm-up, or look at these rows."
            )
        self._stopping = any(row[-1] > 0 for row in rows)
        return LocalSums.over_ranks(rows, int(step_tokens))

    # -- clipping -----------------------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return None if self.is_deepspeed_enabled else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> float | None:
        """Global norm before clipping, at every ZeRO stage; also counts clipped steps."""
        norm = self._grad_norm if self.is_deepspeed_enabled else super()._get_grad_norm(model, grad_norm)
        norm = self._grad_norm = float(norm) if norm is not None else None
        if norm is not None:
            self._window.clipped_steps += int(0 < self.args.max_grad_norm < norm)
            # fp16 overflows on purpose now and then: its loss scaler skips the step and tries a smaller scale.
            if not math.isfinite(norm) and not self.args.fp16:
                made = "was" if self.is_deepspeed_enabled and self.spikes is None else "was not"
                step = self.state.global_step
                raise NonFiniteLossError(
                    f"gradient norm is {norm} at step {step} though the loss is finite; data position "
                    f"{self.steps.position(step)}. The update {made} made. Resume from the last checkpoint."
                )
        return norm

    # -- noise scale and spikes ---------------------------------------------------------------------------------------

    def _announce(self, total: StepSums) -> None:
        """Tell the spike guard about a step whose update comes next."""
        if self.spikes is not None:
            step = self.state.global_step
            where = f"data position {self.steps.position(step)}"
            self.spikes.begin(step, total.loss, self._norm_during_update, where=where)

    def _norm_during_update(self) -> float:
        """Global norm before clipping, while the update is under way: from ZeRO 1 on the engine makes it there."""
        norm = self._grad_norm
        return float(cast(Any, self.model_wrapped).optimizer._global_grad_norm if norm is None else norm)

    def _judge_update(self) -> None:
        """After the update, made or left out."""
        spike = None if self.spikes is None else self.spikes.end()
        if spike is not None:
            self._say(str(spike))
            asked = self.control.should_log
            self.log({f"spike_{name}": value for name, value in asdict(spike).items()})
            self.control.should_log = asked  # a log line of its own takes the step's ordinary one for done
        if self.noise_scale is not None:
            self.noise_scale.end_step(self._grad_norm, keep=spike is None)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            for hooked in (self.noise_scale, self.spikes):
                if hooked is not None:
                    hooked.remove()

    def stop_after_step(self, *_: Any) -> None:
        """Make all ranks save and stop after this step or the next; a signal handler, enough on any one rank."""
        self._stop_asked = True

    def _say(self, message: str) -> None:
        if self.is_world_process_zero():
            logger.warning(message)
