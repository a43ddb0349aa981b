"""DeepSpeed's config as a value: the template of the stage, filled from the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sft_play.config.json_text import parse_json
from sft_play.config.schema import Config, TuningMode
from sft_play.plan.build import Plan

TEMPLATES = Path(__file__).parents[2] / "deepspeed_configs"


def template_of(config: Config, plan: Plan) -> Path:
    """The template that comes nearest to a plan's stage and offload."""
    if plan.offload == "none" or plan.strategy == "zero1":
        return TEMPLATES / f"{plan.strategy}.json"
    if plan.strategy == "zero3" and config.dist.nvme_path is not None:
        return TEMPLATES / "zero3_nvme.json"
    return TEMPLATES / f"{plan.strategy}_offload.json"


def deepspeed_config(config: Config, plan: Plan) -> dict[str, Any]:
    """The whole config of a ZeRO run; nothing is left `auto`."""
    values: dict[str, Any] = parse_json(template_of(config, plan).read_text(encoding="utf-8"))
    zero = values["zero_optimization"]
    wanted = offload_sections(config, plan)
    for name in ("offload_optimizer", "offload_param"):
        zero.pop(name, None)
    zero |= wanted
    if plan.strategy == "zero3" and config.dist.prefetch is False:
        zero["stage3_prefetch_bucket_size"] = 0
    for name in ("bf16", "fp16"):
        values.pop(name)
    return values | {**engine_batch(config, plan), **precision(config, plan)}


def engine_batch(config: Config, plan: Plan) -> dict[str, Any]:
    """The batch and the clipping, in the engine's names."""
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.grad_accum,
        "train_batch_size": plan.global_batch,
        "gradient_clipping": config.train.max_grad_norm,
    }


def offload_sections(config: Config, plan: Plan) -> dict[str, Any]:
    """Where the optimizer and the weights rest, where not on the GPU."""
    place: dict[str, Any] = {"device": "cpu", "pin_memory": plan.device == "cuda"}
    if config.dist.nvme_path is not None and plan.strategy == "zero3":
        place |= {"device": "nvme", "nvme_path": config.dist.nvme_path}
    sections = {}
    if plan.offload != "none":
        sections["offload_optimizer"] = place
    if plan.offload == "params":
        sections["offload_param"] = dict(place)
    return sections


def precision(config: Config, plan: Plan) -> dict[str, Any]:
    """Which engine-side precision stands for the plan's.

    Full fine-tuning: 16-bit weights with the fp32 master copy of the engine, reduced and summed in fp32. Adapters: as
    they are, products under torch's autocast, so that they stay fp32 as they do without the engine.
    """
    if plan.autocast == "fp32":
        return {}
    if config.tuning.mode is TuningMode.FULL:
        return {
            plan.autocast: {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        }
    return {"torch_autocast": {"enabled": True, "dtype": "bfloat16" if plan.autocast == "bf16" else "float16"}}


def render_deepspeed(config: Config, plan: Plan) -> str:
    """The config as the JSON that the engine reads."""
    return json.dumps(deepspeed_config(config, plan), indent=2) + "\n"
