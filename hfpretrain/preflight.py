"""What is known about a run before its first step: its length in steps, and everything that contradicts.

The functions return problems in place of raising, so that one `refuse(a + b + c)` shows them all. How the processes
were started is checked in `hfpretrain.launch_checks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedConfig

from hfpretrain.arguments import DataArguments, ModelArguments, PretrainArguments
from hfpretrain.arguments.rules import check_length, check_values
from hfpretrain.attention import varlen_attentions
from hfpretrain.data.isolation import Way, ways
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.launch_checks import check_deepspeed, check_launch, deepspeed_config
from hfpretrain.model import load_config
from hfpretrain.mup.infer import infer
from hfpretrain.mup.spec import MupSpec
from hfpretrain.training.optimizer import check_mup_optimizer
from hfpretrain.training.schedule import check_schedule, lr_factor, resolve_steps

DEFAULT_WARMUP_FRACTION = 0.02
DEFAULT_DECAY_FRACTION = 0.2
# Muennighoff et al. 2023 (arXiv:2305.16264): up to about 4 epochs, repeated text is worth nearly as much as new text.
EPOCHS_WORTH_REPEATING = 4


@dataclass(frozen=True)
class RunLength:
    """The numbers that follow from the arguments and the number of processes.

    Attributes:
        num_steps: optimizer steps of the whole run.
        batch_tokens: input positions per optimizer step, over all processes.
        sequence_length: input positions per row.
        rows_per_step: rows per optimizer step, over all processes.
        world_size: processes.
        micro_batches_per_step: forward passes of each process per optimizer step.
        warmup_steps: optimizer steps until the peak learning rate.
        decay_steps: optimizer steps of the final decay; 0 unless the schedule is warmup_stable_decay.
        total_tokens: input positions of the whole run, num_steps * batch_tokens.
        unused_tokens: what total_tokens asked for beyond whole steps; negative when one step is already more.
    """

    num_steps: int
    batch_tokens: int
    sequence_length: int
    rows_per_step: int
    world_size: int
    micro_batches_per_step: int
    warmup_steps: int
    decay_steps: int
    total_tokens: int
    unused_tokens: int

    def __str__(self) -> str:
        rest = f" ({self.unused_tokens:,} tokens of the request are no whole step)" if self.unused_tokens > 0 else ""
        return (
            f"{self.num_steps:,} steps of {self.batch_tokens:,} tokens = {self.total_tokens:,} tokens{rest}; "
            f"{self.rows_per_step:,} rows of {self.sequence_length:,} a step over {self.world_size} process(es) in "
            f"{self.micro_batches_per_step} micro-batch(es) each; warm-up {self.warmup_steps:,} steps, "
            f"final decay {self.decay_steps:,}"
        )

    def as_dict(self) -> dict[str, int]:
        """For run.json."""
        return asdict(self)


def derive(args: PretrainArguments, data_args: DataArguments, *, world_size: int) -> RunLength:
    """Steps, rows and micro-batches of a run on `world_size` processes.

    num_steps is max_steps, or floor(total_tokens / batch_tokens) and at least 1: never more tokens than asked for,
    except where one step is already more. A warm-up that was not asked for gives way to a decay that leaves it no room.

    Raises:
        ConfigError: lengths that do not fit together, each with its numbers.
    """
    rows, rest = divmod(args.batch_tokens, data_args.sequence_length)
    if rest or not rows or (args.max_steps < 1 and args.total_tokens is None):
        values = SimpleNamespace(**{**vars(data_args), **vars(args)})
        refuse([problem for _, problem in check_length(values, sources=args.sources)])
    num_steps = args.max_steps
    if num_steps < 1:
        assert args.total_tokens is not None
        num_steps = max(args.total_tokens // args.batch_tokens, 1)
    problems: list[Problem] = []
    if rows < world_size:
        what = "a step has fewer rows than there are processes, so some would have nothing to do"
        given = f"{args.batch_tokens:_} / {data_args.sequence_length:_} = {rows} rows, {world_size} processes"
        remedy = f"batch_tokens of at least {world_size * data_args.sequence_length:_}, or fewer processes"
        problems.append(Problem(what, given, _source(args, "batch_tokens"), remedy))
    micro_batches = math.ceil(math.ceil(rows / world_size) / args.per_device_train_batch_size)
    problems += _accumulation(args, micro_batches, rows=rows, world_size=world_size)
    warmup_steps, decay_steps = _schedule_lengths(args, num_steps, problems)
    refuse(problems)
    total = num_steps * args.batch_tokens
    return RunLength(
        num_steps=num_steps,
        batch_tokens=args.batch_tokens,
        sequence_length=data_args.sequence_length,
        rows_per_step=rows,
        world_size=world_size,
        micro_batches_per_step=micro_batches,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        total_tokens=total,
        unused_tokens=0 if args.total_tokens is None else args.total_tokens - total,
    )


def check_start(data_args: DataArguments, args: PretrainArguments) -> RunLength:
    """The length of the run, once nothing about the arguments, the launcher and DeepSpeed's configuration contradicts.

    Raises:
        ConfigError: all contradictions at once.
    """
    problems = check_launch(args) + check_deepspeed(deepspeed_config(args), args)
    try:
        run = derive(args, data_args, world_size=args.world_size)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from error
    refuse(problems)
    return run


def schedule(args: PretrainArguments, run: RunLength) -> Callable[[int], float]:
    """0-based optimizer step -> multiple of the peak learning rate, see `hfpretrain.training.schedule.lr_factor`."""
    return partial(
        lr_factor,
        schedule=str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        num_steps=run.num_steps,
        warmup_steps=run.warmup_steps,
        decay_steps=run.decay_steps,
        decay_shape=args.decay_shape,
        min_lr_ratio=args.min_lr_ratio,
    )


def _accumulation(args: PretrainArguments, micro_batches: int, *, rows: int, world_size: int) -> list[Problem]:
    asked = args.accumulation_asked
    if asked is None or asked == micro_batches:
        return []
    what = (
        f"gradient_accumulation_steps disagrees with the batch: ceil(ceil({rows} rows / {world_size} processes) / "
        f"{args.per_device_train_batch_size}) = {micro_batches}"
    )
    remedy = "leave it out; batch_tokens and per_device_train_batch_size decide it"
    return [Problem(what, str(asked), _source(args, "gradient_accumulation_steps"), remedy)]


def _schedule_lengths(args: PretrainArguments, num_steps: int, problems: list[Problem]) -> tuple[int, int]:
    """(warmup_steps, decay_steps) with the defaults filled in; adds what does not fit to `problems`."""
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    in_steps = args.warmup_steps > 0 or _source(args, "warmup_steps") not in ("default", "arguments")
    asked = in_steps or args.warmup_fraction is not None
    decays = schedule == "warmup_stable_decay"
    default_decay = decays and args.decay_steps is None and args.decay_fraction is None
    warmup_fraction = args.warmup_fraction if asked else DEFAULT_WARMUP_FRACTION
    decay_fraction = DEFAULT_DECAY_FRACTION if default_decay else args.decay_fraction
    try:
        warmup_steps, decay_steps = resolve_steps(
            num_steps=num_steps,
            warmup_steps=int(args.warmup_steps) if in_steps else None,
            warmup_fraction=warmup_fraction,
            decay_steps=args.decay_steps,
            decay_fraction=decay_fraction,
        )
    except ConfigError as error:
        problems += error.problems
        return 0, 0
    if not asked and decays:
        warmup_steps = max(min(warmup_steps, num_steps - decay_steps), 0)
    problems += check_schedule(
        schedule=schedule,
        num_steps=num_steps,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        decay_shape=args.decay_shape,
        min_lr_ratio=args.min_lr_ratio,
    )
    return warmup_steps, decay_steps


def _source(args: PretrainArguments, name: str) -> str:
    return args.sources.get(name, "arguments")


def check_arguments(model_args: ModelArguments, data_args: DataArguments, args: PretrainArguments) -> list[Problem]:
    """The rules that `parse` applies, for dataclasses that were built by hand."""
    values = SimpleNamespace(**{**vars(model_args), **vars(data_args), **vars(args)})
    return [problem for _, problem in check_values(values, sources=args.sources)]


def check_model(config: Any, tokenizer: Any, data_args: DataArguments, args: PretrainArguments) -> list[Problem]:
    """What a model's configuration cannot do with this data.

    Args:
        config: the `PretrainedConfig` that the model is built from.
        tokenizer: anything whose `len` is its number of ids.
    """
    problems = []
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and data_args.sequence_length > positions:
        what = f"rows are longer than the {positions:_} positions of the model"
        remedy = f"sequence_length of at most {positions}, or max_position_embeddings in config_overrides"
        source = _source(args, "sequence_length")
        problems.append(Problem(what, f"sequence_length={data_args.sequence_length}", source, remedy))
    if len(tokenizer) > text.vocab_size:
        what = "the tokenizer has ids that the model's embedding does not have"
        given = f"{len(tokenizer):_} tokens, vocab_size={text.vocab_size:_}"
        remedy = f"vocab_size of at least {len(tokenizer)} in config_overrides, or the model's own tokenizer"
        problems.append(Problem(what, given, _source(args, "tokenizer_name"), remedy))
    return problems


def mup_spec(
    config: PreTrainedConfig, model_args: ModelArguments, args: PretrainArguments, *, tokenizer: Any
) -> MupSpec | None:
    """The muP of this run; None where it is not asked for.

    Raises:
        ConfigError: an optimizer without muP's rules, and everything that `hfpretrain.mup.infer` refuses.
    """
    changes = model_args.mup_base_config
    if model_args.mup_base_width is None and not changes:
        return None
    refuse(check_mup_optimizer(args))
    base = None
    if changes:
        base = load_config(
            model_type=model_args.model_type,
            config_name=model_args.config_name,
            config_overrides=model_args.config_overrides | changes,
            tokenizer=tokenizer,
        )
    return infer(
        config,
        base_width=model_args.mup_base_width,
        base_config=base,
        overrides=model_args.mup_overrides,
        weight_decay_mode=model_args.mup_weight_decay,
    )


def isolation_ways(config: Any, model_args: ModelArguments, data_args: DataArguments) -> list[Way]:
    """The ways to keep documents apart that these arguments leave open; none if they shall see each other."""
    if data_args.packing == "single":
        return [Way("single")]
    if not data_args.isolate_documents:
        return []
    attention = model_args.attn_implementation
    return ways(
        config,
        attentions=varlen_attentions() if attention == "auto" else (),
        attn_implementation=attention,
        sequence_length=data_args.sequence_length,
    )


def model_notes(config: Any) -> list[str]:
    """What is allowed about a model's configuration, but worth one line before the first step."""
    notes = []
    text = config.get_text_config()
    if getattr(text, "router_aux_loss_coef", 0) and not getattr(text, "output_router_logits", False):
        notes.append(
            "the experts' load-balancing loss is off (output_router_logits is false): set it true in config_overrides"
        )
    if text.vocab_size % 64:
        padded = -(-text.vocab_size // 64) * 64
        notes.append(f"vocab_size {text.vocab_size:,} is no multiple of 64; {padded:,} lets a GPU use its matrix units")
    return notes


def check_data(
    *, num_blocks: int, num_validation_documents: int, run: RunLength, data_args: DataArguments, args: PretrainArguments
) -> tuple[list[Problem], list[str]]:
    """(problems, notes) about the amount of data.

    Args:
        num_blocks: rows in one epoch of the training data.
        num_validation_documents: documents held out.
    """
    problems = []
    notes = []
    if num_blocks == 0:
        what = "the training data does not fill one row"
        remedy = "more data, or a shorter sequence_length"
        source = _source(args, "sequence_length")
        problems.append(Problem(what, f"sequence_length={data_args.sequence_length}", source, remedy))
    else:
        epochs = run.num_steps * run.rows_per_step / num_blocks
        line = f"{epochs:.2f} epochs of {num_blocks * run.sequence_length:,} tokens"
        if epochs > EPOCHS_WORTH_REPEATING:
            line += f"; repeats teach less beyond about {EPOCHS_WORTH_REPEATING} (Muennighoff et al. 2023)"
        notes.append(line)
    if num_validation_documents == 0 and str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no":
        what = "evaluation is asked for, but the hash held out no document"
        given = f"validation_fraction={data_args.validation_fraction}"
        remedy = "a larger validation_fraction, or eval_strategy: no"
        problems.append(Problem(what, given, _source(args, "validation_fraction"), remedy))
    return problems, notes
