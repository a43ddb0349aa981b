"""How to start a run, as a value: a command line, additions to the environment, files to write."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.launch.deepspeed import render_deepspeed
from sft_play.plan.build import Plan
from sft_play.record.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """Everything `execute` does, decided beforehand.

    Attributes:
        node: number of this machine.
        alone: the process is the worker itself; a launcher of several says on its stderr what only the log needs.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[Path, str]
    alone: bool = True
    node: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkerInputs:
    """What the worker reads from run.json beside config and plan."""

    model_path: Path
    splits: Mapping[str, Path]
    stamp: Mapping[str, Any]
    config_yaml: str
    resume_from: Path | None = None
    longest_first: bool = False


WORKER = "sft_play.runtime.worker"


def alone(plan: Plan) -> bool:
    """Whether the worker needs no launcher: one process, and no engine that insists on a group."""
    return plan.world_size == 1 and not plan.strategy.startswith("zero")


def launch_argv(plan: Plan, run: RunDir) -> tuple[str, ...]:
    """The command line: the worker itself for one process, torchrun around it for several."""
    worker = ("-m", WORKER, str(run.run_json))
    if alone(plan):
        return (sys.executable, *worker)
    return (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={plan.world_size}",
        *worker,
    )


def engine_files(config: Config, plan: Plan, run: RunDir) -> dict[Path, str]:
    """The filled file of the engine that shards, where it wants one."""
    if plan.strategy.startswith("zero"):
        return {run.deepspeed_json: render_deepspeed(config, plan)}
    return {}


def launch_spec(config: Config, plan: Plan, run: RunDir, inputs: WorkerInputs) -> LaunchSpec:
    """The single-process launch of `plan`; the worker reads run.json and never plans again."""
    run_json = {
        "version": 1,
        "run": str(run.path.absolute()),
        "config": config.model_dump(mode="json"),
        "plan": asdict(plan),
        "stamp": dict(inputs.stamp),
        "model_path": str(inputs.model_path),
        "splits": {name: str(path) for name, path in inputs.splits.items()},
        "longest_first": inputs.longest_first,
        "resume_from": str(inputs.resume_from) if inputs.resume_from else None,
    }
    environment = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # Without a GPU deepspeed announces its choice of the CPU on every import; naming it keeps that quiet.
    environment |= {"DS_ACCELERATOR": "cpu"} if plan.device == "cpu" else {}
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(plan.device_uuids)
    return LaunchSpec(
        argv=launch_argv(plan, run),
        environment=environment,
        files={
            run.run_json: json.dumps(run_json, indent=2) + "\n",
            run.config_yaml: inputs.config_yaml,
            **engine_files(config, plan, run),
        },
        alone=alone(plan),
        node=config.dist.node_rank,
    )
