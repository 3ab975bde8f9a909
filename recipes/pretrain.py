"""Pretrain any Hugging Face causal language model on packed documents, token-exact and resumable.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/pretrain.py \\
        --config recipes/configs/demo.yaml --output_dir runs/demo

The same command continues a run that was killed. Everything that contradicts is listed before the first step.
README.md has the recipe table with measured figures; `--help` explains every option.
"""

from __future__ import annotations

import bz2
import lzma
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import logging

from hfpretrain.arguments import parse
from hfpretrain.data.collator import PackedBlocks, PackedCollator
from hfpretrain.data.documents import load_documents
from hfpretrain.data.order import BlockOrder
from hfpretrain.data.packing import pack_best_fit, pack_concat
from hfpretrain.data.spans import iter_texts
from hfpretrain.data.steps import TrainingSteps
from hfpretrain.data.tokenizer import load_tokenizer
from hfpretrain.errors import ConfigError, refuse
from hfpretrain.model import build_model, load_config, load_model, parameter_count
from hfpretrain.preflight import check_data, check_model, check_start, model_notes
from hfpretrain.run_record import write_run_json
from hfpretrain.training.checkpoints import resume_point
from hfpretrain.training.evaluation import evaluation_windows
from hfpretrain.training.schedule import lr_factor
from hfpretrain.training.throughput import token_flops
from hfpretrain.training.trainer import PretrainTrainer

TOKENIZER_TRAINING_BYTES = 256 * 2**20  # more text hardly changes which merges are frequent
SAMPLE_TOKENS = 120


def main(argv: list[str] | None = None) -> None:
    # 1. What is asked for, and everything about it that cannot work.
    model_args, data_args, args = parse(argv)
    run = check_start(data_args, args)
    set_seed(args.seed)
    say = partial(print, flush=True) if args.process_index == 0 else lambda *_: None
    say(f"plan      {run}")
    output_dir = Path(str(args.output_dir))
    checkpoint = resume_point(args.resume_from_checkpoint, output_dir)

    # 2. Text -> tokens, once; packing is an index over them.
    cache_dir = Path(data_args.cache_dir)
    texts = iter_texts(
        data_args.dataset,
        text_column=data_args.text_column,
        validation_fraction=data_args.validation_fraction,
        max_bytes=TOKENIZER_TRAINING_BYTES,
    )
    tokenizer_name = model_args.tokenizer_name or model_args.model_name_or_path or model_args.config_name
    tokenizer = load_tokenizer(str(tokenizer_name), texts=texts, cache_dir=cache_dir)
    train, validation, report = load_documents(
        data_args.dataset,
        tokenizer,
        text_column=data_args.text_column,
        validation_fraction=data_args.validation_fraction,
        cache_dir=cache_dir,
        num_proc=data_args.preprocessing_num_workers,
    )
    say(f"data      {report}")
    pack = pack_best_fit if data_args.packing == "best_fit" else pack_concat
    index = pack(train.lengths, data_args.sequence_length)
    say(f"packing   {data_args.packing}: {index.num_blocks:,} rows, {index.utilisation:.2%} of their positions used")

    # 3. Configuration -> model, the same initial weights on any number of devices.
    config = load_config(
        model_type=model_args.model_type,
        config_name=model_args.config_name,
        config_overrides=model_args.config_overrides,
        model_name_or_path=model_args.model_name_or_path,
        tokenizer=tokenizer,
    )
    problems, notes = check_data(
        num_blocks=index.num_blocks,
        num_validation_documents=len(validation),
        run=run,
        data_args=data_args,
        args=args,
    )
    refuse(problems + check_model(config, tokenizer, data_args, args))
    for note in notes + model_notes(config):
        say(f"note      {note}")
    attention = model_args.attn_implementation
    if model_args.model_name_or_path:
        model = load_model(model_args.model_name_or_path, config=config, attn_implementation=attention)
    else:
        model = build_model(config, seed=args.seed, attn_implementation=attention)
    say(f"model     {type(model).__name__}, {parameter_count(model):,} parameters")

    # 4. One item of the data is one optimizer step; its number is all a resume needs.
    collator = PackedCollator(isolate_documents=data_args.isolate_documents)
    steps = TrainingSteps(
        PackedBlocks(train, index),
        BlockOrder(index.num_blocks, seed=args.data_seed if args.data_seed is not None else args.seed),
        batch_tokens=run.batch_tokens,
        sequence_length=run.sequence_length,
        per_device_train_batch_size=args.per_device_train_batch_size,
        rank=args.process_index,
        world_size=args.world_size,
        collator=collator,
        num_steps=run.num_steps,
    )
    fingerprint = {
        "data": report.fingerprint,
        "packing": data_args.packing,
        "sequence_length": run.sequence_length,
        "batch_tokens": run.batch_tokens,
        "data_seed": args.data_seed if args.data_seed is not None else args.seed,
        "isolate_documents": data_args.isolate_documents,
    }
    trainer = PretrainTrainer(
        model,
        args,
        train_dataset=steps,
        eval_dataset=evaluation_windows(validation, run.sequence_length) if len(validation) else None,
        lr_factor=partial(
            lr_factor,
            schedule=args.lr_scheduler_type,
            num_steps=run.num_steps,
            warmup_steps=run.warmup_steps,
            decay_steps=run.decay_steps,
            decay_shape=args.decay_shape,
            min_lr_ratio=args.min_lr_ratio,
        ),
        isolation=collator if data_args.isolate_documents else None,
        fingerprint=fingerprint,
        flops=token_flops(
            model,
            sequence_length=run.sequence_length,
            piece_lengths=index.piece_lengths,
            isolate_documents=data_args.isolate_documents,
        ),
        tokenizer=tokenizer,
    )
    if args.process_index == 0:
        write_run_json(
            output_dir,
            model_args=model_args,
            data_args=data_args,
            args=args,
            data_fingerprint=report.fingerprint,
            model_parameters=parameter_count(model),
            plan=run.as_dict(),
        )

    # 5. Train, score the held-out text, save a plain Hugging Face model.
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.save_model()
    if len(validation):
        metrics = trainer.evaluate()
        say(f"held out  {metrics['eval_bpb']:.4f} bits per byte, {metrics['eval_loss']:.4f} nats per token")
        text = "".join(report.validation_texts()).encode()
        for name, packed in (("xz -9", lzma.compress(text, preset=9)), ("bz2", bz2.compress(text))):
            say(f"          {8 * len(packed) / len(text):.4f} bits per byte: {name} on the same {len(text):,} bytes")
    if args.process_index == 0:
        write_sample(output_dir)


def write_sample(output_dir: Path) -> None:
    """Load what was saved, as anybody would, and let it write."""
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    model = AutoModelForCausalLM.from_pretrained(output_dir)
    start = tokenizer.bos_token if tokenizer.bos_token is not None else tokenizer.eos_token
    prompt = tokenizer(start, return_tensors="pt", add_special_tokens=False)
    tokens = model.generate(**prompt, max_new_tokens=SAMPLE_TOKENS, do_sample=True, temperature=0.8, top_k=50)
    sample = str(tokenizer.decode(tokens[0], skip_special_tokens=True))
    (output_dir / "sample.txt").write_text(sample)
    print(f"sample    {output_dir / 'sample.txt'}\n{sample}\n", flush=True)


if __name__ == "__main__":
    logging.set_verbosity_warning()
    try:
        main()
    except ConfigError as error:
        sys.exit(str(error))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
