"""What the contenders of `end_to_end.py` share: the job, the clock, the count of lost tokens, the initial model.

Imports of large libraries stand inside functions, because import time is part of a contender's time to first step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NAMES = ("plain", "run_clm", "trl_wrapped", "trl_bfd", "ours")


@dataclass(frozen=True)
class Job:
    """What is equal for all contenders. Lengths are in tokens."""

    train_text: str  # jsonl file with a column "text"
    tokenizer: str  # folder
    caches: str  # folder for whatever a contender keeps between two starts
    output: str  # folder of this run: the trained model and result.json
    config_overrides: dict[str, int | bool]
    sequence_length: int
    rows_per_step: int
    rows_at_once: int  # rows of one micro-batch
    num_steps: int
    warmup_steps: int
    learning_rate: float  # peak
    same_schedule: bool  # linear for all, in place of each one's habit
    started: float  # time.time() just before the interpreter was started
    first_step_only: bool
    seed: int = 42
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0

    @property
    def micro_batches(self) -> int:
        return self.rows_per_step // self.rows_at_once

    def steps_for(self, targets_per_row: float) -> int:
        """Optimizer steps that come nearest to num_steps * rows * L target tokens: rows differ in their targets."""
        return max(1, round(self.num_steps * self.sequence_length / targets_per_row))


@dataclass
class Clock:
    """At the end of every optimizer step: seconds since the start, target tokens so far, learning rate used."""

    started: float
    ends: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    target_tokens: int = 0  # raised by whoever counts

    def step_done(self, learning_rate: float) -> None:
        self.ends.append(time.time() - self.started)
        self.targets.append(self.target_tokens)
        self.learning_rates.append(learning_rate)


@dataclass(frozen=True)
class Audit:
    """Text tokens (start and end tokens do not count) of one epoch of a contender's rows.

    Attributes:
        kept: those that stand in a row at all.
        targets_of_epoch: those of them that are predicted from a token before them in their row.
        schedule: name of the learning-rate schedule.
    """

    kept: int
    targets_of_epoch: int
    schedule: str


def build(job: Job) -> tuple[Any, Any]:
    """The tokenizer, and the model with the same initial weights for all."""
    from transformers import PreTrainedTokenizerFast

    from hfpretrain.model import build_model, load_config

    tokenizer = PreTrainedTokenizerFast.from_pretrained(job.tokenizer)
    config = load_config(model_type="llama", config_overrides=job.config_overrides, tokenizer=tokenizer)
    return tokenizer, build_model(config, seed=job.seed)


def is_text(tokens: np.ndarray, tokenizer: Any) -> np.ndarray:
    """Boolean, whether each token is text and not a start or end token."""
    text: np.ndarray = ~np.isin(tokens, (tokenizer.bos_token_id, tokenizer.eos_token_id))
    return text


def clock_callback(job: Job, clock: Clock, count: Callable[[], int] | None = None) -> Any:
    """A TrainerCallback that keeps the clock; `count`, if given, says how many target tokens were trained so far."""
    from transformers import TrainerCallback

    class Keeper(TrainerCallback):
        used = 0.0

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.used = kwargs["optimizer"].param_groups[0]["lr"]

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if count is not None:
                clock.target_tokens = count()
            clock.step_done(self.used)
            control.should_training_stop = control.should_training_stop or job.first_step_only

    return Keeper()
