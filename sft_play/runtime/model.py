"""Load the base model and its tokenizer as the plan says, from local files only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig

from sft_play.config.schema import Config, TuningMode
from sft_play.data.template import load_text_tokenizer
from sft_play.errors import ModelError
from sft_play.plan.build import Plan
from sft_play.runtime.dist import Ranks

SHARDS_WEIGHTS = ("fsdp", "hsdp", "zero3")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def load_model(config: Config, plan: Plan, path: Path, ranks: Ranks) -> PreTrainedModel:
    """The base model on the plan's device, in the plan's type, 4-bit under `tuning.mode: qlora`.

    Raises:
        ModelError: weights are missing from the files or have other shapes than config.json says.
    """
    model, report = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=DTYPES[plan.dtype],
        attn_implementation=plan.attention,
        quantization_config=quantization(config, plan),
        **({"use_kernels": True} if plan.kernels == "hub" else {}),
        **placement(plan, ranks),
        trust_remote_code=config.model.trust_remote_code,
        output_loading_info=True,
        local_files_only=True,
    )
    keep_layout(model)
    repair_generation_config(model)
    for kind in ("missing_keys", "mismatched_keys"):
        if found := sorted(str(key) for key in report[kind]):
            raise ModelError(f"{len(found)} {kind.replace('_', ' ')}, first {found[0]}", where=str(path))
    return model


def placement(plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Where the weights go while they are read: to this rank's GPU, or to the host where they are sharded later."""
    if plan.strategy == "tp":
        return {"distributed_config": DistributedConfig(tp_size=plan.world_size)}
    if plan.strategy in ("fsdp", "hsdp"):
        return {"device_map": {"": "cpu"}}  # 4-bit weights would otherwise be read whole onto each GPU
    if plan.device == "cpu" or plan.strategy == "zero3":
        return {}
    return {"device_map": "sequential" if plan.strategy == "layer_split" else {"": ranks.local_rank}}


def repair_generation_config(model: PreTrainedModel) -> None:
    """Sampling settings beside `do_sample: false`, as some models ship them, would keep the result from being saved."""
    settings = model.generation_config
    try:
        settings.validate(strict=True)
    except ValueError:
        settings.do_sample = True
        print("note: the model's generation config names sampling settings without do_sample; it is set to true")


def keep_layout(model: torch.nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights in place at their first evaluation on an AVX512 CPU.

    Training would go on with another layout and kernel than before, and small shapes fail outright.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def quantization(config: Config, plan: Plan) -> BitsAndBytesConfig | None:
    """bitsandbytes' 4-bit settings under `qlora`, else None. Products are computed in the autocast type."""
    if config.tuning.mode is not TuningMode.QLORA:
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.tuning.quantization.type,
        bnb_4bit_use_double_quant=config.tuning.quantization.double,
        bnb_4bit_compute_dtype=DTYPES[plan.autocast],
        # FSDP2 leaves bytes whole on every rank; packed into the type of the other weights they are sharded too.
        bnb_4bit_quant_storage=storage(config, plan),
    )


def storage(config: Config, plan: Plan) -> torch.dtype:
    """The type that packed 4-bit values rest in."""
    asked = config.tuning.quantization.storage
    if asked == "uint8":
        return torch.uint8
    if asked != "auto":
        return DTYPES[asked]
    return DTYPES[plan.dtype] if plan.strategy in SHARDS_WEIGHTS else torch.uint8


def load_tokenizer(
    path: Path, chat_template: str | None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer, with the config's chat template, padding on the right with a token that is never learned.

    The template is a file or a built-in name, and is saved with the tokenizer. Padding is masked by position, so a
    pad token that equals the end of sequence does no harm.
    """
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    if chat_template is not None:
        tokenizer.chat_template = load_text_tokenizer(path, chat_template).need_template().source
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer
