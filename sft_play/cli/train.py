"""`make train`: check, locate, prepare, plan, launch."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from sft_play.cli.attempts import Start, run_attempts
from sft_play.cli.inputs import config_path
from sft_play.cli.measured import measured_of
from sft_play.cli.options import Options
from sft_play.cli.run_start import (
    check_backend,
    check_disk,
    check_nvme,
    check_rows,
    identities_of,
    refuse_finished,
    refuse_ignored,
    refuse_other_backend,
    say,
)
from sft_play.cli.screen import live_screen
from sft_play.cli.summary import summary_lines
from sft_play.cli.trackers import check_trackers
from sft_play.config.dump import render_config
from sft_play.config.inputs import INPUTS_OF
from sft_play.config.resolve import Resolved, overrides, resolve
from sft_play.config.rules import refuse_unavailable
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, ExitCode, Preempted
from sft_play.facts.calibration import append_measured
from sft_play.facts.hardware import Hardware
from sft_play.facts.locate import locate_model
from sft_play.facts.model import read_model_facts
from sft_play.facts.probe import probe_hardware, refuse_hidden_gpus
from sft_play.launch.processes import tie_to_parent
from sft_play.launch.tensorboard import tensorboard
from sft_play.plan.build import Plan, PlanInputs, choose, make_plan
from sft_play.plan.select import ZERO, allowed_layouts, select_gpus
from sft_play.plan.settings import Placement
from sft_play.record.checkpoints import newest_first
from sft_play.record.run_dir import RunDir, locked, run_name
from sft_play.record.run_record import read_record
from sft_play.record.stamp import make_stamp


@dataclass(frozen=True, kw_only=True)
class Command:
    """What sets one of the training commands apart from the others.

    Attributes:
        default_count: GPUs taken where `dist.gpus` is silent; None for all.
        placements: strategies to choose from where the config names none; empty for all.
        tensorboard: show the run while it lives.
    """

    name: str
    default_count: int | None = None
    placements: tuple[Placement, ...] = ()
    tensorboard: bool = False


ACCELERATE = tuple(placement for placement in Placement if placement not in ZERO)
COMMANDS = {
    command.name: command
    for command in (
        Command(name="train", default_count=1),
        Command(name="train-distributed", placements=ACCELERATE),
        Command(name="train-deepspeed", placements=ZERO),
        Command(name="train-distributed-tb", placements=ACCELERATE, tensorboard=True),
        Command(name="train-deepspeed-tb", placements=ZERO, tensorboard=True),
    )
}


def main(argv: Sequence[str], environ: Mapping[str, str], name: str = "train") -> int:
    """Train one config to its end and print what came out.

    Raises:
        SftPlayError: anything that is wrong before the worker starts; the worker's own errors are printed
            and given as the exit code.
    """
    command = COMMANDS[name]
    options = Options(prog=f"make {name}", description=__doc__)
    options.add_argument("--trust-checkpoint", action="store_true", help="load another user's DeepSpeed checkpoint")
    options.add_argument("--force", action="store_true", help="go on with a checkpoint of other settings or data")
    given = options.parse_args(argv)
    if "MAKELEVEL" in environ:  # whatever ends make ends the run, saved
        tie_to_parent()
    signal.signal(signal.SIGTERM, stop_before_start)
    distributed = command.default_count is None
    resolved = resolve(config_path(environ), environ, inputs=INPUTS_OF[name], distributed=distributed)
    refuse_unavailable(resolved)
    check_trackers(resolved.config, environ)
    announce(resolved)
    config = resolved.config
    run = RunDir(Path(config.run.output_dir) / run_name(config_path(environ).stem, config), node=config.dist.node_rank)
    hardware, only = hardware_for(config, command, environ), allowed_layouts(config, command.placements)
    if not run.run_json.is_file():  # nothing is there to be refused first: told before a model is fetched for nothing
        check_backend(config, hardware)
    model = locate_model(config.model.name, config.model.revision, trust_remote_code=config.model.trust_remote_code)
    plan_inputs = PlanInputs(
        config=config,
        hardware=hardware,
        facts=read_model_facts(str(model.path)),
        only=only,
    )
    choose(plan_inputs)  # what contradicts itself comes out before the data is read
    run.create()
    with locked(run) as lock, shown(command, config, run) as ready, live_screen(config.dist.node_rank) as screen:
        refuse_finished(run, config)
        refuse_other_backend(run, config)
        check_backend(config, plan_inputs.hardware)
        check_disk(run, config, plan_inputs.facts)
        prepared = prepare_data(config, model.path, screen.say if screen else say)
        report_data(run, config, prepared, model.path)
        plan = make_plan(replace(plan_inputs, data=prepared.facts))
        for reason in plan.reasons:
            say(reason)
        refuse_ignored(config, plan)
        check_nvme(config, plan)
        if command.placements and Placement(plan.strategy) not in command.placements:
            say(f"note: the config names {plan.strategy}, which make {other_command(command)} would choose from")
        check_rows(config, plan_inputs.facts, prepared.facts, plan)
        warn_of_written(run, config)
        identities = identities_of(config, model, prepared.facts.fingerprint)
        stamp = make_stamp(config, plan, replace(identities, data_before=prepared.fingerprint_before))
        ready()
        start = Start(
            model_path=model.path,
            splits=prepared.splits,
            config_yaml=render_config(resolved),
            trust=given.trust_checkpoint,
            force=given.force,
        )
        code = run_attempts(run, config, plan, stamp, start, environ, lock, screen)
    if config.dist.node_rank == 0:
        report = report_run(run)
        if code == ExitCode.DONE:
            finish(run, config, plan, report)
        elif report:
            say(f"report in {report}")
    return code


def other_command(command: Command) -> str:
    """The command that offers what this one does not."""
    pair = ("distributed", "deepspeed")
    mine, other = pair if pair[0] in command.name else pair[::-1]
    return command.name.replace(mine, other)


def hardware_for(config: Config, command: Command, environ: Mapping[str, str]) -> Hardware:
    """The GPUs, or CPU processes, that the run takes on each of its machines.

    Raises:
        EnvironmentProblem: a GPU that is asked for is not there, or one is there and cannot be used.
    """
    seen = probe_hardware(environment=environ)
    refuse_hidden_gpus(seen, environ)
    taken = select_gpus(seen, config.dist.gpus, default_count=command.default_count)
    if config.dist.gpus and not taken.gpus:
        many = "one process trains" if taken.cpu_processes == 1 else f"{taken.cpu_processes} processes train"
        print(f"warning: no GPU is there: {many} on the CPU", file=sys.stderr)
    return replace(taken, nodes=config.dist.num_nodes)


@contextmanager
def shown(command: Command, config: Config, run: RunDir) -> Iterator[Callable[[], None]]:
    """TensorBoard beside the run where the command asks for it; yields what to wait for before the first step.

    Raises:
        ConfigError: the run writes nothing for TensorBoard.
    """
    if not command.tensorboard or config.dist.node_rank:
        yield lambda: None
        return
    if "tensorboard" not in config.run.report_to:
        raise ConfigError(
            f"{command.name} shows TensorBoard and the run does not write for it",
            where="run.report_to",
            fix=f"add tensorboard, or use make {command.name.removesuffix('-tb')}",
        )
    with tensorboard(run.tensorboard, run.launch / "tensorboard.log", config.run.tensorboard_port, say) as ready:
        yield ready


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


def prepare_data(config: Config, model_path: Path, say: Callable[[str], None] = say) -> Any:
    """Tokenise the rows, or take them from the cache."""
    from sft_play.data.prepare import prepare

    return prepare(config, model_path, Path(config.run.output_dir) / ".cache" / "tokens", say)


def report_data(run: RunDir, config: Config, prepared: Any, model_path: Path) -> None:
    """Keep in the run's folder what `make data-check` shows of the data."""
    from sft_play.data.report_file import write_report

    if config.dist.node_rank == 0:
        write_report(run.data, config, prepared, model_path)


def warn_of_written(run: RunDir, config: Config) -> None:
    """Say which streamed files were written since the run began: only parts of them are compared."""
    from sft_play.data.prepare import streamed_after

    began = run.attempts / "001.json"
    if config.run.resume == "never" or not (newest_first(run) and began.is_file()):
        return
    if files := streamed_after(config, began.stat().st_mtime):
        more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
        what = f"{files[0]}{more} {'were' if more else 'was'} written after this run began"
        print(f"warning: data.train: {what}; only parts of streamed files are compared", file=sys.stderr)


def report_run(run: RunDir) -> Path | None:
    """Write report.html; a run is not less done without it."""
    try:
        from sft_play.report.page import write_report

        return write_report(run.path)
    except Exception as error:
        print(f"warning: no report was written ({type(error).__name__}: {error})", file=sys.stderr)
        return None


def finish(run: RunDir, config: Config, plan: Plan, report: Path | None) -> None:
    """Keep what was measured for later plans, and say what came out, where it lies, and what to do next."""
    record = read_record(run) or {}
    append_measured(Path(config.run.output_dir) / ".cache", measured_of(config, plan, record))
    for line in summary_lines(record, plan, run.path, report):
        say(line)
