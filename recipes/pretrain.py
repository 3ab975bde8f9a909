"""Pretrain any Hugging Face causal language model on packed documents, token-exact and resumable.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/pretrain.py \\
        --config recipes/configs/demo.yaml --output_dir runs/demo

The same command continues a run that was killed. Everything that contradicts is listed before the first step.
README.md has the recipe table with measured figures; `--help` explains every option.
"""

from __future__ import annotations

import bz2
import lzma
import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hfpretrain.arguments import parse
from hfpretrain.attention import register_torch_varlen
from hfpretrain.data.collator import PackedBlocks, PackedCollator
from hfpretrain.data.documents import load_documents
from hfpretrain.data.order import BlockOrder
from hfpretrain.data.packing import pack_best_fit, pack_concat, pack_single
from hfpretrain.data.sources import SourceError
from hfpretrain.data.spans import iter_texts
from hfpretrain.data.steps import TrainingSteps
from hfpretrain.data.tokenizer import load_tokenizer
from hfpretrain.errors import ConfigError, refuse
from hfpretrain.launch_checks import check_agreement, close_process_group
from hfpretrain.model import build_model, load_config, load_model
from hfpretrain.mup.apply import apply
from hfpretrain.preflight import check_data, check_model, check_start, isolation_ways, model_notes, mup_spec
from hfpretrain.run_record import write_run_json
from hfpretrain.training.checkpoints import resume_point
from hfpretrain.training.evaluation import evaluation_windows
from hfpretrain.training.run_length import batch_plan, schedule
from hfpretrain.training.throughput import token_flops
from hfpretrain.training.trainer import PretrainTrainer


