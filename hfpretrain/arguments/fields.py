"""Everything that can be configured, in three dataclasses; `parsing` fills them.

`ModelArguments` and `DataArguments` are ours; `PretrainArguments` is `transformers.TrainingArguments` with its names
and habits, other defaults where pretraining needs them, and the fields that pretraining adds. Every field that is
defined or re-defined here says in its help which unit it has and why its default is what it is.

Precedence, weakest first: the defaults here, the files after `--config` from left to right, the command line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import TrainingArguments


def _arg(default: Any, help_text: str) -> Any:
    """A field with its help."""
    return field(default=default, metadata={"help": help_text})


@dataclass
class ModelArguments:
    """Which model, from which configuration or weights, and which tokenizer. One of the first three is given."""

    _argument_group_name = "model"

    model_type: str | None = _arg(
        None,
        "Architecture to build with random weights: gpt2, llama, qwen3, mixtral, mamba, ... (a transformers model "
        "type).",
    )
    config_name: str | None = _arg(
        None,
        "Folder or hub name of a configuration to build with random weights.",
    )
    model_name_or_path: str | None = _arg(
        None,
        "Folder or hub name of weights to continue from.",
    )
    config_overrides: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "Configuration keys to change: a mapping in YAML; on the command line "
            "hidden_size=256,num_hidden_layers=4 or JSON. Merged key by key over the files'. A key that the "
            "configuration does not have is refused."
        },
    )
    tokenizer_name: str | None = _arg(
        None,
        "Folder or hub name; 'train:8192' trains a byte-level BPE of exactly 8192 entries on the training data; "
        "'bytes' is one token per byte. Default: the one of config_name or model_name_or_path.",
    )
    attn_implementation: str = _arg(
        "auto",
        "eager, sdpa, flash_attention_2, flex_attention, torch_varlen (ours), ... Default auto: the first that "
        "computes what the model's own does and keeps documents apart, by measurement.",
    )
    mup_base_width: int | None = _arg(
        None,
        "muP: hidden size that learning_rate, weight_decay and adam_epsilon were tuned at; the model trains like that "
        "one. Default: no muP. All widths are scaled together, head dimension and depth stay.",
    )
    mup_base_config: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "muP, in place of mup_base_width where widths are not in proportion: the configuration keys in "
            "which the model that was tuned differs, in the form of config_overrides."
        },
    )
    mup_overrides: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "muP: regular expression over a whole parameter name -> role (input, hidden, output, vector, "
            "fixed), for parameters that cannot be placed; in the form of config_overrides."
        },
    )
    mup_weight_decay: Literal["independent", "coupled"] = _arg(
        "independent",
        "muP: independent keeps learning rate times weight decay of each matrix at its value at the base width (Kosson "
        "et al. 2025: transfer needs it); coupled keeps weight_decay itself.",
    )


@dataclass
class DataArguments:
    """Which text, and how it becomes rows of tokens."""

    _argument_group_name = "data"

    dataset: list[str] = field(
        default_factory=list,
        metadata={
            "help": "One or more sources: 'stdlib' (the running interpreter's own source files), hub names, folders "
            "written by save_to_disk, txt / jsonl / parquet / arrow files or globs."
        },
    )
    text_column: str = _arg(
        "text",
        "Column that holds the text. 'text' is the habit of nearly every public corpus.",
    )
    validation_fraction: float = _arg(
        0.005,
        "Share of the documents held out, chosen by a hash of their text. 0.005 costs little training data and is "
        "enough for a stable bits-per-byte from about 100 MB of text on; 0 turns evaluation off.",
    )
    eval_data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Further held-out sets, each name=source with a source as --dataset takes it: wiki=wiki/*.jsonl. "
            "Scored whole and logged as eval_<name>_bpb, beside the documents that validation_fraction holds out. "
            "Default none: those are of the training data's own kind, which says nothing about other text."
        },
    )
    sequence_length: int = _arg(
        1024,
        "Tokens per row. 1024 fits every architecture's default position limit; longer rows cost attention time and "
        "pay off where documents are longer.",
    )
    packing: Literal["concat", "best_fit", "single"] = _arg(
        "concat",
        "concat: rows are consecutive tokens, nothing is wasted. best_fit: documents stay whole where they fit, rows "
        "carry some padding. single: one document a row, for models that cannot keep several apart. Default concat: "
        "every position learns, whatever the lengths of the documents.",
    )
    isolate_documents: bool = _arg(
        True,
        "Documents in one row do not see each other. Default true: a document should not be learnt as the "
        "continuation of an unrelated one. Set false for a model on which that cannot be done.",
    )
    cache_dir: str = field(
        default_factory=lambda: os.environ.get("HFPRETRAIN_CACHE", os.path.join("~", ".cache", "hfpretrain")),
        metadata={
            "help": "Folder of the tokenised data and trained tokenizers. The variable HFPRETRAIN_CACHE sets "
            "the default."
        },
    )
    preprocessing_num_workers: int | None = _arg(
        None,
        "Processes that tokenise. Default: one per CPU core; the result does not depend on it.",
    )

    def __post_init__(self) -> None:
        self.cache_dir = os.path.expanduser(self.cache_dir)

    @property
    def eval_sources(self) -> dict[str, str]:
        """name: source of each entry of eval_data; `preflight.check_eval_data` says what is wrong with them."""
        return {name: source for name, _, source in (entry.partition("=") for entry in self.eval_data)}


@dataclass
class PretrainArguments(TrainingArguments):
    """`TrainingArguments` for pretraining: length and batch in tokens, schedules that end, defaults with a reason.

    Attributes:
        sources: field name -> where its value came from: a file's name, "command line" or "default". Filled by `parse`;
            empty when the class is built by hand.
        accumulation_asked: `gradient_accumulation_steps` as the user gave it, None when not given. The Trainer always
            sees 1, because one item of the data loader is one optimizer step (`hfpretrain.preflight.derive` compares).
    """

    _argument_group_name = "training (every other field of transformers.TrainingArguments works too: --help_all)"

    output_dir: str | None = _arg(
        None,
        "Folder of this run's checkpoints, logs and run.json. Must be given: with a shared default, one run would "
        "continue another's checkpoints.",
    )

    # --- length and batch -------------------------------------------------------------------------------------------
    batch_tokens: int = _arg(
        262_144,
        "Tokens (input positions) per optimizer step, over all devices; a multiple of sequence_length. Takes 262_144,"
        " 2.5e5, 0.25M, 256Ki. The default, 2^18, suits roughly 100 to 400 million parameters: GPT-3 used 2^19 there,"
        " and smaller batches learn more per token. Accumulation follows from it, so the training is the same on any "
        "number of devices.",
    )
    total_tokens: int | None = _arg(
        None,
        "Tokens to train on; whole steps only, the rest is reported. Takes 10M, 2.5B, ... This or max_steps is needed.",
    )
    max_steps: int = _arg(
        -1,
        "Optimizer steps, in place of total_tokens; -1: not given. Given both, they must say the same.",
    )
    batch_ramp: str | None = _arg(
        None,
        "Batches that grow: tokens seen:batch tokens, ... as in 0:0.25M,200M:0.5M,1B:1M; batch_tokens is then the last "
        "and may be left out. Or noise_scale:0.25M, growing from there up to batch_tokens, at most doubling, where the "
        "measured noise scale less its standard error stays above factor:2 batches for steps:200 steps (both may "
        "follow after commas); it needs log_noise_scale. Default: one batch throughout. The second form is an "
        "experiment: the literature disagrees on how far the noise scale predicts the critical batch (McCandlish et "
        "al. 2018 that it does; Merrill et al. 2025 that it is orders of magnitude too low on OLMo).",
    )
    batch_ramp_lr: Literal["auto", "sqrt", "linear", "none"] = _arg(
        "auto",
        "How the learning rate follows a ramp: times (batch / largest batch) to the power 1/2, 1 or 0, so that "
        "learning_rate is that of the full batch. auto: sqrt (Malladi et al. 2022, for Adam), linear with SGD.",
    )
    per_device_train_batch_size: int = _arg(
        8,
        "Rows per device that fit in memory at once. It changes speed and memory, never the training. 8 rows of 1024 "
        "tokens keep a 24 GB device busy with a 160M model.",
    )
    gradient_accumulation_steps: int = _arg(
        1,
        "Leave it out: ceil(ceil(batch_tokens / sequence_length / devices) / per_device_train_batch_size). Given, it "
        "must agree with that.",
    )

    # --- optimizer --------------------------------------------------------------------------------------------------
    learning_rate: float = _arg(
        6e-4,
        "Peak learning rate. 6e-4 is the published value at 125 to 160 million parameters (GPT-3 table 2.1, Pythia); "
        "3e-4 is usual from 1 to 8 billion (Llama 2, OLMo 2), and 1e-3 to 4e-3 below 30 million (our guess).",
    )
    weight_decay: float = _arg(
        0.1,
        "Decay rate, applied to weight matrices only. 0.1 is what GPT-3, Llama and OLMo used.",
    )
    adam_beta2: float = _arg(
        0.95,
        "Decay of Adam's second moment per step. 0.95 (GPT-3, Llama): at 0.999 a gradient spike stays in "
        "it for thousands of steps.",
    )
    max_grad_norm: float = _arg(
        1.0,
        "Global gradient norm above which the gradient is scaled down; 1.0 as in GPT-3 and Llama. 0 turns it off.",
    )

    z_loss_weight: float = _arg(
        1e-4,
        "Weight of (log Z)^2 beside the cross-entropy; keeps logits where half precision is fine. 1e-4 as in PaLM; 0 "
        "turns it off and is exactly cross-entropy. Never part of evaluation.",
    )

    # --- schedule ---------------------------------------------------------------------------------------------------
    lr_scheduler_type: str = _arg(
        "warmup_stable_decay",
        "warmup_stable_decay, cosine, linear or constant, each after a warm-up. Default WSD: as good as cosine "
        "(Haegele et al. 2024) and its stable part can be prolonged or branched without a restart.",
    )
    warmup_steps: float = _arg(
        0,
        "Warm-up in optimizer steps (1 or more; 0: none), in place of warmup_fraction.",
    )
    warmup_fraction: float | None = _arg(
        None,
        "Warm-up as a share of the run. Default 0.02: Adam's moments need some hundred steps, and 2%% gives them that"
        " in most runs.",
    )
    decay_steps: int | None = _arg(
        None,
        "Final decay of warmup_stable_decay in optimizer steps, in place of decay_fraction.",
    )
    decay_fraction: float | None = _arg(
        None,
        "Final decay of warmup_stable_decay as a share of the run. Default 0.2: where Haegele et al. 2024 meet cosine.",
    )
    decay_shape: Literal["1-sqrt", "linear", "cosine"] = _arg(
        "1-sqrt",
        "Shape of that decay. 1-sqrt gave the lowest loss in Haegele et al. 2024.",
    )
    min_lr_ratio: float = _arg(
        0.0,
        "Learning rate of the last step, as a share of the peak. 0: decaying to zero gave the lowest final loss in "
        "Bergsma et al. 2025.",
    )

    # --- logging, evaluation, checkpoints ---------------------------------------------------------------------------
    logging_steps: float = _arg(
        10,
        "Optimizer steps between log lines; loss is the token mean over them.",
    )
    logging_first_step: bool = _arg(
        True,
        "Log step 1. Default true: its loss must be near ln(vocabulary size), the cheapest check there is.",
    )
    logging_nan_inf_filter: bool = _arg(
        False,
        "Hide non-finite losses. Default false: they stop the run instead, with step and data position.",
    )
    report_to: list[str] = field(
        default_factory=lambda: ["none"],
        metadata={
            "help": "Trackers: tensorboard, wandb, trackio, ... (several allowed), or none, the default "
            "of transformers."
        },
    )
    log_noise_scale: int = _arg(
        0,
        "Measure the gradient noise scale every N optimizer steps and log it, with its standard error, and what this "
        "batch costs in steps and tokens if it is the critical batch (published results disagree whether it is). 0: "
        "off. 10 costs next to nothing; every step about 3%% (measured, CPU).",
    )
    skip_spikes: float = _arg(
        0.0,
        "Leave out the update of a step whose loss or gradient norm (before clipping) is this many robust standard "
        "deviations above the median of the last 128 accepted steps; 10 in a row stop the run. 0: off. 8 is a start: "
        "of the demo's 585 steps it would leave out one (a norm 7 times the median), 5 would leave out five.",
    )
    eval_strategy: str = _arg(
        "steps",
        "no or steps. Default: steps, or no where validation_fraction is 0 and there is no eval_data.",
    )
    eval_steps: float | None = _arg(
        500,
        "Optimizer steps between evaluations. 500, like save_steps, so that every checkpoint has a score.",
    )
    save_steps: float = _arg(
        500, "Optimizer steps between checkpoints. 500 as in transformers; the last step is saved too."
    )
    save_total_limit: int | None = _arg(
        3,
        "Newest checkpoints kept; 'none' keeps all. 3: optimizer states are large, and one bad checkpoint must not be"
        " the only one.",
    )
    resume_from_checkpoint: str = _arg(
        "auto",
        "auto: the newest complete checkpoint in output_dir if there is one, so that the same command continues a "
        "killed run; a folder: that checkpoint; false: start anew.",
    )
    seed: int = _arg(42, "Decides the initial weights and the order of the rows; 42 is a habit, any number is as good.")
    preflight_only: bool = _arg(
        False,
        "Check everything, print the plan and the verdicts, write them to output_dir/preflight.json, and stop before "
        "the first step; the exit status says whether anything contradicts.",
    )
    probe_step: Literal["auto", "always", "never"] = _arg(
        "auto",
        "One forward and backward pass of per_device_train_batch_size full rows before the first step, to see that "
        "they fit in memory; it changes nothing about the training. auto: on a GPU, and with preflight_only. On a CPU "
        "it takes the time of a micro-batch, and the system does not refuse memory, it kills.",
    )

    # --- what this trainer's way of feeding data needs ----------------------------------------------------------------
    remove_unused_columns: bool = _arg(
        False,
        "Must stay false: an item of the data loader is a whole optimizer step, it has no columns.",
    )
    ignore_data_skip: bool = _arg(
        True,
        "Must stay true: a resumed run starts at its step in O(1), nothing is re-read.",
    )
    ddp_find_unused_parameters: bool | None = _arg(
        False,
        "Default false: searching costs time at every step, and pretraining uses every parameter.",
    )

    sources: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    accumulation_asked: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.gradient_accumulation_steps != 1:
            self.accumulation_asked = self.gradient_accumulation_steps
            self.gradient_accumulation_steps = 1
        if not torch.accelerator.is_available():
            self._prepare_cpu_machine()
        super().__post_init__()

    def _prepare_cpu_machine(self) -> None:
        """Set what accelerate and DeepSpeed need on a machine without an accelerator, where the user did not.

        Without `use_cpu`, launched ranks form no group under DDP, nor under `--deepspeed`, where `ddp_backend` is not
        passed on. Where the launcher asks for DeepSpeed the group is DeepSpeed's own, and needs the backend only.
        """
        if deepspeed_requested(self.deepspeed):
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if self.deepspeed or not deepspeed_requested(self.deepspeed):
            self.use_cpu = True
        if self.ddp_backend is None and "WORLD_SIZE" in os.environ:
            self.ddp_backend = "gloo"


def deepspeed_requested(deepspeed: Any) -> bool:
    """Whether DeepSpeed is asked for, by `--deepspeed` or by the launcher's configuration."""
    return bool(deepspeed) or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in {"true", "1", "yes"}
