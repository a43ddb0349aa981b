"""The keys that DeepSpeed's JSON file may hold, and what becomes of each here.

Read from deepspeed 0.19.8: `runtime/config.py` and `runtime/constants.py` (top level), `runtime/zero/config.py` and
`runtime/zero/offload_config.py` (under `zero_optimization`). DeepSpeed itself ignores an unknown top-level key.
"""

from __future__ import annotations

from collections.abc import Mapping

MAPPED: Mapping[tuple[str, ...], str] = {
    ("train_micro_batch_size_per_gpu",): "train.batch_size",
    ("gradient_accumulation_steps",): "train.grad_accum",
    ("train_batch_size",): "train.global_batch_size",
    ("gradient_clipping",): "train.max_grad_norm",
    ("bf16", "enabled"): "train.bf16",
    ("bfloat16", "enabled"): "train.bf16",
    ("fp16", "enabled"): "train.fp16",
    ("optimizer", "params", "lr"): "train.learning_rate",
    ("optimizer", "params", "eps"): "train.adam_epsilon",
    ("optimizer", "params", "weight_decay"): "train.weight_decay",
    ("scheduler", "params", "warmup_max_lr"): "train.learning_rate",
    ("scheduler", "params", "warmup_num_steps"): "train.warmup",
    ("scheduler", "params", "total_num_steps"): "train.max_steps",
}
"""Values that a key of the config has too: taken where nobody set the key, and equal to it where somebody did."""

OPTIMIZERS = {"adamw": "adamw_torch", "adam": "adamw_torch", "sgd": "sgd"}
"""DeepSpeed's names, lower case, and ours; `Adam` decouples its weight decay unless told otherwise, as AdamW does."""
SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
FIXED: Mapping[tuple[str, ...], object] = {
    ("optimizer", "params", "adam_w_mode"): True,
    ("optimizer", "params", "torch_adam"): True,
    ("scheduler", "params", "warmup_min_lr"): 0,
    ("scheduler", "params", "warmup_type"): "linear",
    ("scheduler", "params", "cos_min_ratio"): 0,
    ("gradient_allreduce_op",): "mean",
}
"""The one value that each of these may have: what is done here anyway."""
OPTIMIZER_PARAMS = ("lr", "betas", "eps", "weight_decay", "adam_w_mode", "torch_adam")
SCHEDULER_PARAMS = (
    "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps", "cos_min_ratio",
)  # fmt: skip

PASSED = (
    "zero_optimization", "bf16", "bfloat16", "fp16", "optimizer", "scheduler", "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps", "train_batch_size", "gradient_clipping", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
    "communication_data_type", "data_types", "torch_autocast", "prescale_gradients", "gradient_predivide_factor",
    "gradient_allreduce_op", "disable_allgather", "disable_python_gc", "aio", "comms_logger", "flops_profiler",
    "timers", "log_level",
)  # fmt: skip
"""Taken: into the config, or to the engine as they stand."""

REFUSED: Mapping[str, str] = {
    "activation_checkpointing": "set train.gradient_checkpointing",
    "amp": "set train.bf16 or train.fp16",
    "autotuning": "make plan chooses the stage and the batch",
    "checkpoint": "run.resume decides what is loaded",
    "comet": "set run.report_to",
    "compile": "set train.torch_compile",
    "compression_training": "tuning.mode: qlora trains over a 4-bit base",
    "csv_monitor": "set run.report_to",
    "curriculum_learning": "the order of the rows is train.seed's",
    "data_efficiency": "the order of the rows is train.seed's",
    "dataloader_drop_last": "set train.dataloader_drop_last",
    "datastates_ckpt": "checkpoints are written by this program",
    "eigenvalue": "it belongs to compression_training",
    "elasticity": "the global batch stays; torchrun restarts a lost process",
    "expert_parallel": "experts are not spread over GPUs",
    "hybrid_engine": "it is for generation in RLHF",
    "managed_gradient_accumulation": "the Trainer counts the micro-batches",
    "pipeline": "pipeline parallelism is not offered; dist.strategy: layer_split saves memory",
    "progressive_layer_drop": "it would train another model",
    "quantize_training": "tuning.mode: qlora trains over a 4-bit base",
    "seq_parallel_communication_data_type": "sequence parallelism is not offered",
    "sequence_parallel_size": "sequence parallelism is not offered",
    "sparse_attention": "set model.attention",
    "sparse_gradients": "embeddings have dense gradients here",
    "tensor_parallel": "set dist.strategy: tp and no DeepSpeed file",
    "tensorboard": "set run.report_to",
    "use_data_before_expert_parallelism": "experts are not spread over GPUs",
    "vocabulary_size": "the model's own config says it",
    "wandb": "set run.report_to",
    "weight_quantization": "tuning.mode: qlora trains over a 4-bit base",
}
"""Known to DeepSpeed and not to be had here, with what to do instead."""

ZERO = (
    "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "compute_grad_norm", "load_from_fp32_weights",
    "elastic_checkpoint", "offload_param", "offload_optimizer", "zenflow", "sub_group_size", "cpu_offload_param",
    "cpu_offload_use_pin_memory", "cpu_offload", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save", "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
    "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients",
    "parameter_alignment", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients", "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply",
    "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module",
)  # fmt: skip
ZERO_REFUSED: Mapping[str, str] = {
    "zenflow": "it updates some weights late, which is another curve",
    "zero_quantized_gradients": "it rounds the gradients to 4 bits, which is another curve",
    "zero_quantized_weights": "it rounds the weights to 8 bits, which is another curve",
    "zero_quantized_nontrainable_weights": "tuning.mode: qlora trains over a 4-bit base",
}
OFFLOAD = (
    "device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "pipeline_read",
    "pipeline_write", "fast_init", "ratio", "super_offload", "cpuadam_cores_perc",
)  # fmt: skip
