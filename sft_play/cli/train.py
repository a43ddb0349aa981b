"""`make train`: check, locate, prepare, plan, launch."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from sft_play.cli.inputs import config_path
from sft_play.cli.measured import measured_of
from sft_play.cli.options import Options
from sft_play.config.dump import render_config
from sft_play.config.inputs import INPUTS_OF
from sft_play.config.resolve import Resolved, overrides, resolve
from sft_play.config.rules import refuse_unavailable
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, DiskFullError, EnvironmentProblem, ExitCode, Preempted, ResumeRefusedError
from sft_play.facts.calibration import append_measured
from sft_play.facts.data import DataFacts
from sft_play.facts.locate import locate_model
from sft_play.facts.model import read_model_facts
from sft_play.facts.probe import probe_hardware
from sft_play.facts.shapes import ModelFacts
from sft_play.launch.execute import execute
from sft_play.launch.spec import WorkerInputs, launch_spec
from sft_play.plan.build import Plan, PlanInputs, choose, make_plan
from sft_play.plan.disk import estimate_run_bytes
from sft_play.plan.select import ZERO, allowed_layouts, select_gpus
from sft_play.plan.settings import Placement
from sft_play.record.checkpoints import newest_first, newest_good, step_of
from sft_play.record.run_dir import RunDir, locked, run_name
from sft_play.record.run_record import read_record, trim_metrics
from sft_play.record.stamp import make_stamp


@dataclass(frozen=True, kw_only=True)
class Command:
    """What sets one of the training commands apart from the others.

    Attributes:
        default_count: GPUs taken where `dist.gpus` is silent; None for all.
        placements: strategies to choose from; empty for all.
    """

    name: str
    default_count: int | None = None
    placements: tuple[Placement, ...] = ()


ACCELERATE = tuple(placement for placement in Placement if placement not in ZERO)
COMMANDS = {
    command.name: command
    for command in (
        Command(name="train", default_count=1),
        Command(name="train-distributed", placements=ACCELERATE),
        Command(name="train-deepspeed", placements=ZERO),
    )
}


def main(argv: Sequence[str], environ: Mapping[str, str], name: str = "train") -> int:
    """Train one config to its end and print what came out.

    Raises:
        SftPlayError: anything that is wrong before the worker starts; the worker's own errors are printed
            and given as the exit code.
    """
    command = COMMANDS[name]
    Options(prog=f"make {name}", description=__doc__).parse_args(argv)
    signal.signal(signal.SIGTERM, stop_before_start)
    resolved = resolve(config_path(environ), environ, inputs=INPUTS_OF[name])
    refuse_unavailable(resolved)
    announce(resolved)
    config = resolved.config
    hardware = select_gpus(probe_hardware(environment=environ), config.dist.gpus, default_count=command.default_count)
    model = locate_model(config.model.name, config.model.revision, trust_remote_code=config.model.trust_remote_code)
    facts = read_model_facts(str(model.path))
    plan_inputs = PlanInputs(
        config=config, hardware=hardware, facts=facts, only=allowed_layouts(config, command.placements)
    )
    choose(plan_inputs)  # what contradicts itself comes out before the data is read
    run = RunDir(Path(config.run.output_dir) / run_name(config_path(environ).stem, config))
    run.create()
    with locked(run) as lock:
        refuse_finished(run, config)
        check_disk(run, config, facts)
        prepared = prepare_data(config, model.path)
        plan = make_plan(replace(plan_inputs, data=prepared.facts))
        for reason in plan.reasons:
            say(reason)
        check_rows(config, facts, prepared.facts, plan)
        stamp = make_stamp(config, plan, prepared.facts.fingerprint, model.identity())
        start_from = where_to_start(run, config, stamp)
        inputs = WorkerInputs(
            model_path=model.path,
            splits=prepared.splits,
            stamp=stamp,
            config_yaml=render_config(resolved),
            resume_from=start_from,
        )
        code, lines = execute(launch_spec(config, plan, run, inputs), run, environ, lock=lock)
        for line in lines:
            print(f"error: {line}", file=sys.stderr)
    if code == ExitCode.DONE:
        summarise(run)
        measured = measured_of(config, plan, read_record(run) or {})
        append_measured(Path(config.run.output_dir) / ".cache", measured)
    return code


def stop_before_start(number: int, frame: FrameType | None) -> None:
    """SIGTERM while data is prepared: there is no state to save, and the cache keeps only what is whole."""
    raise Preempted("stopped before training began")


def announce(resolved: Resolved) -> None:
    """Print what the environment overrides, and every note and warning of the config."""
    for line in overrides(resolved):
        say(f"override: {line}")
    for note in resolved.notes:
        say(f"note: {note}")
    for warning in resolved.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def refuse_finished(run: RunDir, config: Config) -> None:
    """A finished run is never trained again unasked.

    Raises:
        ResumeRefusedError: it is finished and `run.resume` is not `never`.
    """
    record = read_record(run)
    if config.run.resume != "never" and record and record["outcome"] == "done":
        raise ResumeRefusedError(
            f"this run is finished (loss {record.get('eval_loss', record['train_loss']):.4f}, {record['result']}/)",
            where=str(run.path),
            fix="RUN_RESUME=never trains it anew; a changed setting starts another run",
        )


def where_to_start(run: RunDir, config: Config, stamp: dict[str, Any]) -> Path | None:
    """The checkpoint to go on from; None for a fresh start.

    Raises:
        ResumeRefusedError: no checkpoint is good, they are of another run, or `must` resume and there is none.
    """
    if config.run.resume == "never":
        if newest_first(run) or read_record(run):
            shelve(run)
        return None
    folder = newest_good(run, stamp, say)
    trim_metrics(run.metrics, step_of(folder))
    if folder is None and config.run.resume == "must":
        raise ResumeRefusedError("run.resume is must and there is no checkpoint", where=str(run.path))
    if folder:
        say(f"resuming from {folder}")
    return folder


def shelve(run: RunDir) -> None:
    """Move the earlier attempt aside under `.../earlier-N`: starting anew loses nothing."""
    number = 1 + len(list(run.path.glob("earlier-*")))
    shelf = run.path / f"earlier-{number}"
    shelf.mkdir()
    for entry in ("checkpoints", "tb", "adapter", "model", "metrics.jsonl", "record.json", "run.json", "run.log"):
        if (run.path / entry).exists():
            shutil.move(run.path / entry, shelf / entry)
    run.create()
    say(f"the earlier attempt lies in {shelf}")


def check_disk(run: RunDir, config: Config, facts: ModelFacts) -> None:
    """Refuse a run whose checkpoints cannot fit.

    Raises:
        DiskFullError: with the bytes needed and free.
    """
    needed, free = estimate_run_bytes(config, facts), shutil.disk_usage(run.path).free
    if needed > free:
        gib = 2**30
        raise DiskFullError(f"about {needed / gib:.1f} GiB are needed and {free / gib:.1f} free", where=str(run.path))


def check_rows(config: Config, facts: ModelFacts, data: DataFacts, plan: Plan) -> None:
    """What only the prepared rows show: positions that the model lacks, kernels that are not there, too few rows.

    Raises:
        ConfigError: naming the key.
        EnvironmentProblem: a package that the config asks for is not installed.
    """
    longest = max(split.longest for split in data.splits.values())
    if facts.max_positions and longest > facts.max_positions:
        raise ConfigError(
            f"a row has {longest} tokens and the model {facts.max_positions} positions",
            where="model.max_seq_len",
            fix=f"MODEL_MAX_SEQ_LEN={facts.max_positions} cuts longer rows",
        )
    if plan.attention.startswith("flash") and find_spec("flash_attn") is None:
        raise EnvironmentProblem("flash_attn is not installed", where="model.attention", fix="use sdpa or auto")
    rows = data.splits["train"].rows_kept
    if config.train.dataloader_drop_last and rows < plan.micro_batch:
        raise ConfigError(
            f"{rows} rows are fewer than one batch of {plan.micro_batch}",
            where="train.dataloader_drop_last",
            fix="set it to false, or lower train.batch_size",
        )


def prepare_data(config: Config, model_path: Path) -> Any:
    """Tokenise the rows, or take them from the cache."""
    from sft_play.data.prepare import prepare

    return prepare(config, model_path, Path(config.run.output_dir) / ".cache" / "tokens", say)


def summarise(run: RunDir) -> None:
    """What came out, where it lies, and what to do next."""
    record = read_record(run) or {}
    before, after = record.get("eval_loss_before"), record.get("eval_loss")
    if after is not None:
        change = f"{before:.4f} -> {after:.4f} ({after / before - 1:+.1%})" if before else f"{after:.4f}"
        say(f"held-out loss {change}")
    say(f"{record['steps']} steps in {record['seconds']:.0f} s, {record['tokens_per_second']:,.0f} tokens/s")
    say(f"result in {run.path / record['result']}")
    say(f"try it: make infer RUN={run.path}")


def say(text: str) -> None:
    print(text, flush=True)
