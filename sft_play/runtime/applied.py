"""Check that what is applied is what was planned: parts of the stack fall back without a word."""

from __future__ import annotations

import torch
from bitsandbytes.nn import Linear4bit
from peft import PeftModel

from sft_play.config.schema import Config, TuningMode
from sft_play.errors import AppliedDiffersError
from sft_play.plan.build import Plan
from sft_play.runtime.model import DTYPES
from sft_play.runtime.trainer import SftPlayTrainer


def check_applied(trainer: SftPlayTrainer, config: Config, plan: Plan) -> dict[str, int]:
    """Compare wrapper, device, world size, quantised layers and trainable weights with the plan.

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
    if wrong:
        raise AppliedDiffersError("; ".join(wrong), where="start of training")
    return {
        "trainable_parameters": sum(weight.numel() for weight in trainable.values()),
        "parameters": sum(_count(weight) for weight in model.parameters()),
        "quantised_layers": len(quantised),
    }


def _difference(what: str, planned: object, applied: object) -> list[str]:
    return [] if planned == applied else [f"{what}: planned {planned}, applied {applied}"]


def _count(weight: torch.nn.Parameter) -> int:
    packed = getattr(weight, "quant_state", None)
    return packed.shape.numel() if packed is not None else weight.numel()
