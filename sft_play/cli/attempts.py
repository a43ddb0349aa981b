"""A run from its start to its end: one attempt, or several where it can go on by itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.cli.run_start import say, where_to_start
from sft_play.config.schema import Config
from sft_play.errors import ExitCode, GenerationMemoryError, OutOfMemoryError
from sft_play.launch.execute import Screen, execute
from sft_play.launch.spec import WorkerInputs, launch_spec
from sft_play.plan.build import Plan
from sft_play.record.amendments import (
    Amendment,
    LossesOnly,
    SmallerBatch,
    amended,
    append_amendment,
    read_amendments,
    smaller_micro_batch,
)
from sft_play.record.checkpoints import step_of
from sft_play.record.run_dir import RunDir
from sft_play.record.run_record import append_event, read_exits

# How often a run over several machines goes on by itself after it lost one.
LOST_MACHINES = 5


@dataclass(frozen=True, kw_only=True)
class Start:
    """What every attempt begins with.

    Attributes:
        trust: load a checkpoint that its engine unpickles whoever wrote it.
        force: go on with a checkpoint of other settings.
    """

    model_path: Path
    splits: Mapping[str, Path]
    config_yaml: str
    trust: bool
    force: bool


def run_attempts(
    run: RunDir,
    config: Config,
    plan: Plan,
    stamp: dict[str, Any],
    start: Start,
    environ: Mapping[str, str],
    lock: int,
    screen: Screen | None = None,
) -> int:
    """Run the workers, and again from the last checkpoint after a lost machine or a micro-batch that did not fit.

    Returns:
        The run's exit code; its error lines are printed.
    """
    lost, again, out_of_memory = 0, False, ""
    while True:
        inputs = WorkerInputs(
            model_path=start.model_path,
            splits=start.splits,
            stamp=stamp,
            config_yaml=start.config_yaml,
            resume_from=where_to_start(run, config, stamp, trust=start.trust, force=start.force, again=again),
        )
        if out_of_memory:  # only now is it known which lines were taken back
            append_event(run.metrics, step_of(inputs.resume_from), "out_of_memory", out_of_memory)
            out_of_memory = ""
        if again or config.run.resume != "never":  # machine 0 may not have moved them away yet
            plan = with_amendments(run, plan)
        code, lines = execute(launch_spec(config, plan, run, inputs), run, environ, lock=lock, screen=screen)
        for line in lines:
            with suppress(BrokenPipeError):  # nobody listens any more; the code says it
                print(f"error: {line}", file=sys.stderr, flush=True)
        if code == ExitCode.RANK_FAILED and plan.nodes > 1 and lost < LOST_MACHINES:
            lost += 1
            say("a process was lost: going on from the last checkpoint once all machines are back")
        elif change := to_change(run, plan) if code == ExitCode.ENVIRONMENT else None:
            append_amendment(run, change)
            what = change.words(plan.micro_batch) if isinstance(change, SmallerBatch) else change.reason
            out_of_memory = what if isinstance(change, SmallerBatch) else ""
            say(f"{what}; going on from the last checkpoint")
        else:
            return code
        again = True


def with_amendments(run: RunDir, plan: Plan) -> Plan:
    """The plan as this run had to change it."""
    changed = amended(plan, read_amendments(run))
    if changed.micro_batch != plan.micro_batch:
        say(f"micro-batch {changed.micro_batch} instead of {plan.micro_batch}: memory ran out before")
    if changed.evaluation != plan.evaluation:
        say(f"evaluation loss: {changed.evaluation_reason}")
    return changed


def to_change(run: RunDir, plan: Plan) -> Amendment | None:
    """What to try after a rank ran out of memory; None where that was not the reason, or nothing is left to try.

    One process has halved its micro-batch in place, and other machines cannot be told.
    """
    kinds = {one.get("kind") for one in read_exits(run.launch)}
    if plan.nodes > 1:
        return None
    if GenerationMemoryError.__name__ in kinds and plan.evaluation != "loss":
        return LossesOnly(reason="generation ran out of memory")
    size = smaller_micro_batch(plan.micro_batch)
    if OutOfMemoryError.__name__ not in kinds or not size or plan.strategy == "single":
        return None
    return SmallerBatch(step=0, micro_batch=size, grad_accum=plan.grad_accum * plan.micro_batch // size)
