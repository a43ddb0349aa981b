"""The plan of a run: every automatic value decided, with the reason beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sft_play.config.schema import Config, TuningMode
from sft_play.errors import ConfigError, EnvironmentProblem
from sft_play.facts.accelerator import CPU, Accelerator

# Micro-batch and global batch where the config leaves both open; common in guides for one GPU.
DEFAULT_MICRO_BATCH = 8
DEFAULT_GLOBAL_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will run. The worker applies it as it stands and checks that it was applied."""

    strategy: str
    world_size: int
    device: str
    device_name: str
    device_uuid: str
    micro_batch: int
    grad_accum: int
    global_batch: int
    dtype: str
    autocast: str
    attention: str
    optimizer: str
    gradient_checkpointing: bool
    pin_memory: bool
    reasons: tuple[str, ...]


def make_plan(config: Config, gpus: Sequence[Accelerator]) -> Plan:
    """Decide every `auto` of a single-process run.

    Raises:
        EnvironmentProblem: a GPU was asked for and none is there.
        ConfigError: the batch does not divide, or the device lacks a precision that the config asks for.
    """
    device = choose_device(config, gpus)
    micro_batch, grad_accum, batch_reason = solve_batch(config, world_size=1)
    dtype, dtype_reason = choose_dtype(config, device)
    autocast, autocast_reason = choose_autocast(config, device)
    checkpointing = config.train.gradient_checkpointing
    on_gpu = device.kind == "cuda"
    pin = config.train.dataloader_pin_memory
    return Plan(
        strategy="single",
        world_size=1,
        device=device.kind,
        device_name=device.name,
        device_uuid=device.uuid,
        micro_batch=micro_batch,
        grad_accum=grad_accum,
        global_batch=micro_batch * grad_accum,
        dtype=dtype,
        autocast=autocast,
        attention=_choose_attention(config, device),
        optimizer=_choose_optimizer(config, device),
        gradient_checkpointing=on_gpu if checkpointing == "auto" else checkpointing,
        pin_memory=on_gpu if pin == "auto" else pin,
        reasons=(f"device {device.name}", batch_reason, dtype_reason, autocast_reason),
    )


def choose_device(config: Config, gpus: Sequence[Accelerator]) -> Accelerator:
    """The GPU that `dist.gpus` names, the first one where it names none, the CPU where there is none.

    Raises:
        EnvironmentProblem: `dist.gpus` asks for a GPU that is not there.
    """
    asked = config.dist.gpus
    if asked is None or asked == "all" or asked == 0:
        return gpus[0] if gpus else CPU
    index = asked[0] if isinstance(asked, tuple) else 0
    if index < len(gpus):
        return gpus[index]
    seen = f"{len(gpus)} seen" if gpus else "no GPU is seen by NVML"
    raise EnvironmentProblem(
        f"GPU {index} was asked for and {seen}",
        where="dist.gpus",
        fix="remove dist.gpus to run on the CPU, or check the driver with nvidia-smi and CUDA_VISIBLE_DEVICES",
    )


def solve_batch(config: Config, *, world_size: int) -> tuple[int, int, str]:
    """(micro-batch, accumulation, the arithmetic in words); their product with `world_size` is the global batch.

    A global batch that the config states is met exactly; the default one is met as nearly as the rest allows.

    Raises:
        ConfigError: what is fixed does not divide the global batch.
    """
    train = config.train
    stated = train.global_batch_size
    total = stated or DEFAULT_GLOBAL_BATCH
    rows, rest = divmod(total, world_size)
    exact = [
        (m, a) for m in _choices(train.batch_size, rows) for a in _choices(train.grad_accum, rows) if m * a == rows
    ]
    small = [pair for pair in exact if pair[0] <= DEFAULT_MICRO_BATCH]
    if small and not rest:
        micro, accum = max(small)
    elif stated and exact and not rest:
        micro, accum = min(exact)
    elif stated:
        raise ConfigError(
            f"{stated} is not batch_size {train.batch_size} x grad_accum {train.grad_accum} x {world_size}",
            where="train.global_batch_size",
            fix="choose a multiple, or leave batch_size or grad_accum at auto",
        )
    else:
        fixed_accum = 1 if train.grad_accum == "auto" else train.grad_accum
        room = max(1, min(DEFAULT_MICRO_BATCH, rows // fixed_accum))
        micro = room if train.batch_size == "auto" else train.batch_size
        accum = max(1, rows // micro) if train.grad_accum == "auto" else train.grad_accum
    why = "as asked" if stated else "default" if micro * accum * world_size == total else "as configured"
    return micro, accum, f"global batch {micro * accum * world_size} = {micro} x {accum} x {world_size} ({why})"


def _choices(value: int | str, rows: int) -> list[int]:
    """A fixed value, or under `auto` every divisor of the rows that one rank takes in a step."""
    if isinstance(value, int):
        return [value]
    return [divisor for divisor in range(1, rows + 1) if rows % divisor == 0]


def choose_dtype(config: Config, device: Accelerator) -> tuple[str, str]:
    """(type of the weights, reason). Full fine-tuning keeps fp32 weights: bf16 ones lose small updates.

    Raises:
        ConfigError: bf16 weights on a GPU without bf16.
    """
    asked = config.model.dtype
    if asked == "bf16" and not device.has_bf16:
        raise ConfigError(f"{device.name} has no bf16", where="model.dtype", fix="use fp16 or auto")
    if asked != "auto":
        return asked, f"weights {asked}, as configured"
    if config.tuning.mode is TuningMode.FULL:
        return "fp32", "weights fp32: small updates are lost in 16 bits"
    if device.has_bf16:
        return "bf16", "weights bf16: frozen under the adapter"
    return "fp16", f"weights fp16: {device.name} has no bf16"


def choose_autocast(config: Config, device: Accelerator) -> tuple[str, str]:
    """(type of mixed precision, reason).

    Raises:
        ConfigError: bf16 or fp16 where the device lacks it.
    """
    train = config.train
    if train.fp16:
        if device.kind == "cpu":
            raise ConfigError("fp16 training needs a GPU", where="train.fp16", fix="use bf16 or auto")
        return "fp16", "mixed precision fp16, as configured"
    if train.bf16 is True and not device.has_bf16:
        raise ConfigError(f"{device.name} has no bf16", where="train.bf16", fix="set train.fp16: true instead")
    if train.bf16 is False or config.model.dtype == "fp32":
        return "fp32", "no mixed precision"
    if device.has_bf16:
        return "bf16", "mixed precision bf16"
    return "fp16", f"mixed precision fp16: {device.name} has no bf16"


def _choose_attention(config: Config, device: Accelerator) -> str:
    asked = config.model.attention
    if asked.startswith("flash") and device.kind == "cpu":
        raise ConfigError(f"{asked} needs a GPU", where="model.attention", fix="use sdpa or auto")
    return "sdpa" if asked == "auto" else asked


def _choose_optimizer(config: Config, device: Accelerator) -> str:
    asked = config.train.optim
    if device.kind == "cpu" and asked.startswith("paged"):
        raise ConfigError(f"{asked} pages GPU memory and needs a GPU", where="train.optim", fix="use adamw_torch")
    if asked == "auto":
        return "adamw_torch_fused" if device.kind == "cuda" else "adamw_torch"
    return asked
