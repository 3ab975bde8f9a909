"""A run: the steps of `training.step` with an optimizer, checks before the first of them, a log, scores and a resume.

The stock Trainer keeps its loop, its logging, its callbacks and its file formats.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from hfpretrain.data.isolation import Way
from hfpretrain.data.steps import EqualSteps, TrainingSteps
from hfpretrain.errors import Problem, refuse
from hfpretrain.mup.apply import is_applied, verify_groups
from hfpretrain.mup.spec import MupSpec
from hfpretrain.training.adaptive_ramp import AdaptiveRamp, saved_batch
from hfpretrain.training.batch_ramp import BatchRamp, Stage
from hfpretrain.training.counters import LogWindow
from hfpretrain.training.evaluation import EvaluationWindows, evaluate_bits_per_byte
from hfpretrain.training.optimizer import build_optimizer, describe_groups, parameter_groups, undo_first_step
from hfpretrain.training.ready import judge
from hfpretrain.training.resume import PretrainState, apply_asked, check_state, hyperparameters, read_state
from hfpretrain.training.step import StepTrainer
from hfpretrain.training.throughput import TokenFlops
from hfpretrain.verdicts import Verdicts


class PretrainTrainer(StepTrainer):
    """A whole pretraining run: steps of `TrainingSteps`, checked before the first one, logged, scored and resumed.

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
        probe: make one forward and backward pass of full rows before the first step, see `probe`; it changes nothing.
        verdicts: the list to which the checks before the first step add, and which refuses; its problems so far count.
        on_checked: called once, when nothing contradicts and before the first step.
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
        probe: bool = False,
        verdicts: Verdicts | None = None,
        on_checked: Callable[[], object] | None = None,
        **kwargs: Any,
    ) -> None:
        if mup is not None and not is_applied(model, mup):
            raise ValueError(
                "PretrainTrainer was given a muP spec that is not on the model: mup.apply(model, spec) first"
            )
        sets: Any = dict(eval_dataset) if isinstance(eval_dataset, Mapping) else eval_dataset
        super().__init__(
            model,
            args,
            train_dataset=train_dataset,
            flops=flops,
            z_loss_weight=z_loss_weight,
            log_noise_scale=log_noise_scale,
            skip_spikes=skip_spikes,
            eval_dataset=sets,
            **kwargs,
        )
        self.lr_factor = lr_factor
        self.plan = _ramp_of(train_dataset)
        self.mup = mup
        which = {"sequence_length": train_dataset.sequence_length, "mup": None if mup is None else mup.fingerprint}
        self.fingerprint = {**(fingerprint or {}), **which}
        self.tokenizer = tokenizer
        self.isolation = isolation
        self.probe = probe
        self.verdicts = verdicts or Verdicts()
        self.on_checked = on_checked

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
            self.optimizer = build_optimizer(self.causal_lm, self.args, groups)
            head = f"{type(self.optimizer).__name__}, learning rate {self.args.learning_rate:g} at its peak:"
            self.verdicts.ok("optimizer", f"{head}\n{describe_groups(groups, self.causal_lm)}")
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
        if self.is_deepspeed_enabled and resume_from_checkpoint is None:
            undo_first_step(cast(Any, self.model_wrapped).optimizer)
        judge(self, self.verdicts)
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
        self.verdicts.problem("muP", self._mup_problems())
        self.verdicts.refuse()
        if self.on_checked is not None:
            self.on_checked()
        return prepared

    def _mup_problems(self) -> list[Problem]:
        if self.mup is None:
            return []
        rates = cast(Any, self.model_wrapped).get_lr() if self.is_deepspeed_enabled else None
        return verify_groups(cast(torch.optim.Optimizer, self.optimizer), self.mup, lrs=rates)

    def check_resume(self, checkpoint: str | Path | None) -> None:
        """Add to the list why this checkpoint is not one of this run, before its weights are loaded."""
        if checkpoint is not None:
            with self.verdicts.timed("checkpoint"):
                problems = check_state(Path(checkpoint), fingerprint=self.fingerprint, plan=self.plan)
                if not self.verdicts.problem("checkpoint", problems):
                    self.verdicts.ok("checkpoint", f"{checkpoint}: the same data, batches and muP as now")

    def check(self) -> None:
        """Wrap the model and run every check that needs it, without a training step.

        Raises:
            ConfigError: all problems of the list, those found before included.
        """
        self.on_checked = None
        self._prepare_for_training(len(self.steps), self.get_train_dataloader(), None)

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
