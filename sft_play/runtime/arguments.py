"""trl's arguments from config and plan; HF's argument classes are built here and nowhere else."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.fsdp import MixedPrecisionPolicy
from trl import SFTConfig

from sft_play.config.schema import Config, TuningMode
from sft_play.plan.build import Plan
from sft_play.record.run_dir import RunDir
from sft_play.runtime.dist import timeout_seconds
from sft_play.runtime.fused import LIGER_LAYERS
from sft_play.runtime.model import DTYPES
from sft_play.runtime.trackers import PROJECT

# Batches that a streamed run tokenises ahead.
AHEAD = 16
# The older name is deprecated; unsloth's environment has a transformers that knows no other.
NAMES = {field.name for field in fields(SFTConfig)}
CHECKPOINTING = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in NAMES)
SCHEDULER_SETTINGS = {"cosine_with_min_lr": {"min_lr_rate": 0.1}}


def sharded_precision(config: Config, plan: Plan) -> MixedPrecisionPolicy:
    """What FSDP2 gathers and reduces in: fp32 weights are gathered in the autocast type, adapters as they are.

    accelerate's own policy also casts activations between layers and reduces in 16 bits, which is another curve.
    """
    gathered = DTYPES[plan.autocast] if config.tuning.mode is TuningMode.FULL and plan.dtype == "fp32" else None
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)


def best_metric(config: Config) -> str | None:
    """The metric that picks the best checkpoint; the evaluation loss where one is needed and none is named."""
    train = config.train
    needed = train.load_best_model_at_end or train.early_stopping_patience is not None
    return train.metric_for_best_model or ("eval_loss" if needed else None)


def build_arguments(config: Config, plan: Plan, run: RunDir, *, has_validation: bool) -> SFTConfig:
    """trl's arguments from config and plan. Everything that the stack would decide by itself is set."""
    train = config.train
    return SFTConfig(
        output_dir=str(run.path),
        run_name=run.path.name,
        project=PROJECT,
        use_cpu=plan.device == "cpu",
        seed=train.seed,
        full_determinism=train.deterministic,
        average_tokens_across_devices=True,
        save_strategy=train.save_strategy,
        save_steps=train.save_steps,
        save_total_limit=None,  # rotation is ours
        restore_callback_states_from_checkpoint=True,
        logging_steps=train.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # it would log a NaN loss as 0.0
        report_to="none",  # the trackers are callbacks of ours
        disable_tqdm=True,
        **step_arguments(config, plan),
        **layer_arguments(config, plan),
        **row_arguments(config, plan),
        **evaluation_arguments(config, plan, has_validation=has_validation),
        **ddp_arguments(config),
        **engine_arguments(config, plan, run),
    )


def step_arguments(config: Config, plan: Plan) -> dict[str, Any]:
    """What a step is made of: its batch, the optimizer, the schedule, and how many there are."""
    train = config.train
    return {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.grad_accum,
        "num_train_epochs": train.epochs,
        "max_steps": train.max_steps or -1,
        "optim": plan.optimizer,
        "learning_rate": plan.learning_rate,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "adam_epsilon": train.adam_epsilon,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "lr_scheduler_type": train.scheduler,
        "lr_scheduler_kwargs": SCHEDULER_SETTINGS.get(train.scheduler),
        "warmup_steps": train.warmup,
    }


def layer_arguments(config: Config, plan: Plan) -> dict[str, Any]:
    """How the layers compute: precision, kernels, what is recomputed or put aside, noise."""
    train = config.train
    # Adapters under ZeRO are computed under the engine's own autocast; the Trainer's would make them 16-bit.
    trainer_casts = not (plan.strategy.startswith("zero") and config.tuning.mode is not TuningMode.FULL)
    return {
        "bf16": trainer_casts and plan.autocast == "bf16",
        "fp16": trainer_casts and plan.autocast == "fp16",
        "tf32": None if train.tf32 == "auto" else train.tf32,
        CHECKPOINTING: plan.gradient_checkpointing and plan.kernels != "unsloth",  # it has its own
        "activation_offloading": train.activation_offloading,
        "use_liger_kernel": plan.kernels == "liger",
        "liger_kernel_config": LIGER_LAYERS if plan.kernels == "liger" else None,
        "neftune_noise_alpha": train.neftune_noise_alpha,
    }


def row_arguments(config: Config, plan: Plan) -> dict[str, Any]:
    """How rows, which come prepared, reach the model."""
    train, streaming = config.train, config.data.streaming
    return {
        "dataloader_num_workers": 1 if streaming else train.dataloader_num_workers,
        "dataloader_pin_memory": plan.pin_memory,
        "dataloader_persistent_workers": train.dataloader_persistent_workers,
        "dataloader_prefetch_factor": train.dataloader_prefetch_factor or (AHEAD if streaming else None),
        "dataloader_drop_last": train.dataloader_drop_last,
        "ignore_data_skip": streaming,  # the stream itself begins where the run goes on
        "max_length": None,  # rows come cut to length
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }


def evaluation_arguments(config: Config, plan: Plan, *, has_validation: bool) -> dict[str, Any]:
    """When and how to evaluate, and what the best checkpoint is."""
    train = config.train
    strategy = train.eval_strategy
    if strategy == "auto":
        strategy = "epoch" if has_validation else "no"
    return {
        "per_device_eval_batch_size": plan.eval_batch,
        "eval_strategy": strategy,
        "eval_steps": train.eval_steps,
        "eval_on_start": train.eval_on_start and has_validation,
        "eval_accumulation_steps": train.eval_accumulation_steps,
        "eval_do_concat_batches": train.eval_do_concat_batches,
        "prediction_loss_only": True,
        "metric_for_best_model": best_metric(config),
        "greater_is_better": train.greater_is_better,
    }


def ddp_arguments(config: Config) -> dict[str, Any]:
    """torch's DistributedDataParallel, and how long a collective may take."""
    train = config.train
    return {
        "ddp_timeout": timeout_seconds(config),
        "ddp_find_unused_parameters": train.ddp_find_unused_parameters,
        "ddp_bucket_cap_mb": train.ddp_bucket_cap_mb,
        "ddp_broadcast_buffers": train.ddp_broadcast_buffers,
        "ddp_static_graph": train.ddp_static_graph,
    }


def engine_arguments(config: Config, plan: Plan, run: RunDir) -> dict[str, Any]:
    """What makes the Trainer shard: FSDP2 (also over a mesh of copies), DeepSpeed, or nothing."""
    if plan.strategy.startswith("zero"):
        return {"deepspeed": str(run.deepspeed_json)}
    if plan.strategy == "tp":
        return {"save_only_model": True}  # the optimizer's shards are saved by the trainer's own method
    if plan.strategy not in ("fsdp", "hsdp"):
        return {}
    fsdp = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True,
        "cpu_offload": plan.offload == "params",
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "FULL_STATE_DICT",
    }
    # Else whole gradients would be kept between the micro-batches of a step, which the plan does not count, and torch
    # stumbles over units without a gradient.
    each = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    if plan.sharding_factor is None:
        return {"fsdp": True, "fsdp_config": fsdp, **each}
    mesh = ParallelismConfig(
        dp_replicate_size=plan.world_size // plan.sharding_factor, dp_shard_size=plan.sharding_factor
    )
    return {"fsdp": True, "fsdp_config": fsdp, "parallelism_config": mesh, **each}
