"""`make plan`: what fits, how fast, how long, and why; nothing is loaded, nothing is started."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sft_play.cli.inputs import config_path, planning_facts
from sft_play.cli.options import Options
from sft_play.config.inputs import INPUTS_OF
from sft_play.config.keys import VARIABLES
from sft_play.config.resolve import resolve
from sft_play.config.schema import Config
from sft_play.errors import DataError, SeveralErrors, UsageError, exit_code_of
from sft_play.facts.calibration import read_measured
from sft_play.facts.data import DataFacts
from sft_play.facts.hardware import Hardware, parse_hardware
from sft_play.facts.probe import probe_hardware
from sft_play.launch.nodes import Meeting
from sft_play.launch.spec import launch_argv
from sft_play.plan.build import Plan, PlanInputs
from sft_play.plan.explain import render_report, report_as_json
from sft_play.plan.precision import name_of
from sft_play.plan.report import make_report
from sft_play.plan.select import allowed_layouts, select_gpus
from sft_play.record.run_dir import RunDir, run_name

# Earlier runs that are shown under a plan.
SHOWN_RUNS = 3
# Where machines meet in an example; any free port does.
DEFAULT_PORT = 29500


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the plan of CONFIG on this machine, or on the one that HARDWARE describes.

    Raises:
        SftPlayError: the config, the machine or the model is not what it should be.
    """
    parser = Options(prog="make plan", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the plan for programs, see docs/plan.md")
    options = parser.parse_args(argv)
    calibrates = asks_to_calibrate(environ)
    resolved = resolve(config_path(environ), environ, distributed=True, inputs=INPUTS_OF["plan"])
    config = resolved.config
    hardware = machine(config, environ)
    facts = planning_facts(config)
    not_here, data = data_of_plan(config, hardware)
    inputs = PlanInputs(config=config, hardware=hardware, facts=facts, data=data, only=allowed_layouts(config))
    report = make_report(inputs)
    report = replace(report, warnings=(*not_here, *report.warnings))
    command = command_of(environ, report.plan)
    launcher = launcher_of(config, config_path(environ).stem, report.plan) if report.plan else ""
    if options.json:
        print(json.dumps(report_as_json(report, command, launcher), indent=2))
    else:
        print(render_report(report, command, launcher))
        if not inputs.hardware.described:
            show_measured(config, inputs)
    if report.refusal is None:
        if not calibrates:
            return 0
        from sft_play.cli.calibrate import calibrate

        return calibrate(resolved, environ)
    print(f"error: {report.refusal.line()}", file=sys.stderr)
    return exit_code_of(report.refusal)


def show_measured(config: Config, inputs: PlanInputs) -> None:
    """What earlier runs on this machine measured beside their plans."""
    earlier = read_measured(Path(config.run.output_dir) / ".cache", name_of(inputs.gpu))
    if earlier:
        print("\nmeasured on this machine")
        for one in earlier[-SHOWN_RUNS:]:
            print(f"  {one.line()}")


def asks_to_calibrate(environ: Mapping[str, str]) -> bool:
    """Whether CALIBRATE=1 asks for a few real steps.

    Raises:
        UsageError: together with HARDWARE, or any other value.
    """
    asked = environ.get("CALIBRATE", "")
    if asked in ("", "0"):
        return False
    if asked != "1":
        raise UsageError(f"CALIBRATE is {asked!r}", where="CALIBRATE", fix="CALIBRATE=1 runs steps on this machine")
    if environ.get("HARDWARE"):
        raise UsageError("CALIBRATE=1 runs steps on this machine", where="CALIBRATE", fix="leave HARDWARE out")
    return True


def machine(config: Config, environ: Mapping[str, str]) -> Hardware:
    """The GPUs that the run would take.

    Raises:
        UsageError: HARDWARE cannot be read.
        EnvironmentProblem: `dist.gpus` names a GPU that is not there.
    """
    described = environ.get("HARDWARE")
    if described:
        seen = parse_hardware(described)
    else:
        seen = replace(probe_hardware(environment=environ), nodes=config.dist.num_nodes)
    return select_gpus(seen, config.dist.gpus, default_count=None)


def data_of_plan(config: Config, hardware: Hardware) -> tuple[list[str], DataFacts | None]:
    """What to warn of the data, and their facts where they are prepared.

    A described machine may have files that are not here.

    Raises:
        DataError: a file is missing, or unreadable, on the very machine that the plan is for; or `SeveralErrors`.
    """
    from sft_play.data.sources import check_sources

    try:
        return check_sources(config), cached_data(config)
    except (DataError, SeveralErrors) as error:
        if not hardware.described:
            raise
        found = error.errors if isinstance(error, SeveralErrors) else [error]
        return [f"{one.where}: {one.what}; rows are taken as full" for one in found], None


def cached_data(config: Config) -> DataFacts | None:
    """Facts of the prepared data, where an earlier run left them and nothing changed since."""
    folder = Path(config.model.name).expanduser()
    if not folder.is_dir() or not (Path(config.run.output_dir) / ".cache").is_dir():
        return None
    from sft_play.data.prepare import read_cached_facts

    return read_cached_facts(config, folder, Path(config.run.output_dir) / ".cache" / "tokens")


def command_of(environ: Mapping[str, str], plan: Plan | None) -> str:
    """The make line that runs this plan, with the variables that it was made with."""
    name = "train" if plan is None or plan.strategy == "single" else "train-distributed"
    if plan and plan.strategy.startswith("zero"):
        name = "train-deepspeed"
    words = [f"{variable}={shlex.quote(environ[variable])}" for variable in sorted(environ) if variable in VARIABLES]
    if plan and plan.nodes > 1:
        several = {"NUM_NODES": plan.nodes, "NODE_RANK": "0", "MAIN_ADDRESS": "HOST", "MAIN_PORT": DEFAULT_PORT}
        words += [f"{one}={value}" for one, value in several.items() if one not in environ]
    return " ".join(["make", name, f"CONFIG={shlex.quote(environ.get('CONFIG', ''))}", *words])


def launcher_of(config: Config, stem: str, plan: Plan) -> str:
    """What that make line starts on this machine, or on the first of several."""
    dist = config.dist
    meeting = Meeting(
        nodes=plan.nodes,
        node_rank=dist.node_rank,
        address=dist.main_address or ("HOST" if plan.nodes > 1 else None),
        port=dist.main_port if isinstance(dist.main_port, int) else DEFAULT_PORT if plan.nodes > 1 else None,
    )
    run = RunDir(Path(config.run.output_dir) / run_name(stem, config), dist.node_rank)
    argv = launch_argv(plan, run, meeting, config.tuning.backend)
    return shlex.join([Path(argv[0]).name, *argv[1:]])
