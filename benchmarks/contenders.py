"""Five ways to run one pretraining job; `end_to_end.py` starts each in a fresh interpreter and says what is compared.

    python benchmarks/contenders.py job.json ours

reads a `Job`, trains, and writes the model and result.json into the job's output folder. Imports of large libraries
stand inside functions, because import time is part of a contender's time to first step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from contest import Audit, Clock, Job, build, clock_callback, is_text

Contender = Callable[[Job, Clock], tuple[Any, Audit]]


def main() -> None:
    job, name = Job(**json.loads(Path(sys.argv[1]).read_text())), sys.argv[2]
    contenders: dict[str, Contender] = {
        "plain": plain,
        "run_clm": run_clm,
        "trl_wrapped": partial(trl_packing, strategy="wrapped"),
        "trl_bfd": partial(trl_packing, strategy="bfd"),
        "ours": ours,
    }
    clock = Clock(job.started)
    model, audit = contenders[name](job, clock)
    if not job.first_step_only:
        model.save_pretrained(job.output)
    (Path(job.output) / "result.json").write_text(json.dumps(asdict(clock) | asdict(audit)))


# -- a hand-written loop ----------------------------------------------------------------------------------------------


def plain(job: Job, clock: Clock) -> tuple[Any, Audit]:
    """All tokens in one flat file; windows of L + 1 of them in random order; the mean loss of each micro-batch."""
    import torch
    import torch.nn.functional as F

    tokenizer, model = build(job)
    stream = _token_file(job, tokenizer)
    windows = [
        torch.from_numpy(stream[start : start + job.sequence_length + 1].astype(np.int64))
        for start in range(0, len(stream) - job.sequence_length, job.sequence_length)
    ]
    batches = _endless(windows, job)
    num_steps = job.steps_for(job.sequence_length)
    optimizer, schedule = _plain_optimizer(model, job, num_steps)
    model.train()
    for _ in range(1 if job.first_step_only else num_steps):
        for _ in range(job.micro_batches):
            batch = next(batches)
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            (F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / job.micro_batches).backward()
            clock.target_tokens += batch[:, 1:].numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
        used = optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        clock.step_done(used)
    text = is_text(stream[: len(windows) * job.sequence_length + 1], tokenizer)
    name = "linear" if job.same_schedule else "cosine"
    return model, Audit(kept=int(text.sum()), targets_of_epoch=int(text[1:].sum()), schedule=name)


def _token_file(job: Job, tokenizer: Any) -> np.ndarray:
    """All documents behind one another as uint16, an end token after each; written at the first start."""
    path = Path(job.caches) / "tokens.bin"
    if not path.exists():
        with open(job.train_text, encoding="utf-8") as lines:
            texts = [json.loads(line)["text"] for line in lines]
        ids = tokenizer(texts)["input_ids"]
        np.concatenate([np.array([*row, tokenizer.eos_token_id], dtype=np.uint16) for row in ids]).tofile(path)
    return np.memmap(path, dtype=np.uint16, mode="r")


def _endless(windows: Any, job: Job) -> Iterator[Any]:
    import torch
    from torch.utils.data import DataLoader

    shuffle = torch.Generator().manual_seed(job.seed)
    batches = DataLoader(windows, batch_size=job.rows_at_once, shuffle=True, drop_last=True, generator=shuffle)
    while True:
        yield from batches


def _plain_optimizer(model: Any, job: Job, num_steps: int) -> tuple[Any, Any]:
    """Fused AdamW that decays all that has two dimensions, embeddings too, and cosine down to zero."""
    import torch
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": job.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=job.learning_rate, betas=(job.beta1, job.beta2), fused=True)
    habit = get_linear_schedule_with_warmup if job.same_schedule else get_cosine_schedule_with_warmup
    return optimizer, habit(optimizer, job.warmup_steps, num_steps)


# -- the stock Trainer ------------------------------------------------------------------------------------------------


def run_clm(job: Job, clock: Clock) -> tuple[Any, Audit]:
    """What transformers' example script does: tokenise, group_texts on 1000 documents at a time, stock Trainer."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    tokenizer, model = build(job)
    raw = _load_text(job)
    tokenised = raw.map(partial(_tokenise, tokenizer=tokenizer), batched=True, remove_columns=["text"])
    grouped = tokenised.map(partial(_group_texts, length=job.sequence_length), batched=True)
    args = TrainingArguments(**_stock_arguments(job, job.steps_for(job.sequence_length - 1)))
    trainer = Trainer(
        model, args, train_dataset=grouped, processing_class=tokenizer, data_collator=default_data_collator
    )
    return _train(trainer, job, clock), _audit(grouped, tokenizer, loses_first=True)


def _tokenise(rows: dict[str, list[str]], tokenizer: Any) -> Any:
    return tokenizer(rows["text"])


def _group_texts(rows: dict[str, list[list[int]]], length: int) -> dict[str, list[list[int]]]:
    joined = {key: list(chain.from_iterable(column)) for key, column in rows.items()}
    whole = len(joined["input_ids"]) // length * length
    grouped = {key: [ids[i : i + length] for i in range(0, whole, length)] for key, ids in joined.items()}
    return grouped | {"labels": [list(row) for row in grouped["input_ids"]]}


