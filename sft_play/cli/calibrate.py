"""`make plan CALIBRATE=1`: a few real steps at the longest rows, and by how much plan and reality differ."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sft_play.cli.measured import measured_of
from sft_play.cli.run_start import check_backend, identities_of, say
from sft_play.cli.train import prepare_data
from sft_play.config.dump import render_config
from sft_play.config.origin import Resolved
from sft_play.config.rules import refuse_unavailable
from sft_play.facts.calibration import append_measured
from sft_play.facts.locate import locate_model
from sft_play.facts.model import read_model_facts
from sft_play.facts.probe import probe_hardware
from sft_play.launch.execute import execute
from sft_play.launch.spec import WorkerInputs, launch_spec
from sft_play.plan.build import PlanInputs, make_plan
from sft_play.plan.layouts import Layout
from sft_play.plan.select import select_gpus
from sft_play.plan.settings import Placement
from sft_play.record.run_dir import RunDir, locked
from sft_play.record.run_record import read_record
from sft_play.record.stamp import make_stamp

STEPS = 4
# In the first, memory is taken and kernels are chosen or compiled; in the second the allocator still settles.
WARM_UP_STEPS = 2


def calibrate(resolved: Resolved, environ: Mapping[str, str]) -> int:
    """Run the plan for a few micro-batches and print plan and reality side by side.

    Returns:
        0, or the exit code of the worker.

    Raises:
        SftPlayError: as `make train` would.
    """
    refuse_unavailable(resolved)
    quiet = {"max_steps": STEPS, "eval_strategy": "no", "eval_on_start": False, "save_strategy": "no"}
    quiet |= {"logging_steps": 1}  # the speed of single steps is read from the metrics
    quiet |= {"metric_for_best_model": None, "load_best_model_at_end": False, "early_stopping_patience": None}
    config = resolved.config.model_copy(update={"train": resolved.config.train.model_copy(update=quiet)})
    hardware = select_gpus(probe_hardware(environment=environ), config.dist.gpus, default_count=1)
    check_backend(config, hardware)
    model = locate_model(config.model.name, config.model.revision, trust_remote_code=config.model.trust_remote_code)
    prepared = prepare_data(config, model.path)
    facts = read_model_facts(str(model.path))
    plan = make_plan(
        PlanInputs(
            config=config,
            hardware=hardware,
            facts=facts,
            data=prepared.facts,
            only=(Layout(placement=Placement.SINGLE),),
        ),
        speed_at_longest=True,
    )
    plan = replace(plan, grad_accum=1, global_batch=plan.micro_batch)
    cache = Path(config.run.output_dir) / ".cache"
    run = RunDir(cache / "calibration")
    shutil.rmtree(run.path, ignore_errors=True)  # ours alone: nothing else writes below .cache
    run.create()
    inputs = WorkerInputs(
        model_path=model.path,
        splits={"train": prepared.splits["train"]},
        stamp=make_stamp(config, plan, identities_of(config, model, prepared.facts.fingerprint)),
        config_yaml=render_config(resolved),
        longest_first=True,
    )
    say(f"calibrating: {STEPS} steps of {plan.micro_batch} x {plan.seq_len} tokens")
    with locked(run) as lock:
        code, lines = execute(launch_spec(config, plan, run, inputs), run, environ, lock=lock)
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    record = read_record(run)
    if code == 0 and record:
        measured = measured_of(config, plan, record | {"tokens_per_second": settled_speed(run.metrics)})
        append_measured(cache, measured)
        say(measured.line())
    return code


def settled_speed(metrics: Path) -> float:
    """Tokens a second of the steps after the warm-up, from what metrics.jsonl keeps of each step."""
    events = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [one for one in events if one["event"] == "train"]
    first, last = steps[WARM_UP_STEPS - 1], steps[-1]
    tokens: float = last["num_tokens"] - first["num_tokens"]
    seconds: float = last["time"] - first["time"]
    return tokens / max(seconds, 1e-9)
