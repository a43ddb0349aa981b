"""Check that what is applied is what was planned: parts of the stack fall back without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from bitsandbytes.nn import Linear4bit
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from sft_play.config.schema import Config, TuningMode
from sft_play.errors import AppliedDiffersError
from sft_play.plan.build import Plan
from sft_play.runtime.communication import apply_communication
from sft_play.runtime.compiling import compiled_layers, decoder_layers
from sft_play.runtime.fused import applied_kernels, applied_loss, fp8_layers
from sft_play.runtime.model import DTYPES
from sft_play.runtime.trainer import SftPlayTrainer
from sft_play.runtime.unsloth import missing_layers


class AppliedCallback(TrainerCallback):
    """Checks the wrapped model once, before the first step."""

    def __init__(self, trainer: SftPlayTrainer, config: Config, plan: Plan) -> None:
        self.trainer, self.config, self.plan = trainer, config, plan
        self.counts: dict[str, Any] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        communication = apply_communication(self.trainer.model_wrapped, self.config)
        self.counts = {**check_wrapped(self.trainer, self.config, self.plan), "communication": communication}


def check_applied(trainer: SftPlayTrainer, config: Config, plan: Plan) -> dict[str, int]:
    """Compare device, world size, quantised layers and trainable weights with the plan, before anything is wrapped.

    Returns:
        Counts for the record: trainable and all parameters (a packed 4-bit byte holds two), quantised layers.

    Raises:
        AppliedDiffersError: naming everything that differs.
    """
    model = trainer.model
    wrong = [
        *_difference("processes", plan.world_size, trainer.accelerator.num_processes),
        *_difference("device", plan.device, trainer.args.device.type),
        *_difference("adapter", config.tuning.mode is not TuningMode.FULL, isinstance(model, PeftModel)),
        *_difference("micro-batch", plan.micro_batch, trainer.args.train_batch_size),
        *_difference("accumulation", plan.grad_accum, trainer.args.gradient_accumulation_steps),
    ]
    if plan.world_size > 1:
        wrong += _difference("backend", plan.backend, torch.distributed.get_backend())
    quantised = [module for module in model.modules() if isinstance(module, Linear4bit)]
    wrong += _difference("4-bit layers", config.tuning.mode is TuningMode.QLORA, bool(quantised))
    trainable = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if config.tuning.mode is TuningMode.FULL:
        frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        wrong += [f"{len(frozen)} frozen weights in a full fine-tuning, first {frozen[0]}"] if frozen else []
        wrong += _difference("weights", {DTYPES[plan.dtype]}, {weight.dtype for weight in trainable.values()})
    else:
        base = [name for name in trainable if "lora_" not in name and "modules_to_save" not in name]
        wrong += [f"{len(base)} base weights train beside the adapter, first {base[0]}"] if base else []
        wrong += _difference("adapter weights", {torch.float32}, {weight.dtype for weight in trainable.values()})
    _stop_if(wrong)
    return {
        "trainable_parameters": sum(_count(weight) for weight in trainable.values()),
        "parameters": sum(_count(weight) for weight in model.parameters()),
        "quantised_layers": len(quantised),
    }


def check_wrapped(trainer: SftPlayTrainer, config: Config, plan: Plan) -> dict[str, Any]:
    """Compare the wrapper, its shards and the dtypes of what is trained with the plan, once the model is wrapped.

    Returns:
        For the record: the wrapper's type, the ranks that share a copy of the weights, the trained numbers that this
        rank holds, and the attention, loss, kernels, compiled and fp8 layers that were found.

    Raises:
        AppliedDiffersError: naming everything that differs.
    """
    wrapped = trainer.model_wrapped
    wrong, shards = _CHECKS[plan.strategy](wrapped, plan)
    wrong += _fast(trainer, config, plan)
    trained = [weight for weight in wrapped.parameters() if weight.requires_grad]
    wanted = DTYPES[plan.dtype] if config.tuning.mode is TuningMode.FULL else torch.float32
    wrong += _difference("trained weights", {wanted}, {weight.dtype for weight in trained})
    if not trained:
        wrong.append("nothing is trained")
    _stop_if(wrong)
    return {
        "wrapper": type(wrapped).__name__,
        "shards": shards,
        "trained_numbers_here": sum(_local(weight) for weight in trained),
        "attention": plan.attention,
        "loss": plan.loss,
        "kernels": plan.kernels,
        "compiled_layers": compiled_layers(trainer.model),
        "fp8_layers": fp8_layers(trainer.model),
    }


def _fast(trainer: SftPlayTrainer, config: Config, plan: Plan) -> list[str]:
    """Attention, loss, kernels, compiled layers, fp8 and offloading, as the model has them when training begins."""
    model, train = trainer.model, config.train
    offloads = type(trainer.maybe_activation_offload_context).__name__ == "OffloadActivations"
    found, attention = list(decoder_layers(model)), model.config.get_text_config()._attn_implementation
    layers = len(found)
    if plan.kernels == "unsloth":
        special = missing_layers(found)
        recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        special += _difference("gradient checkpointing", plan.gradient_checkpointing, recomputes)
    else:
        special = _difference("attention", plan.attention, attention)
    return [
        *special,
        *_difference("loss", plan.loss, applied_loss(model, trainer.args.device)),
        *_difference("kernels", plan.kernels, applied_kernels(model)),
        *_difference("compiled layers", layers if train.torch_compile else 0, compiled_layers(model)),
        *_difference("fp8 layers", train.fp8, bool(fp8_layers(model))),
        *_difference("activation offloading", train.activation_offloading, offloads),
    ]


def _plain(wrapped: Any, plan: Plan) -> tuple[list[str], int]:
    sharded = [name for name, weight in wrapped.named_parameters() if isinstance(weight, DTensor)]
    wrong = [f"{sharded[0]} is sharded under {plan.strategy}"] if sharded else []
    if isinstance(wrapped, DistributedDataParallel):
        wrong.append(f"{plan.strategy} was planned and DDP applied")
    return wrong, 1


def _ddp(wrapped: Any, plan: Plan) -> tuple[list[str], int]:
    return _difference("wrapper", True, isinstance(wrapped, DistributedDataParallel)), 1


def _fsdp(wrapped: Any, plan: Plan) -> tuple[list[str], int]:
    """Every weight, frozen and packed ones too, lies on the planned mesh, and this rank holds its share of it only."""
    if not isinstance(wrapped, FSDPModule):
        return [f"FSDP2 was planned and {type(wrapped).__name__} applied"], 1
    shards = plan.sharding_factor or plan.world_size
    mesh = (plan.world_size // shards, shards) if plan.sharding_factor else (plan.world_size,)
    wrong = [
        f"{name} is not sharded over {mesh}"
        for name, weight in wrapped.named_parameters()
        if not (isinstance(weight, DTensor) and tuple(weight.device_mesh.shape) == mesh)
    ]
    return wrong[:1], shards


def _tensor_parallel(wrapped: Any, plan: Plan) -> tuple[list[str], int]:
    layers = [weight for name, weight in wrapped.named_parameters() if ".layers." in name and weight.dim() > 1]
    split = [one for one in layers if isinstance(one, DTensor) and one.to_local().numel() < one.numel()]
    return _difference("layer weights split", len(layers), len(split)), plan.world_size


def _zero(wrapped: Any, plan: Plan) -> tuple[list[str], int]:
    """The engine's stage and offload; under stage 3 every weight is partitioned."""
    import deepspeed

    if not isinstance(wrapped, deepspeed.DeepSpeedEngine):
        return [f"DeepSpeed was planned and {type(wrapped).__name__} applied"], 1
    stage = int(plan.strategy.removeprefix("zero"))
    wrong = [
        *_difference("ZeRO stage", stage, wrapped.zero_optimization_stage()),
        *_difference("ranks of the engine", plan.world_size, wrapped.dp_world_size),
        *_difference("optimizer offload", plan.offload != "none", bool(wrapped.zero_offload_optimizer())),
        *_difference("parameter offload", plan.offload == "params", bool(wrapped.zero_offload_param())),
    ]
    if stage == 3:
        whole = [name for name, weight in wrapped.named_parameters() if not hasattr(weight, "ds_tensor")]
        wrong += [f"{len(whole)} weights are not partitioned, first {whole[0]}"] if whole else []
    return wrong, plan.world_size


_CHECKS: dict[str, Callable[[Any, Plan], tuple[list[str], int]]] = {
    "single": _plain,
    "layer_split": _plain,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "hsdp": _fsdp,
    "tp": _tensor_parallel,
    "zero1": _zero,
    "zero2": _zero,
    "zero3": _zero,
}


def _stop_if(wrong: list[str]) -> None:
    if wrong:
        raise AppliedDiffersError("; ".join(wrong), where="start of training")


def _difference(what: str, planned: object, applied: object) -> list[str]:
    return [] if planned == applied else [f"{what}: planned {planned}, applied {applied}"]


def _count(weight: torch.nn.Parameter) -> int:
    """Numbers in a whole weight: a packed 4-bit byte holds two, a ZeRO-3 shard knows the whole one's size."""
    packed = getattr(weight, "quant_state", None)
    if packed is not None:
        return int(packed.shape.numel())
    return int(getattr(weight, "ds_numel", weight.numel()))


def _local(weight: torch.Tensor) -> int:
    if isinstance(weight, DTensor):
        return weight.to_local().numel()
    partition = getattr(weight, "ds_tensor", None)
    return partition.numel() if partition is not None else weight.numel()