def trl_packing(job: Job, clock: Clock, *, strategy: str) -> tuple[Any, Audit]:
    """TRL as its users run it: SFTTrainer, a stock Trainer beneath, tokenises, packs and collates plain text."""
    from trl import SFTConfig, SFTTrainer

    tokenizer, model = build(job)
    packing: dict[str, Any] = {"packing": True, "packing_strategy": strategy, "max_length": job.sequence_length}
    # Equal for all: TRL's defaults are bf16 and recomputed activations, which save memory that nobody lacks here.
    equal: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False}
    args = SFTConfig(**_stock_arguments(job, job.num_steps), **packing, **equal)
    trainer = SFTTrainer(model, args=args, train_dataset=_load_text(job), processing_class=tokenizer)
    packed: Any = trainer.train_dataset
    isolated = "seq_lengths" in packed.column_names
    pieces = sum(map(len, packed["seq_lengths"])) if isolated else len(packed)
    tokens = sum(len(chunk.flatten()) for chunk in packed.data.column("input_ids").chunks)
    trainer.args.max_steps = job.steps_for((tokens - pieces) / len(packed))  # known only now that the rows exist
    return _train(trainer, job, clock), _audit(packed, tokenizer, loses_first=not isolated)


def _load_text(job: Job) -> Any:
    import datasets

    return datasets.load_dataset("json", data_files=job.train_text, split="train", cache_dir=job.caches)


def _stock_arguments(job: Job, num_steps: int) -> dict[str, Any]:
    """TrainingArguments' own defaults, the linear schedule among them, but for what is equal for all."""
    import torch

    return {
        "output_dir": job.output,
        "max_steps": num_steps,
        "per_device_train_batch_size": job.rows_at_once,
        "gradient_accumulation_steps": job.micro_batches,
        "learning_rate": job.learning_rate,
        "warmup_steps": job.warmup_steps,
        "weight_decay": job.weight_decay,
        "adam_beta1": job.beta1,
        "adam_beta2": job.beta2,
        "max_grad_norm": job.max_grad_norm,
        "seed": job.seed,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not torch.accelerator.is_available(),
    }


def _train(trainer: Any, job: Job, clock: Clock) -> Any:
    """Run a stock Trainer under the clock; target tokens are counted where the model is called."""
    trainer.add_callback(clock_callback(job, clock))

    def count(module: Any, arguments: Any, inputs: dict[str, Any]) -> None:
        clock.target_tokens += int((inputs["labels"][:, 1:] != -100).sum())

    handle = trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.train()
    handle.remove()
    return trainer.model


def _audit(rows: Any, tokenizer: Any, *, loses_first: bool) -> Audit:
    """Count over the Arrow column. `loses_first`: a row begins anywhere in a text, and its first token is no target."""
    kept = first = 0
    for chunk in rows.data.column("input_ids").chunks:
        text = is_text(chunk.flatten().to_numpy(), tokenizer)
        kept += int(text.sum())
        first += int(text[chunk.offsets.to_numpy()[:-1] - chunk.offsets[0].as_py()].sum())
    return Audit(kept=kept, targets_of_epoch=kept - first if loses_first else kept, schedule="linear")


# -- ours -------------------------------------------------------------------------------------------------------------


def ours(job: Job, clock: Clock) -> tuple[Any, Audit]:
    """As recipes/pretrain.py does it: a view over tokens on disk, isolated documents, exact token mean, WSD."""
    from hfpretrain.arguments import PretrainArguments
    from hfpretrain.data.collator import PackedBlocks, PackedCollator
    from hfpretrain.data.documents import load_documents
    from hfpretrain.data.isolation import Way
    from hfpretrain.data.order import BlockOrder
    from hfpretrain.data.packing import pack_concat
    from hfpretrain.data.steps import TrainingSteps
    from hfpretrain.training.trainer import PretrainTrainer

    tokenizer, model = build(job)
    documents, _, _ = load_documents([job.train_text], tokenizer, validation_fraction=0.0, cache_dir=Path(job.caches))
    index = pack_concat(documents.lengths, job.sequence_length)
    num_steps = job.steps_for(index.target_tokens / index.num_blocks)
    args = PretrainArguments(
        **_stock_arguments(job, num_steps) | {"gradient_accumulation_steps": 1}, eval_strategy="no"
    )
    steps = TrainingSteps(
        PackedBlocks(documents, index),
        BlockOrder(index.num_blocks, seed=job.seed),
        batch_tokens=job.rows_per_step * job.sequence_length,
        sequence_length=job.sequence_length,
        per_device_train_batch_size=job.rows_at_once,
        rank=0,
        world_size=1,
        collator=PackedCollator(),
        num_steps=num_steps,
    )
    name = "linear" if job.same_schedule else "warmup_stable_decay"
    schedule = _our_schedule(name, num_steps, job.warmup_steps)
    trainer = PretrainTrainer(model, args, train_dataset=steps, lr_factor=schedule, isolation=[Way("position_ids")])
    trainer.add_callback(clock_callback(job, clock, lambda: trainer.target_tokens_seen))
    trainer.train()
    kept = is_text(documents.tokens.read(0, index.num_tokens), tokenizer)  # pack_concat leaves out the end only
    first = int(kept[index.piece_starts].sum())
    return trainer.causal_lm, Audit(kept=int(kept.sum()), targets_of_epoch=int(kept.sum()) - first, schedule=name)


def _our_schedule(name: str, num_steps: int, warmup_steps: int) -> Callable[[int], float]:
    """With WSD the recipe's default: a stable stretch, then a fifth of the run down to zero."""
    from hfpretrain.training.schedule import lr_factor, resolve_steps

    fraction = 0.2 if name == "warmup_stable_decay" else None
    _, decay_steps = resolve_steps(num_steps=num_steps, decay_fraction=fraction)
    return partial(lr_factor, schedule=name, num_steps=num_steps, warmup_steps=warmup_steps, decay_steps=decay_steps)


if __name__ == "__main__":
    main()
