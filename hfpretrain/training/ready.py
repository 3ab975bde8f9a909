"""The verdicts about a wrapped model: what runs, how its loss is made, what keeps documents apart, whether it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hfpretrain.errors import refuse
from hfpretrain.launch_checks import describe_engine, verify_engine, verify_gradient_signals
from hfpretrain.training.memory import Memory, estimate_of_run
from hfpretrain.training.probe import ProbeError, lazy_state_bytes, probe_step
from hfpretrain.training.separation import separate
from hfpretrain.verdicts import Verdicts

if TYPE_CHECKING:
    from hfpretrain.training.trainer import PretrainTrainer


def judge(trainer: PretrainTrainer, verdicts: Verdicts) -> None:
    """Run every check of a prepared trainer; collective. Collator and attention of the run are set on the way."""
    with verdicts.timed("engine"):
        problems = verify_engine(trainer.accelerator, trainer.model_wrapped, trainer.args)
        if trainer.noise_scale is not None or trainer.spikes is not None:
            problems += verify_gradient_signals(trainer.accelerator, trainer.args)
        if not verdicts.problem("engine", problems):
            verdicts.ok("engine", describe_engine(trainer.model_wrapped, trainer.args))
    with verdicts.timed("loss"):
        _judge_loss(trainer, verdicts)
    with verdicts.timed("isolation"):
        _judge_isolation(trainer, verdicts)
    with verdicts.timed("probe"):
        _probe(trainer, verdicts)


def _judge_loss(trainer: PretrainTrainer, verdicts: Verdicts) -> None:
    verdict = trainer.fused_loss.verify(trainer.model_wrapped, device=trainer.args.device)
    if verdict.path == "refused":
        verdicts.problem("loss", [verdict.problem(type(trainer.causal_lm).__name__)])
    elif verdict.path == "fused":
        verdicts.ok("loss", str(verdict))
    else:
        verdicts.note("loss", f"{verdict}; right, but with all logits in memory")


def _judge_isolation(trainer: PretrainTrainer, verdicts: Verdicts) -> None:
    if not trainer.isolation:
        verdicts.note("isolation", "documents in one row see each other, as asked")
        return
    found = separate(
        trainer.isolation,
        trainer.causal_lm,
        wrapped=trainer.model_wrapped,
        logits=lambda model, batch: trainer.fused_loss.forward_logits(model, batch).logits,
        device=trainer.args.device,
    )
    if found.way is None:
        verdicts.problem("isolation", [found.problem(type(trainer.causal_lm).__name__)])
        return
    trainer.steps.collator = found.way.collator()
    verdicts.ok("isolation", f"documents are kept apart {found.tried[-1]}")


def _probe(trainer: PretrainTrainer, verdicts: Verdicts) -> None:
    if not trainer.probe:
        where = "a CPU, where it takes the time of a micro-batch" if trainer.args.device.type == "cpu" else "request"
        verdicts.ok("probe", f"no pass of full rows on {where} (--probe_step always)")
        return
    if verdicts.anywhere():  # on any rank: all of them make the pass or none
        verdicts.note("probe", "no pass of full rows: the model cannot train yet")
        return

    def backward(micro: dict[str, Any], targets: Tensor) -> None:
        with trainer._accumulation(trainer.model_wrapped, is_last=False):
            output = trainer._loss_output(trainer.model_wrapped, trainer._prepare_inputs(micro), targets)
            if not torch.isfinite(cast(Tensor, output.loss)):  # times zero it would be no zero
                raise FloatingPointError(f"the loss of random tokens is {float(cast(Tensor, output.loss))}")
            trainer._backward(trainer.model_wrapped, cast(Tensor, output.loss) * 0.0, is_last=False)

    try:
        found = probe_step(
            trainer.model_wrapped,
            backward,
            rows=trainer.steps.per_device_rows,
            sequence_length=trainer.steps.sequence_length,
            vocab_size=trainer.causal_lm.config.get_text_config().vocab_size,
            collator=trainer.steps.collator,
            device=trainer.args.device,
            state_bytes=0 if trainer.is_deepspeed_enabled else lazy_state_bytes(trainer.optimizer, trainer.causal_lm),
        )
    except ProbeError as error:
        largest = _largest_micro_batch(trainer, error.rows) if error.out_of_memory else None
        verdicts.problem("probe", [error.problem(largest)])
        if trainer.is_deepspeed_enabled and trainer.args.world_size > 1:
            refuse(verdicts.problems)  # the others may wait inside ZeRO's collectives: no agreement is possible
    else:
        verdicts.ok("probe", str(found))
    if not trainer.is_deepspeed_enabled:  # DeepSpeed's buffers have zeros added
        trainer.model_wrapped.zero_grad(set_to_none=True)
        if trainer.args.device.type == "cuda":
            torch.cuda.empty_cache()


def _largest_micro_batch(trainer: PretrainTrainer, rows: int) -> int | None:
    """Rows that are predicted to fit where `rows` did not; None where the estimate would have let those pass."""
    config = trainer.causal_lm.config
    attention = config._attn_implementation
    length = trainer.steps.sequence_length
    estimate = estimate_of_run(config, trainer.args, sequence_length=length, rows=rows, attn_implementation=attention)
    largest = estimate.largest_micro_batch(Memory.of(trainer.args.device).total_bytes)
    return largest if largest is not None and 0 < largest < rows else None
