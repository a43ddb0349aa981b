"""accelerate's config file as a value: the template of the strategy, filled from the plan."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import SingleQuotedScalarString

from sft_play.launch.nodes import Meeting
from sft_play.plan.build import Plan
from sft_play.record.run_dir import RunDir

TEMPLATES = Path(__file__).parents[2] / "accelerate_configs"
MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def template_of(plan: Plan) -> Path:
    """The template of a plan's strategy: ZeRO has one for all stages, DDP serves wherever nothing is sharded."""
    if plan.strategy.startswith("zero"):
        return TEMPLATES / "deepspeed.yaml"
    return TEMPLATES / f"{plan.strategy if plan.strategy in ('fsdp', 'hsdp', 'tp') else 'ddp'}.yaml"


def accelerate_config(plan: Plan, meeting: Meeting, run: RunDir) -> Any:
    """The filled template, comments kept: a mapping as ruamel.yaml's round trip makes it.

    It says the same as the arguments that the worker builds for itself; two that differ would not be noticed.
    """
    filled = _yaml().load(template_of(plan).read_text(encoding="utf-8"))
    filled["num_processes"] = plan.world_size
    filled["use_cpu"] = plan.device == "cpu"
    filled["num_machines"] = meeting.nodes
    filled["machine_rank"] = meeting.node_rank
    filled["main_process_ip"] = meeting.address
    filled["main_process_port"] = meeting.port or 0
    if plan.strategy.startswith("zero"):
        filled["deepspeed_config"]["deepspeed_config_file"] = str(run.deepspeed_json.absolute())
        filled["deepspeed_config"]["zero3_init_flag"] = plan.strategy == "zero3"
    else:
        # Quoted: accelerate reads YAML 1.1, where a plain `no` is false.
        filled["mixed_precision"] = SingleQuotedScalarString(MIXED_PRECISION[plan.autocast])
    if plan.strategy in ("fsdp", "hsdp"):
        filled["fsdp_config"]["fsdp_offload_params"] = plan.offload == "params"
    if plan.strategy == "hsdp":
        shards = shards_of(plan)
        filled["parallelism_config"]["parallelism_config_dp_replicate_size"] = plan.world_size // shards
        filled["parallelism_config"]["parallelism_config_dp_shard_size"] = shards
    return filled


def shards_of(plan: Plan) -> int:
    """Ranks that share one copy of the weights under hybrid shard: as planned, else those of one machine."""
    return plan.sharding_factor or plan.world_size // plan.nodes


def render_accelerate(plan: Plan, meeting: Meeting, run: RunDir) -> str:
    """The file that `accelerate launch --config_file` reads."""
    text = io.StringIO()
    _yaml().dump(accelerate_config(plan, meeting, run), text)
    return text.getvalue()


def _yaml() -> YAML:
    yaml = YAML()
    yaml.width = 10_000  # a long path stays on its line
    yaml.preserve_quotes = True
    return yaml
