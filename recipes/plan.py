"""Know a run before it starts: steps, parameters, FLOPs, hours, memory, checkpoints, and what published laws say of it.

    python recipes/plan.py --config recipes/configs/model/llama_1b.yaml --total_tokens 20B --world_size 8 --device h100
    python recipes/plan.py --params 7B --total_tokens 1T --batch_tokens 8_388_608 --sequence_length 4096 \\
        --per_device_train_batch_size 4 --world_size 64 --save_steps 1000 --warmup_steps 2000 --explain

Takes every file and flag of pretrain.py, with the same meaning and defaults, and a few of its own (`--help`). The first
line is the plan that such a run prints. Nothing is trained, no data is read, nothing is written.
"""

from __future__ import annotations

import json
import sys

from hfpretrain.arguments.planning import read_plan
from hfpretrain.errors import ConfigError
from hfpretrain.planning import compute
from hfpretrain.planning.figures import Section, plan_table
from hfpretrain.planning.flops import peak_flops
from hfpretrain.planning.law_figures import batch_figures, law_notes, rate_figures, size_figures
from hfpretrain.run_plan import (
    as_json,
    check_plan,
    checkpoint_figures,
    memory_figures,
    memory_of,
    model_facts,
    run_figures,
    run_notes,
)


def main(argv: list[str] | None = None) -> None:
    # 1. What is asked for, everything about it that cannot work, and the model, counted without memory.
    request = read_plan(argv)
    run, config = check_plan(request)
    values = request.values
    model = model_facts(values, config)
    estimate = memory_of(values, run, config)

    # 2. The figures, each with its unit, formula and source.
    costs = [] if model.cost is None else compute.token_figures(model.cost)
    costs += compute.compute_figures(
        parameters=model.active,
        total_tokens=run.total_tokens,
        world_size=values.world_size,
        peak_flops=peak_flops(values.device) or 0.0,
        mfu=values.mfu,
        cost_of_token=model.cost,
        gradient_checkpointing=values.gradient_checkpointing,
        price_per_device_hour=values.price_per_device_hour,
    )
    size = {"parameters": model.active, "tokens": run.total_tokens}
    inner_flops = model.inner_flops(run.total_tokens)
    rates = rate_figures(
        **size,
        batch_tokens=run.batch_tokens,
        learning_rate=values.learning_rate,
        width=model.width,
        mup_base_width=values.mup_base_width,
        inner_parameters=model.inner_parameters,
        inner_flops=inner_flops,
    )
    batches = batch_figures(
        **size, batch_tokens=run.batch_tokens, noise_scale_points=values.points, inner_flops=inner_flops
    )
    memory, memory_notes = memory_figures(values, run, estimate)
    sections = [
        Section("Run", tuple(run_figures(values, run))),
        Section("Parameters", tuple(compute.parameter_figures(model.parameters, model.parts, tied=model.tied))),
        Section("Compute", tuple(costs)),
        Section("Memory of one rank", tuple(memory)),
        Section("Optimizers side by side", tuple(estimate.optimizer_figures())),
        Section("Checkpoints", tuple(checkpoint_figures(values, run, model.parameters))),
        Section("Size and data", tuple(size_figures(**size, inference_tokens=values.inference_tokens))),
        Section("Batch", tuple(batches)),
        Section("Learning rate", tuple(rates)),
    ]
    notes = run_notes(values, run, model) + memory_notes
    notes += law_notes(**size, rates=rates, inference_tokens=values.inference_tokens)

    # 3. For programs, or for people.
    if values.json:
        print(json.dumps({"plan": str(run), "figures": as_json(sections), "notes": notes}, indent=2))
        return
    print(f"plan      {run}\n\n{plan_table(sections, explain=values.explain)}\n")
    for note in notes:
        print(f"note      {note}")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(str(error))