def main(argv: list[str] | None = None) -> None:
    # 1. What is asked for, and everything about it that cannot work.
    model_args, data_args, args = parse(argv)
    run = check_start(data_args, args)
    output_dir, cache_dir = Path(str(args.output_dir)), Path(data_args.cache_dir)
    checkpoint = resume_point(args.resume_from_checkpoint, output_dir)
    set_seed(args.seed)
    say = partial(print, flush=True) if args.process_index == 0 else lambda *_: None
    say(f"plan      {run}")

    # 2. Text -> tokens, once; packing is an index over them.
    column, fraction = data_args.text_column, data_args.validation_fraction
    # For a trained tokenizer: more text hardly changes which byte pairs are frequent.
    sample = iter_texts(data_args.dataset, text_column=column, validation_fraction=fraction, max_bytes=2**25)
    tokenizer_name = model_args.tokenizer_name or model_args.model_name_or_path or model_args.config_name
    tokenizer = load_tokenizer(str(tokenizer_name), texts=sample, cache_dir=cache_dir)
    workers = data_args.preprocessing_num_workers
    tokenised = partial(load_documents, text_column=column, cache_dir=cache_dir, num_proc=workers)
    train, held_out, report = tokenised(data_args.dataset, tokenizer, validation_fraction=fraction)
    named = {
        name: tokenised([source], tokenizer, validation_fraction=0.0)[0]
        for name, source in data_args.eval_sources.items()
    }
    pack = {"concat": pack_concat, "best_fit": pack_best_fit, "single": pack_single}[data_args.packing]
    index = pack(train.lengths, data_args.sequence_length)
    say(f"data      {report}")
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
        num_validation_documents=len(held_out),
        run=run,
        data_args=data_args,
        args=args,
        train=train,
        named=named,
    )
    same = check_agreement(checkpoint=checkpoint, length=run, data=report.fingerprint, config=config)
    refuse(problems + check_model(config, tokenizer, data_args, args) + same)
    mup = mup_spec(config, model_args, args, tokenizer=tokenizer)
    register_torch_varlen()
    weights = model_args.model_name_or_path
    attention = None if model_args.attn_implementation == "auto" else model_args.attn_implementation
    if weights:
        model = load_model(weights, config=config, attn_implementation=attention)
    else:
        model = build_model(config, seed=args.seed, attn_implementation=attention)
    if mup is not None:
        apply(model, mup)
        say(mup.explain())
    flops = token_flops(model, index, isolate_documents=data_args.isolate_documents)
    say(f"model     {type(model).__name__}, {flops}")
    for note in notes + model_notes(config):
        say(f"note      {note}")

    # 4. One item of the data is one optimizer step; its number is all a resume needs.
    isolation = isolation_ways(config, model_args, data_args)
    batches = batch_plan(args, run)
    order_seed = args.seed if args.data_seed is None else args.data_seed
    steps = TrainingSteps(
        PackedBlocks(train, index),
        BlockOrder(index.num_blocks, order_seed),
        batch_tokens=batches,
        sequence_length=run.sequence_length,
        per_device_train_batch_size=args.per_device_train_batch_size,
        rank=args.process_index,
        world_size=args.world_size,
        collator=PackedCollator(None),  # the trainer puts the one that isolates in its place
        num_steps=run.num_steps,
    )
    sets = {"": held_out} | named
    windows = {name: evaluation_windows(text, run.sequence_length) for name, text in sets.items() if len(text)}
    trainer = PretrainTrainer(
        model,
        args,
        train_dataset=steps,
        eval_dataset=windows or None,
        lr_factor=schedule(args, run, batches),
        tokenizer=tokenizer,
        isolation=isolation,
        fingerprint={"data": report.fingerprint, "packing": data_args.packing, "order_seed": order_seed},
        flops=flops,
        z_loss_weight=args.z_loss_weight,
        log_noise_scale=args.log_noise_scale,
        skip_spikes=args.skip_spikes,
        mup=mup,
    )
    if args.preflight_only:
        trainer.check()
        say("preflight nothing contradicts; no step was made")
        return
    if args.process_index == 0:
        record = partial(write_run_json, output_dir, model_args=model_args, data_args=data_args, args=args)
        record = partial(record, start_id=train.start_id, end_id=train.end_id)
        parent = str(checkpoint) if checkpoint and checkpoint.parent.resolve() != output_dir.resolve() else None
        record = partial(record, plan=run.as_dict(), parent=parent, mup=None if mup is None else mup.as_dict())
        record(data_fingerprint=report.fingerprint, model_parameters=flops.parameters)

    # 5. Train, save a plain Hugging Face model, score the held-out text.
    before = signal.signal(signal.SIGTERM, trainer.stop_after_step)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    signal.signal(signal.SIGTERM, before)
    if trainer.state.global_step < len(steps):
        say(f"stopped   after step {trainer.state.global_step}; the same command goes on from there")
        return
    trainer.save_model()
    trainer.save_state()
    if windows:
        metrics = trainer.evaluate()
        trainer.save_metrics("eval", metrics)
        for name in windows:
            bpb, loss = (metrics[f"eval_{name}_{key}" if name else f"eval_{key}"] for key in ("bpb", "loss"))
            say(f"held out  {bpb:.4f} bits per byte, {loss:.4f} nats per token{name and f': {name}'}")
    if len(held_out):
        original = "".join(report.validation_texts()).encode()
        for name, squeezed in (("xz -9", lzma.compress(original, preset=9)), ("bz2", bz2.compress(original))):
            bits = 8 * len(squeezed) / len(original)
            say(f"          {bits:.4f} bits per byte: {name} on the same {len(original):,} bytes")
    if args.process_index == 0:
        write_sample(output_dir)
    say("next      longer: a larger --total_tokens in a new --output_dir; your own text: --dataset FILES (README.md)")


def write_sample(output_dir: Path, max_new_tokens: int = 120) -> None:
    """Load what was saved, as anybody would, and let it write."""
    unset_hf_deepspeed_config()  # or transformers would partition this copy over ranks that have gone home
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    model = AutoModelForCausalLM.from_pretrained(output_dir)
    prompt = tokenizer(tokenizer.bos_token or tokenizer.eos_token, return_tensors="pt", add_special_tokens=False)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_new_tokens + 1
    length = min(positions, max_new_tokens + 1)
    tokens = model.generate(**prompt, max_length=length, do_sample=True, temperature=0.8, top_k=50)
    text = str(tokenizer.decode(tokens[0], skip_special_tokens=True))
    (output_dir / "sample.txt").write_text(text)
    print(f"sample    {output_dir / 'sample.txt'}:\n{text}\n", flush=True)


if __name__ == "__main__":
    # DeepSpeed calls collectives by names that torch 2.13 calls old, once per bucket and step.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*torch\.distributed\.\w+` is deprecated")
    try:
        main()
    except (ConfigError, SourceError) as error:
        sys.exit(str(error) if os.environ.get("RANK", "0") == "0" else 1)  # every rank found the same
    finally:
        close_process_group()
