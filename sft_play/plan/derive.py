"""From a config to the settings that memory and speed are estimated for."""

from __future__ import annotations

from dataclasses import replace

from sft_play.config.schema import Config, TuningMode
from sft_play.errors import ConfigError
from sft_play.facts.data import DataFacts
from sft_play.facts.hardware import Gpu
from sft_play.plan.evaluation import evaluates
from sft_play.plan.fast import choose_attention, planned_kernels, planned_loss, refuse_without_device
from sft_play.plan.precision import choose_autocast, choose_dtype, name_of
from sft_play.plan.settings import Attention, Checkpointing, Method, Optimizer, Settings
from sft_play.plan.strategy import BatchRequest

OPTIMIZERS = {
    "adamw_torch": Optimizer.ADAMW,
    "adamw_torch_fused": Optimizer.ADAMW,
    "adamw_bnb_8bit": Optimizer.ADAMW_8BIT,
    "paged_adamw_32bit": Optimizer.PAGED_ADAMW,
    "paged_adamw_8bit": Optimizer.PAGED_ADAMW_8BIT,
    "adafactor": Optimizer.ADAFACTOR,
    "sgd": Optimizer.SGD,
}
# Compute capability of the first GPUs with TF32 (Ampere).
FIRST_WITH_TF32 = 8.0
ATTENTION = {
    "eager": Attention.EAGER,
    "sdpa": Attention.SDPA,
    "flash_attention_2": Attention.FLASH,
    "flash_attention_3": Attention.FLASH,
    "flex_attention": Attention.FLEX,
}


def settings_variants(
    config: Config, gpu: Gpu | None, data: DataFacts | None, model_type: str = ""
) -> tuple[Settings, ...]:
    """The run's settings but for batch and placement; under `gradient_checkpointing: auto` one without, one with.

    Args:
        model_type: the architecture, for kernels that know some only.

    Raises:
        ConfigError: the device lacks a precision, kernel or optimizer that the config asks for.
    """
    refuse_contradictions(config, gpu)
    dtype, _ = choose_dtype(config, gpu)
    autocast, _ = choose_autocast(config, gpu)
    optimizer = choose_optimizer(config, gpu)
    base = replace(
        shape_settings(config),
        seq_len=longest_row(config, data),
        padded=not config.data.packing and lengths_differ(data),
        packed=config.data.packing,
        flattened=config.data.packing and takes_lengths(config, gpu),
        param_dtype=dtype,
        compute_dtype=autocast,
        optimizer=OPTIMIZERS[optimizer],
        foreach=optimizer == "adamw_torch" and gpu is not None,
        attention=ATTENTION[choose_attention(config, gpu)],
        loss=planned_loss(config, gpu),
        kernels=planned_kernels(config, gpu, model_type),
        compile=config.train.torch_compile,
        fp8=config.train.fp8,
        offload_activations=config.train.activation_offloading,
        by_length=config.train.group_by_length,
        nvme=config.dist.nvme_path is not None,
        fsdp2=True,
        quantize_experts=False,  # stacked expert tensors are no linear layers; bitsandbytes leaves them 16-bit
        eval_micro_batch=1 if evaluates(config) else 0,
    )
    asked = config.train.gradient_checkpointing
    kinds = (Checkpointing.NONE, Checkpointing.FULL) if asked == "auto" else (_KINDS[asked],)
    return tuple(replace(base, checkpointing=kind) for kind in kinds)


def takes_lengths(config: Config, gpu: Gpu | None) -> bool:
    """Whether packed documents lie in one row and attention is told their lengths."""
    return config.tuning.backend == "unsloth" or choose_attention(config, gpu).startswith("flash")


def refuse_contradictions(config: Config, gpu: Gpu | None) -> None:
    """What the stack would refuse only once the model is loaded.

    Raises:
        ConfigError: naming the key.
        EnvironmentProblem: the device or the installation lacks it.
    """
    refuse_without_device(config, gpu)
    if "lm_head" in config.tuning.lora.target_modules:
        raise ConfigError(
            "the chunked loss multiplies by the head's own weights, so an adapter on lm_head would never be trained",
            where="tuning.lora.target_modules",
            fix="train it whole: TUNING_LORA_MODULES_TO_SAVE=lm_head",
        )
    if config.train.tf32 is True and (gpu is None or float(gpu.compute_capability or 0) < FIRST_WITH_TF32):
        raise ConfigError(f"{name_of(gpu)} has no TF32", where="train.tf32", fix="leave it at auto")


def shape_settings(config: Config) -> Settings:
    """What is trained, whatever the device: method and adapter shape."""
    lora = config.tuning.lora
    targets = lora.target_modules
    return Settings(
        method=Method(config.tuning.mode.value),
        micro_batch=1,
        seq_len=config.model.max_seq_len,
        double_quantized=config.tuning.quantization.double,
        lora_r=lora.r,
        lora_targets=(targets,) if isinstance(targets, str) else targets,
        dora=lora.use_dora and config.tuning.mode is not TuningMode.FULL,
    )


_KINDS = {True: Checkpointing.FULL, False: Checkpointing.NONE}


def batch_request(config: Config, data: DataFacts | None) -> BatchRequest:
    """What the config fixes of the batch, and the rows that fill it."""

    def fixed(value: int | str | None) -> int | None:
        return value if isinstance(value, int) else None

    train = config.train
    return BatchRequest(
        micro_batch=fixed(train.batch_size),
        grad_accum=fixed(train.grad_accum),
        global_batch=train.global_batch_size,
        rows=data.splits["train"] if data else None,
    )


def longest_row(config: Config, data: DataFacts | None) -> int:
    """Tokens of the longest row or pack that training will meet, for which memory is planned (see `plan.lengths`).

    `model.max_seq_len` where the data is not prepared yet, or streamed.
    """
    limit = config.model.max_seq_len
    if data is None or (split := data.splits["train"]).streamed:
        return limit
    return min(split.tokens if config.data.packing else split.longest, limit)


def lengths_differ(data: DataFacts | None) -> bool:
    """Whether a micro-batch may hold rows of different lengths; so it is taken to be before the data is prepared."""
    if data is None:
        return True
    split = data.splits["train"]
    return split.tokens != split.rows_kept * split.longest


def choose_optimizer(config: Config, gpu: Gpu | None) -> str:
    """The optimizer by transformers' name.

    Raises:
        ConfigError: a paged one without a GPU.
    """
    asked = config.train.optim
    if gpu is None and asked.startswith("paged"):
        raise ConfigError(f"{asked} pages GPU memory and needs a GPU", where="train.optim", fix="use adamw_torch")
    if asked == "auto":
        return "adamw_torch_fused" if gpu else "adamw_torch"
    return asked
