"""How to start a run, as a value: a command line, additions to the environment, files to write."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.facts.backends import python_of
from sft_play.launch.accelerate import render_accelerate
from sft_play.launch.deepspeed import render_deepspeed
from sft_play.launch.nodes import Meeting, accelerate_options, meeting_of, torchrun_options
from sft_play.plan.build import Plan
from sft_play.record.run_dir import RunDir

WORKERS = {"bnb": "sft_play.runtime.worker", "unsloth": "sft_play.runtime.unsloth_worker"}
# It asks the hub which machines it runs on unless told not to, and rewrites trl's trainers unless told that no GPU is
# there: the run's own checks see to that, and the trainer stays the one that every backend has.
UNSLOTH_SETTINGS = {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_ALLOW_CPU": "1"}


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """Everything `execute` does, decided beforehand.

    Attributes:
        alone: the process is the worker itself; a launcher of several says on its stderr what only the log needs.
        timeout_seconds: how long several ranks may stand still.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[Path, str]
    alone: bool = True
    timeout_seconds: int = 1800


@dataclass(frozen=True, kw_only=True)
class WorkerInputs:
    """What the worker reads from run.json beside config and plan."""

    model_path: Path
    splits: Mapping[str, Path]
    stamp: Mapping[str, Any]
    config_yaml: str
    resume_from: Path | None = None
    longest_first: bool = False


def needs_launcher(plan: Plan) -> bool:
    """Whether a launcher starts the worker: for several processes, and for DeepSpeed, which wants to be told of one."""
    return plan.world_size > 1 or plan.strategy.startswith("zero")


def uses_accelerate(plan: Plan, meeting: Meeting) -> bool:
    """accelerate starts groups of GPUs; a group of CPUs it would not start whole, and restarts only torchrun offers."""
    return needs_launcher(plan) and plan.device == "cuda" and not meeting.restarts


def launch_argv(plan: Plan, run: RunDir, meeting: Meeting, backend: str = "bnb") -> tuple[str, ...]:
    """The command line: the worker itself for one process, else accelerate or torchrun around it.

    A launcher starts its workers with the interpreter that it runs in, so both are the backend's.
    """
    python, worker = python_of(backend), ("-m", WORKERS[backend], str(run.run_json))
    if not needs_launcher(plan):
        return (python, *worker)
    if uses_accelerate(plan, meeting):
        launcher = ("accelerate.commands.launch", "--config_file", str(run.accelerate_yaml))
        return (python, "-m", *launcher, *accelerate_options(meeting, processes=plan.world_size), *worker)
    options = torchrun_options(meeting, processes_here=plan.world_size // plan.nodes, run_id=run.path.name)
    return (python, "-m", "torch.distributed.run", *options, *worker)


def launch_environment(config: Config, plan: Plan, run: RunDir | None = None) -> dict[str, str]:
    """What is added to the environment; NCCL's, gloo's and torch's own variables pass through as they are."""
    environment = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # Without a GPU deepspeed announces its choice of the CPU on every import; naming it keeps that quiet.
    environment |= {"DS_ACCELERATOR": "cpu"} if plan.device == "cpu" else {}
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(plan.device_uuids)
    if config.tuning.backend == "unsloth":
        environment |= UNSLOTH_SETTINGS
        if run is not None:  # else it writes what it generates into the folder that the command is given in
            environment["UNSLOTH_COMPILE_LOCATION"] = str((run.launch / "unsloth").absolute())
    if config.dist.copy_engine_all_gather:
        environment["NCCL_CTA_POLICY"] = "2"  # zero CTAs: collectives in symmetric memory go over the copy engines
    if config.dist.copy_engine_send_recv:
        environment["NCCL_P2P_USE_CUDA_MEMCPY"] = "1"
    return environment


def engine_files(config: Config, plan: Plan, run: RunDir, meeting: Meeting) -> dict[Path, str]:
    """The filled files of accelerate and DeepSpeed, where they take part."""
    files = {run.deepspeed_json: render_deepspeed(config, plan)} if plan.strategy.startswith("zero") else {}
    if uses_accelerate(plan, meeting):
        files[run.accelerate_yaml] = render_accelerate(plan, meeting, run)
    return files


def command_line(argv: tuple[str, ...], environment: Mapping[str, str]) -> str:
    """The command as one could paste it into a shell, the environment's additions in front."""
    added = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*added, shlex.join(argv)])


def launch_spec(config: Config, plan: Plan, run: RunDir, inputs: WorkerInputs, *, restarts: int = 0) -> LaunchSpec:
    """The launch of `plan` on this machine; the worker reads run.json and never plans again.

    Args:
        restarts: how often processes may be started again after one was lost.

    Raises:
        ConfigError: the plan is for another number of machines than the config.
    """
    if plan.nodes != config.dist.num_nodes:
        what = f"{config.dist.num_nodes} machines are configured and {plan.nodes} planned"
        raise ConfigError(what, where="dist.num_nodes", fix="plan and train with the same NUM_NODES")
    meeting = meeting_of(config, restarts=restarts)
    run_json = {
        "version": 1,
        "run": str(run.path.absolute()),
        "node": run.node,
        "config": config.model_dump(mode="json"),
        "plan": asdict(plan),
        "stamp": dict(inputs.stamp),
        "model_path": str(inputs.model_path),
        "splits": {name: str(path) for name, path in inputs.splits.items()},
        "longest_first": inputs.longest_first,
        "resume_from": str(inputs.resume_from) if inputs.resume_from else None,
    }
    argv = launch_argv(plan, run, meeting, config.tuning.backend)
    environment = launch_environment(config, plan, run)
    return LaunchSpec(
        argv=argv,
        environment=environment,
        files={
            run.run_json: json.dumps(run_json, indent=2) + "\n",
            run.config_yaml: inputs.config_yaml,
            run.command_txt: command_line(argv, environment) + "\n",
            **engine_files(config, plan, run, meeting),
        },
        alone=not needs_launcher(plan),
        timeout_seconds=config.train.ddp_timeout or config.dist.timeout_seconds,
    )
