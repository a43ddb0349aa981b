"""Names that other tools of the field use for our keys."""

from __future__ import annotations

from collections.abc import Mapping

OLD_NAMES: Mapping[str, str] = {
    "mode": "tuning.mode",
    "gpus": "dist.gpus",
    "num_gpus": "dist.gpus",
    "zero_level": "dist.zero_level",
    "zero_stage": "dist.zero_level",
    "lr": "train.learning_rate",
    "evaluation_strategy": "train.eval_strategy",
    "per_device_train_batch_size": "train.batch_size",
    "micro_batch_size": "train.batch_size",
    "per_device_eval_batch_size": "train.eval_batch_size",
    "gradient_accumulation_steps": "train.grad_accum",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "warmup_ratio": "train.warmup",
    "warmup_steps": "train.warmup",
    "lr_scheduler_type": "train.scheduler",
    "lr_scheduler": "train.scheduler",
    "optimizer": "train.optim",
    "adam_eps": "train.adam_epsilon",
    "gradient_clipping": "train.max_grad_norm",
    "grad_clip": "train.max_grad_norm",
    "label_smoothing_factor": "train.label_smoothing",
    "model_name_or_path": "model.name",
    "base_model": "model.name",
    "model_revision": "model.revision",
    "max_seq_length": "model.max_seq_len",
    "max_length": "model.max_seq_len",
    "sequence_len": "model.max_seq_len",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "lora_r": "tuning.lora.r",
    "lora_rank": "tuning.lora.r",
    "lora_alpha": "tuning.lora.alpha",
    "lora_dropout": "tuning.lora.dropout",
    "lora_target_modules": "tuning.lora.target_modules",
    "lora_modules_to_save": "tuning.lora.modules_to_save",
    "bnb_4bit_quant_type": "tuning.quantization.type",
    "bnb_4bit_use_double_quant": "tuning.quantization.double",
    "bnb_4bit_quant_storage": "tuning.quantization.storage",
    "train_file": "data.train",
    "validation_file": "data.validation",
    "test_file": "data.test",
    "sample_packing": "data.packing",
    "max_train_samples": "data.max_rows",
    "max_eval_samples": "train.eval_max_rows",
    "ddp_backend": "dist.sync_backend",
    "nnodes": "dist.num_nodes",
    "master_addr": "dist.main_address",
    "master_port": "dist.main_port",
    "deepspeed": "dist.deepspeed_config",
    "run_name": "run.name",
}
"""Old name -> key. It works at the top level of a file and in the key's own section, and says so."""

ADVICE: Mapping[str, str] = {
    "load_in_4bit": "set tuning.mode: qlora",
    "load_in_8bit": "8-bit bases are not offered; set tuning.mode: qlora",
    "use_peft": "set tuning.mode: lora",
    "fsdp": "set dist.strategy: fsdp",
    "use_liger_kernel": "set model.kernels: liger",
    "assistant_only_loss": "set data.loss_on: assistant",
    "completion_only_loss": "set data.loss_on: assistant",
    "train_on_inputs": "set data.loss_on: all, or assistant",
    "resume_from_checkpoint": "set run.resume: auto, never or must",
    "overwrite_output_dir": "set run.resume: never",
    "val_set_size": "set data.split.validation to a share below 1",
    "do_train": "make train trains; train.eval_strategy says when it evaluates",
    "do_eval": "make train trains; train.eval_strategy says when it evaluates",
    "auto_find_batch_size": "set train.batch_size: auto",
}
"""Foreign names with no key of the same meaning, and what to write instead."""


def fit_old_name(name: str, value: object) -> str:
    """What is wrong with a value under an old name that meant it differently; empty when it fits.

    `train.warmup` is a share below 1 and a count from 1 on, so a ratio of 1 would become one step.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "warmup_ratio" and number and not 0 <= float(str(value)) < 1:
        return "warmup_ratio must be from 0 to below 1"
    if name == "warmup_steps" and number and 0 < float(str(value)) < 1:
        return "warmup_steps must be a number of steps"
    return ""
