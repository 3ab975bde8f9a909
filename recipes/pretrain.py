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

from hfpretrain.attention import register_torch_varlen
from hfpretrain.data.collator import PackedBlocks, PackedCollator
from hfpretrain.data.documents import load_documents
from hfpretrain.data.order import BlockOrder
from hfpretrain.data.packing import pack_best_fit, pack_concat, pack_single
from hfpretrain.data.spans import iter_texts
from hfpretrain.data.steps import TrainingSteps
from hfpretrain.data.tokenizer import load_tokenizer
from hfpretrain.errors import ConfigError
from hfpretrain.launch_checks import check_agreement, close_process_group
from hfpretrain.model import build_model, load_config, load_model
from hfpretrain.mup.apply import apply
from hfpretrain.preflight import begin, check_model, isolation_ways, judge_text, model_notes, mup_spec, probes, reading
from hfpretrain.run_record import write_run_json
from hfpretrain.training.evaluation import evaluation_windows
from hfpretrain.training.run_length import batch_plan, schedule
from hfpretrain.training.throughput import token_flops
from hfpretrain.training.trainer import PretrainTrainer


def main(argv: list[str] | None = None) -> None:
    # 1. What is asked for, and everything about it that cannot work: one list, printed as it is found.
    start = begin(argv)
    model_args, data_args, args = start.model_args, start.data_args, start.args
    run, checkpoint, verdicts = start.run, start.checkpoint, start.verdicts
    output_dir, cache_dir = Path(str(args.output_dir)), Path(data_args.cache_dir)
    set_seed(args.seed)
    say = partial(print, flush=True) if args.process_index == 0 else lambda *_: None

    # 2. Text -> tokens, once; packing is an index over them.
    name = str(model_args.tokenizer_name or model_args.model_name_or_path or model_args.config_name)
    column, fraction = data_args.text_column, data_args.validation_fraction
    # For a trained tokenizer: more text hardly changes which byte pairs are frequent.
    sample = iter_texts(data_args.dataset, text_column=column, validation_fraction=fraction, max_bytes=2**25)
    workers = data_args.preprocessing_num_workers
    tokenised = partial(load_documents, text_column=column, cache_dir=cache_dir, num_proc=workers)
    with verdicts.timed("tokens"), reading(data_args.dataset, args):
        tokenizer = load_tokenizer(name, texts=sample, cache_dir=cache_dir)
        train, held_out, report = tokenised(data_args.dataset, tokenizer, validation_fraction=fraction)
        named = {
            key: tokenised([source], tokenizer, validation_fraction=0.0)[0]
            for key, source in data_args.eval_sources.items()
        }
    verdicts.refuse()
    pack = {"concat": pack_concat, "best_fit": pack_best_fit, "single": pack_single}[data_args.packing]
    index = pack(train.lengths, data_args.sequence_length)
    judge_text(verdicts, report, (train, held_out, named), index, run=run, data_args=data_args, args=args)

    # 3. Configuration -> model, the same initial weights on any number of devices.
    config = load_config(
        model_type=model_args.model_type,
        config_name=model_args.config_name,
        config_overrides=model_args.config_overrides,
        model_name_or_path=model_args.model_name_or_path,
        tokenizer=tokenizer,
    )
    same = check_agreement(checkpoint=checkpoint, length=run, data=report.fingerprint, config=config)
    verdicts.problem("model", check_model(config, tokenizer, data_args, args) + same)
    mup = verdicts.attempt("muP", mup_spec, config, model_args, args, tokenizer=tokenizer)
    register_torch_varlen()
    weights = model_args.model_name_or_path
    attention = None if model_args.attn_implementation == "auto" else model_args.attn_implementation
    if weights:
        model = load_model(weights, config=config, attn_implementation=attention)
    else:
        model = build_model(config, seed=args.seed, attn_implementation=attention)
    if mup is not None:
        apply(model, mup)
        verdicts.ok("muP", mup.explain())
    flops = token_flops(model, index, isolate_documents=data_args.isolate_documents)
    verdicts.ok("model", f"{type(model).__name__}, {flops}")
    for note in model_notes(config):
        verdicts.note("model", note)

    # 4. One item of the data is one optimizer step; its number is all a resume needs.
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
    windows = {key: evaluation_windows(text, run.sequence_length) for key, text in sets.items() if len(text)}

    parent = checkpoint.parent.resolve() if checkpoint else output_dir.resolve()
    record = partial(write_run_json, output_dir, model_args=model_args, data_args=data_args, args=args)
    record = partial(record, start_id=train.start_id, end_id=train.end_id, verdicts=verdicts)
    record = partial(record, parent=str(checkpoint) if parent != output_dir.resolve() else None)
    record = partial(record, plan=run.as_dict(), mup=None if mup is None else mup.as_dict())
    record = partial(record, data_fingerprint=report.fingerprint, model_parameters=flops.parameters)
    trainer = PretrainTrainer(
        model,
        args,
        train_dataset=steps,
        eval_dataset=windows or None,
        lr_factor=schedule(args, run, batches),
        tokenizer=tokenizer,
        isolation=isolation_ways(config, model_args, data_args),
        fingerprint={"data": report.fingerprint, "packing": data_args.packing, "order_seed": order_seed},
        flops=flops,
        z_loss_weight=args.z_loss_weight,
        log_noise_scale=args.log_noise_scale,
        skip_spikes=args.skip_spikes,
        mup=mup,
        probe=probes(args),
        verdicts=verdicts,
        on_checked=record if args.process_index == 0 else None,
    )
    trainer.check_resume(checkpoint)
    if args.preflight_only or verdicts.anywhere():
        trainer.check()
        verdicts.write()
        say(f"preflight {verdicts}; no step was made")
        return

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
    except ConfigError as error:
        # What all ranks found alike one of them says; what one alone stumbled over, that one.
        rank = os.environ.get("RANK", "0")
        sys.exit(str(error) if rank == "0" or not error.agreed else 1)
    finally:
        close_process_group()
