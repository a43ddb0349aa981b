"""What a device can compute in, and which type the weights rest in: decided with the reason in words."""

from __future__ import annotations

from sft_play.config.schema import Config, TuningMode
from sft_play.errors import ConfigError
from sft_play.facts.hardware import Gpu
from sft_play.plan.settings import Dtype


def choose_dtype(config: Config, gpu: Gpu | None) -> tuple[Dtype, str]:
    """(type of the weights, reason). Full fine-tuning keeps fp32 weights: bf16 ones lose small updates.

    Raises:
        ConfigError: bf16 weights on a GPU without bf16.
    """
    asked = config.model.dtype
    if asked == "bf16" and not has_bf16(gpu):
        raise ConfigError(f"{name_of(gpu)} has no bf16", where="model.dtype", fix="use fp16 or auto")
    if asked != "auto":
        return Dtype(asked), f"weights {asked}, as configured"
    if config.tuning.mode is TuningMode.FULL:
        return Dtype.FP32, "weights fp32: small updates are lost in 16 bits"
    if has_bf16(gpu):
        return Dtype.BF16, "weights bf16: frozen under the adapter"
    return Dtype.FP16, f"weights fp16: {name_of(gpu)} has no bf16"


def choose_autocast(config: Config, gpu: Gpu | None) -> tuple[Dtype, str]:
    """(type of mixed precision, reason); fp32 stands for none.

    Raises:
        ConfigError: bf16 or fp16 where the device lacks it.
    """
    train = config.train
    if train.fp16:
        if gpu is None:
            raise ConfigError("fp16 training needs a GPU", where="train.fp16", fix="use bf16 or auto")
        return Dtype.FP16, "mixed precision fp16, as configured"
    if train.bf16 is True and not has_bf16(gpu):
        raise ConfigError(f"{name_of(gpu)} has no bf16", where="train.bf16", fix="set train.fp16: true instead")
    if train.bf16 is False or config.model.dtype == "fp32":
        return Dtype.FP32, "no mixed precision"
    if has_bf16(gpu):
        return Dtype.BF16, "mixed precision bf16"
    return Dtype.FP16, f"mixed precision fp16: {name_of(gpu)} has no bf16"


def has_bf16(gpu: Gpu | None) -> bool:
    """bf16 units; a CPU runs it too, in software where it has none."""
    return gpu is None or gpu.bf16


def name_of(gpu: Gpu | None) -> str:
    return gpu.name if gpu else "CPU"
