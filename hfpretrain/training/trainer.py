"""The anatomy of a step: one item of the dataloader is one optimizer step, and every target token weighs the same.

The stock Trainer keeps its loop, its logging, its callbacks and its file formats. What is ours is what happens between
two optimizer updates (`training_step`), where the data comes from (the step number *is* the position in the data), and
what is put beside a checkpoint. Right at DDP and DeepSpeed ZeRO 0-3 alike.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import logging

from hfpretrain.data.isolation import Way
from hfpretrain.data.steps import EqualSteps, StepSampler, TrainingSteps
from hfpretrain.errors import Problem, refuse
from hfpretrain.launch_checks import verify_engine, verify_gradient_signals
from hfpretrain.loss import FusedLoss, LossOutput, count_targets
from hfpretrain.mup.apply import is_applied, verify_groups
from hfpretrain.mup.spec import MupSpec
from hfpretrain.training.adaptive_ramp import AdaptiveRamp, saved_batch
from hfpretrain.training.batch_ramp import BatchRamp, Stage
from hfpretrain.training.counters import LocalSums, LogWindow, StepSums
from hfpretrain.training.evaluation import EvaluationWindows, evaluate_bits_per_byte
from hfpretrain.training.noise_scale import NoiseScale
from hfpretrain.training.optimizer import build_optimizer, describe_groups, parameter_groups
from hfpretrain.training.resume import PretrainState, apply_asked, hyperparameters, read_state
from hfpretrain.training.saving import WholeCheckpointTrainer
from hfpretrain.training.separation import separate
from hfpretrain.training.spikes import SpikeGuard
from hfpretrain.training.throughput import Throughput, TokenFlops, device_peak_flops

logger = logging.get_logger(__name__)

MicroBatch = dict[str, Any]


class NonFiniteLossError(RuntimeError):
    """The loss is NaN or infinite; raised before the update, so the weights are those of the step before."""


class PretrainTrainer(WholeCheckpointTrainer):
    """A Trainer whose steps come from `TrainingSteps`.

    Args:
        model: any causal LM that returns logits.
        args: `gradient_accumulation_steps` must be 1: how many micro-batches a step has is a matter of the data;
            `max_steps` -1 or the length of train_dataset.
        train_dataset: item s is this rank's list of micro-batches of optimizer step s. Where its batch is an
            `AdaptiveRamp`, each log line is shown to it, and what it decides changes the length of the run.
        eval_dataset: held-out windows, scored by `evaluate`; or several by name, logged as eval_<name>_bpb and so on,
            those named "" as eval_bpb.
        lr_factor: 0-based step -> multiple of the base learning rate.
        fingerprint: what identifies the data and its order; with the size of a step it decides which rows a step number
            means, and a checkpoint of another fingerprint is not resumed.
        tokenizer: saved beside every checkpoint. (Given to the Trainer as `processing_class`, it would also change the
            model's configuration: a pad token that is EOS becomes the row that the next embedding never trains.)
        isolation: ways to keep documents apart (`data.isolation.ways`). Before the first step each is measured on the
            wrapped model; the first that isolates is used for train_dataset, and if none does, the run stops. None
            given: documents are not kept apart, by decision.
        flops: FLOPs of one input token, for `total_flos` and, on a device whose peak is known, MFU.
        z_loss_weight: of (log Z)^2 beside the cross-entropy, 0 for none; see `hfpretrain.loss`. The loss is put on
            `model` until `fused_loss.remove()`; before the first step it is compared with the model's own logits.
        log_noise_scale: measure the gradient noise scale at each such step, 0: never; see `noise_scale`.
        skip_spikes: leave out updates of steps whose loss or gradient norm is so many robust standard deviations above
            the median of those before, 0: none; see `spikes`.
        mup: a spec that `hfpretrain.mup.apply` has put on `model`; its multipliers go into the optimizer's groups, and
            their ratios are checked on the engine's own rates before the first step and with every log line.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        train_dataset: TrainingSteps,
        lr_factor: Callable[[int], float],
        eval_dataset: EvaluationWindows | Mapping[str, EvaluationWindows] | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        isolation: Sequence[Way] = (),
        flops: TokenFlops | None = None,
        z_loss_weight: float = 0.0,
        log_noise_scale: int = 0,
        skip_spikes: float = 0.0,
        mup: MupSpec | None = None,
        **kwargs: Any,
    ) -> None:
        if mup is not None and not is_applied(model, mup):
            raise ValueError(
                "PretrainTrainer was given a muP spec that is not on the model: mup.apply(model, spec) first"
            )
        if args.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, expected 1: a TrainingSteps item "
                "already holds all micro-batches of its step; set batch_tokens and per_device_train_batch_size instead"
            )
        if args.max_steps not in (-1, len(train_dataset)):
            raise ValueError(f"max_steps is {args.max_steps}, but the training steps are {len(train_dataset)}: say one")
        args.max_steps = len(train_dataset)
        sets: Any = dict(eval_dataset) if isinstance(eval_dataset, Mapping) else eval_dataset
        super().__init__(model=model, args=args, train_dataset=train_dataset, eval_dataset=sets, **kwargs)
        self.causal_lm = model  # what is in every wrapper, and what a checkpoint holds
        self.steps = train_dataset
        self.lr_factor = lr_factor
        self.plan = _ramp_of(train_dataset)
        self.mup = mup
        which = {"sequence_length": train_dataset.sequence_length, "mup": None if mup is None else mup.fingerprint}
        self.fingerprint = {**(fingerprint or {}), **which}
        self.tokenizer = tokenizer
        self.isolation = isolation
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

    # -- optimizer and schedule ---------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups = parameter_groups(
                self.causal_lm,
                weight_decay=self.args.weight_decay,
                lr=self.args.learning_rate,
                eps=self.args.adam_epsilon,
                mup=self.mup,
            )
            if self.is_world_process_zero():
                print(describe_groups(groups, self.causal_lm), flush=True)
            self.optimizer = build_optimizer(self.causal_lm, self.args, groups)
            self._asked = hyperparameters(self.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        # A function, not an object: LambdaLR puts an object's attributes into the checkpoint, and a resume would get
        # the old horizon back instead of the one that is asked for now.
        scheduler = LambdaLR(cast(Any, optimizer or self.optimizer), lr_lambda=lambda step: self.lr_factor(step))
        self.lr_scheduler, self._created_lr_scheduler = scheduler, True
        return scheduler

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        refuse(verify_engine(self.accelerator, self.model_wrapped, self.args))
        refuse(self._loss_problems() + self._leaks())
        if self.noise_scale is not None or self.spikes is not None:
            refuse(verify_gradient_signals(self.accelerator, self.args))
        if self.noise_scale is not None:
            self.noise_scale.attach()
        if self.spikes is not None:
            self.spikes.attach(self.optimizer)
        if resume_from_checkpoint is not None:
            apply_asked(
                cast(torch.optim.Optimizer, self.optimizer),
                cast(LambdaLR, self.lr_scheduler),
                asked=self._asked,
                lr_factor=self.lr_factor,
                step=self.state.global_step,
                say=self._say,
            )
        refuse(self._mup_problems())
        return prepared

    def _mup_problems(self) -> list[Problem]:
        if self.mup is None:
            return []
        rates = cast(Any, self.model_wrapped).get_lr() if self.is_deepspeed_enabled else None
        return verify_groups(cast(torch.optim.Optimizer, self.optimizer), self.mup, lrs=rates)

    def check(self) -> None:
        """Wrap the model and run every check that needs it, without a training step. Raises ConfigError."""
        self._prepare_for_training(len(self.steps), self.get_train_dataloader(), None)

    def _loss_problems(self) -> list[Problem]:
        verdict = self.fused_loss.verify(self.model_wrapped, device=self.args.device)
        self._say(f"loss {verdict}")
        return [verdict.problem(type(self.causal_lm).__name__)] if verdict.path == "refused" else []

    def _leaks(self) -> list[Problem]:
        if not self.isolation:
            return []
        found = separate(
            self.isolation,
            self.causal_lm,
            wrapped=self.model_wrapped,
            logits=lambda model, batch: self.fused_loss.forward_logits(model, batch).logits,
            device=self.args.device,
        )
        if found.way is None:
            return [found.problem(type(self.causal_lm).__name__)]
        self.steps.collator = found.way.collator()
        self._say(f"isolation of documents {found.tried[-1]}")
        return []

    # -- logging ------------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.state.epoch = self.steps.epoch(self.state.global_step)
        if self._step_done is not None:  # once per step; the Trainer calls again at the end of an epoch
            self.throughput.end_step(
                input_tokens=self._step_batch_tokens,
                target_tokens=self._step_done.target_tokens,
                flops_full=self.flops.full * self._step_batch_tokens,
                flops_causal=self.flops.causal * self._step_batch_tokens,
            )
            self._step_done = None
            self._judge_update()
        if self.state.global_step == len(self.steps):
            self.control.should_log = True  # the last steps, too, where they fill no whole window
        if self._stopping:
            self.control.should_save = self.control.should_training_stop = True
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The Trainer's log line, with `loss` weighted by tokens over the whole window and our counters beside it."""
        if "loss" in logs:
            refuse(self._mup_problems())
            logs.update(self._window.metrics(self.fused_loss.z_loss_weight))
            logs.update(self.throughput.drain())
            logs["input_tokens"] = self.state.num_input_tokens_seen
            logs["target_tokens"] = self.target_tokens_seen
            logs["batch_tokens"] = self._step_batch_tokens
            if self.noise_scale is not None:
                logs.update(self.noise_scale.metrics())
            if self.spikes is not None:
                logs["skipped_updates"] = self.spikes.history.skipped_updates
            self._window = LogWindow()
            if isinstance(self.plan, AdaptiveRamp):
                self._observe(self.plan, logs)
        super().log(logs, start_time)

    def _observe(self, plan: AdaptiveRamp, logs: dict[str, float]) -> None:
        """Show a log line to the ramp; a batch that grows shortens the run."""
        step = self.state.global_step
        # The noise scale counts targets, a batch all positions of its rows, padding and first tokens too.
        positions = logs["input_tokens"] / max(logs["target_tokens"], 1)
        names = ("noise_scale_tokens", "noise_scale_stderr_tokens")
        found = torch.tensor([logs.get(name, math.nan) * positions for name in names], dtype=torch.float64)
        found = found.to(self.args.device)
        if self.args.world_size > 1:
            dist.broadcast(found, src=0)  # a last bit that differs must not let one rank alone decide
        reason = plan.observe(step, *found.tolist())
        if reason is not None:
            self._say(f"step {step}: {reason}")
            logs["next_batch_tokens"] = self.steps.batch_tokens(step + plan.lead_steps)
            self._follow_length(plan)

    def _follow_length(self, plan: AdaptiveRamp) -> None:
        self.steps.num_steps = self.state.max_steps = plan.ramp.num_steps
        for callback in self.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.total = plan.ramp.num_steps

    def _say(self, message: str) -> None:
        if self.is_world_process_zero():
            logger.warning(message)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(  # type: ignore[override]
        self,
        eval_dataset: EvaluationWindows | Mapping[str, EvaluationWindows] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Held-out loss, perplexity and bits per byte; exact for every batch size and number of ranks.

        Several sets by name: one after another, each with its name in the keys of its metrics.
        """
        windows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(windows, Mapping):
            metrics: dict[str, float] = {}
            for name, named in windows.items():
                metrics |= self.evaluate(
                    named, ignore_keys, f"{metric_key_prefix}_{name}" if name else metric_key_prefix
                )
            return metrics
        model, start = self.model_wrapped, time.perf_counter()
        was_training = model.training
        model.eval()
        metrics = evaluate_bits_per_byte(
            lambda batch: model(**batch).cross_entropy,
            windows,
            rows=self.args.per_device_eval_batch_size,
            device=self.args.device,
            rank=self.args.process_index,
            world_size=self.args.world_size,
        )
        model.train(was_training)
        metrics["seconds"] = round(time.perf_counter() - start, 2)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def stop_after_step(self, *_: Any) -> None:
        """Make all ranks save and stop after this step or the next; a signal handler, enough on any one rank."""
        self._stop_asked = True

    # -- checkpoints (see `saving`) and resume -----------------------------------------------------------------------

    def write_beside_checkpoint(self, folder: Path) -> None:
        self._pretrain_state().write(folder)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(cast(str, output_dir or self.args.output_dir))

    def _pretrain_state(self) -> PretrainState:
        return PretrainState(
            num_steps=len(self.steps),
            target_tokens_seen=self.target_tokens_seen,
            data_position=self.steps.position(self.state.global_step),
            fingerprint=self.fingerprint,
            world_size=self.args.world_size,
            batch=saved_batch(self.plan),
            window=self._window,
            noise_scale=None if self.noise_scale is None else self.noise_scale.state_dict(),
            spikes=None if self.spikes is None else self.spikes.state_dict(),
        )

    def _init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        trained = super()._init_training_state(max_steps, per_epoch, epochs, resume_from_checkpoint, trial)
        # The Trainer goes on with the checkpoint's logging, saving and evaluation steps; what is asked now holds.
        self.state.compute_steps(self.args, max_steps)
        if resume_from_checkpoint is not None:
            saved = read_state(Path(resume_from_checkpoint), fingerprint=self.fingerprint, plan=self.plan)
            self.target_tokens_seen, self._window = saved.target_tokens_seen, saved.window
            if self.noise_scale is not None and saved.noise_scale is not None:
                self.noise_scale.load_state_dict(saved.noise_scale)
            if self.spikes is not None and saved.spikes is not None:
                self.spikes.load_state_dict(saved.spikes)
            if isinstance(self.plan, AdaptiveRamp):
                self._follow_length(self.plan)
            now = len(self.steps)
            if saved.num_steps != now:
                self._say(f"resume: the schedule follows the length asked for, {now} steps, not {saved.num_steps}")
            if saved.batch["stages"] != saved_batch(self.plan)["stages"]:
                self._say("resume: other batches from here on, and the learning rates that go with them, as asked")
            if saved.world_size != self.args.world_size:
                self._say(f"resume: on {self.args.world_size} ranks, saved by {saved.world_size}: dropout draws differ")
            if self.state.global_step >= now:  # nothing is left, though a batch that grew made fewer steps of it
                return 1, 0
        return trained


def _ramp_of(steps: TrainingSteps) -> BatchRamp | AdaptiveRamp:
    """The stages of a data set's batch; a custom `StepRows` has none, and a resume could not check them."""
    if isinstance(steps.plan, EqualSteps):
        return BatchRamp((Stage(0, 0, steps.plan.rows),), steps.sequence_length, len(steps))
    if isinstance(steps.plan, BatchRamp | AdaptiveRamp):
        return steps.plan
    raise TypeError(f"batch_tokens is a {type(steps.plan).__name__}; expected a number, a BatchRamp or an AdaptiveRamp")
