"""DeepSpeed's config as a value: the template of the stage, filled from the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config, TuningMode
from sft_play.plan.build import Plan

TEMPLATES = Path(__file__).parents[2] / "deepspeed_configs"


def deepspeed_config(config: Config, plan: Plan) -> dict[str, Any]:
    """The whole config of a ZeRO run; nothing is left `auto`."""
    stage = int(plan.strategy.removeprefix("zero"))
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": stage > 1,
        "reduce_scatter": not config.dist.all_to_all_reduce,
    }
    if stage == 3:
        zero |= {"stage3_gather_16bit_weights_on_model_save": False, "stage3_param_persistence_threshold": 0}
        if config.dist.prefetch is False:
            zero["stage3_prefetch_bucket_size"] = 0
    place = (
        {"device": "nvme", "nvme_path": config.dist.nvme_path, "pin_memory": plan.device == "cuda"}
        if config.dist.nvme_path
        else {"device": "cpu", "pin_memory": plan.device == "cuda"}
    )
    if plan.offload != "none":
        zero["offload_optimizer"] = place
    if plan.offload == "params":
        zero["offload_param"] = place
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.grad_accum,
        "train_batch_size": plan.global_batch,
        "gradient_clipping": config.train.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        **precision(config, plan),
    }


def precision(config: Config, plan: Plan) -> dict[str, Any]:
    """Which engine-side precision stands for the plan's.

    Full fine-tuning: 16-bit weights with the engine's fp32 master copy, reduced and summed in fp32. Adapters: weights
    as they are and products under torch's autocast, so that the adapters stay fp32 as they do without the engine.
    """
    if plan.autocast == "fp32":
        return {}
    if config.tuning.mode is TuningMode.FULL:
        return {
            plan.autocast: {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        }
    return {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16" if plan.autocast == "bf16" else "float16"},
        plan.autocast: {"enabled": False},  # said, because accelerate would switch it on
    }


def render_deepspeed(config: Config, plan: Plan) -> str:
    """The config as the JSON that the engine reads."""
    return json.dumps(deepspeed_config(config, plan), indent=2) + "\n"
