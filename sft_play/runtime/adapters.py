"""Put the configured adapter on a base model."""

from __future__ import annotations

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from sft_play.config.schema import Config
from sft_play.errors import ConfigError


def add_adapter(model: PreTrainedModel, config: Config) -> PeftModel:
    """The base model, frozen, with trainable LoRA matrices in fp32.

    Raises:
        ConfigError: a target module, or one to save, that the model does not have.
    """
    lora = config.tuning.lora
    parts = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    if absent := [name for name in lora.modules_to_save if name.rsplit(".", 1)[-1] not in parts]:
        raise ConfigError(
            f"this model has no module {absent[0]}",
            where="tuning.lora.modules_to_save",
            fix="its outer ones are embed_tokens and lm_head in most families",
        )
    all_linear = lora.target_modules == "all-linear"
    try:
        return get_peft_model(
            model,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=lora.r,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=lora.target_modules if all_linear else list(lora.target_modules),
                use_rslora=lora.use_rslora,
                use_dora=lora.use_dora,
                modules_to_save=list(lora.modules_to_save) or None,
            ),
        )
    except ValueError as error:
        linear = sorted({name.rsplit(".", 1)[-1] for name, part in model.named_modules() if is_linear(part)})
        raise ConfigError(
            str(error).split(". ")[0],
            where="tuning.lora",
            fix=f"this model's linear layers are {', '.join(linear)}",
        ) from error


def is_linear(module: torch.nn.Module) -> bool:
    """Also bitsandbytes' 4-bit layers, which derive from torch's."""
    return isinstance(module, torch.nn.Linear)


def train_in_fp32(model: torch.nn.Module) -> None:
    """Keep every trained weight in fp32: in 16 bits, steps much smaller than the weight round to nothing.

    trl casts a 4-bit model's adapters to bf16; this undoes it, so that lora and qlora train alike.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
