"""DeepSpeed's config as a value: the template of the stage, filled from the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sft_play.config.deepspeed_file import AUTO, KEY, OLD_OFFLOAD, read_deepspeed_file
from sft_play.config.json_text import line_of
from sft_play.config.schema import Config, TuningMode
from sft_play.config.values import show
from sft_play.errors import ConfigError
from sft_play.plan.build import Plan

TEMPLATES = Path(__file__).parents[2] / "deepspeed_configs"
# Sections that the config's own keys stand for once the file was read: the Trainer builds optimizer and schedule.
TAKEN_INTO_THE_CONFIG = ("optimizer", "scheduler", "gradient_allreduce_op")
# The optimizer is torch's, also where its state is offloaded, so that every strategy takes the same steps.
FIXED = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
# Where the file's word holds over ours.
USER_DECIDES = ("pin_memory",)


def template_of(config: Config, plan: Plan) -> Path:
    """The template that comes nearest to a plan's stage and offload."""
    if plan.offload == "none" or plan.strategy == "zero1":
        return TEMPLATES / f"{plan.strategy}.json"
    if plan.strategy == "zero3" and config.dist.nvme_path is not None:
        return TEMPLATES / "zero3_nvme.json"
    return TEMPLATES / f"{plan.strategy}_offload.json"


def deepspeed_config(config: Config, plan: Plan) -> dict[str, Any]:
    """The whole config of a ZeRO run, from the user's file or else the template; nothing is left `auto`.

    Raises:
        ConfigError: the user's file says something else than the plan, which no key of the config stands for.
    """
    yours = config.dist.deepspeed_config is not None
    path = Path(config.dist.deepspeed_config or template_of(config, plan))
    values, text = read_deepspeed_file(path, KEY)
    written = {name: value for name, value in values.items() if name not in TAKEN_INTO_THE_CONFIG}
    zero = {name: value for name, value in written.pop("zero_optimization", {}).items() if name not in OLD_OFFLOAD}
    own_zero, own_precision = zero_section(config, plan), precision(config, plan)
    _keep_used_precision(written, own_precision, path, text)
    filled = _joined(written, {**FIXED, **engine_batch(config, plan), **own_precision}, path, text, yours=yours)
    for name in ("offload_optimizer", "offload_param"):
        if name not in own_zero:
            zero.pop(name, None)
    filled["zero_optimization"] = _joined(zero, own_zero, path, text, "zero_optimization", yours=yours)
    return filled


def _keep_used_precision(written: dict[str, Any], own: dict[str, Any], path: Path, text: str) -> None:
    """Leave out the sections of 16-bit weights that the plan does not use; `enabled` in them is a key of the config.

    Raises:
        ConfigError: such a section holds more, which would have no effect.
    """
    for name in ("bf16", "bfloat16", "fp16"):
        section, ours = written.pop(name, None) or {}, name.replace("bfloat16", "bf16")
        if own.get(ours, {}).get("enabled"):
            written[ours] = {**written.get(ours, {}), **section}
            continue
        more = [key for key, value in section.items() if key != "enabled" and value != AUTO]
        if more:
            raise ConfigError(
                f"{name}.{more[0]} has no effect: the plan trains no weights in this type",
                where=f"{path}:{line_of(text, name, more[0])}",
                fix="remove it",
            )


def zero_section(config: Config, plan: Plan) -> dict[str, Any]:
    """What the plan says of sharding, offload and prefetch."""
    section: dict[str, Any] = {"stage": int(plan.strategy.removeprefix("zero")), **offload_sections(config, plan)}
    if plan.strategy == "zero3" and config.dist.prefetch is False:
        section["stage3_prefetch_bucket_size"] = 0
    return section


def _joined(
    written: dict[str, Any], own: dict[str, Any], path: Path, text: str, *names: str, yours: bool
) -> dict[str, Any]:
    """The file's values with ours in place of every `auto`.

    Args:
        names: of the sections around them, for the place of an error.
        yours: it is the user's file, whose values are not replaced.

    Raises:
        ConfigError: both are there and differ.
    """
    result = {name: value for name, value in written.items() if value != AUTO}
    for name, ours in own.items():
        theirs = result.get(name)
        if isinstance(theirs, dict) and isinstance(ours, dict):
            result[name] = _joined(theirs, ours, path, text, *names, name, yours=yours)
        elif theirs is None or theirs == ours or name in USER_DECIDES:
            result[name] = ours if theirs is None else theirs
        elif yours:
            said = ".".join([*names, name])
            what = f"{said}: {show(theirs)} in the file, and the plan needs {show(ours)}"
            where = f"{path}:{line_of(text, *names, name)}"
            raise ConfigError(what, where=where, fix='write "auto", or change what the plan is made from')
        else:
            result[name] = ours
    for name, theirs in list(result.items()):
        if isinstance(theirs, dict) and name not in own and AUTO in theirs.values():
            result[name] = {key: value for key, value in theirs.items() if value != AUTO}
    return {name: value for name, value in result.items() if value != {}}


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
