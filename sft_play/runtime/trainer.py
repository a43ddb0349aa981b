"""The trainer: trl's SFTTrainer with the few methods overridden that docs/architecture.md lists.

HF's argument classes are built here and nowhere else.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from peft import PeftModel
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PrinterCallback, Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from sft_play.config.schema import Config, TuningMode
from sft_play.errors import LossNotFiniteError
from sft_play.plan.build import Plan
from sft_play.record.checkpoints import publish, rotate, staging_folder
from sft_play.record.run_dir import RunDir
from sft_play.runtime.adapters import train_in_fp32
from sft_play.runtime.collate import LENGTHS, REAL_TOKENS, PackCollator
from sft_play.runtime.dist import timeout_seconds
from sft_play.runtime.gather import gather_weights, scatter_weights, write_weights
from sft_play.runtime.job import Job
from sft_play.runtime.model import DTYPES
from sft_play.runtime.rows import SilentWhereEmpty, filled, repeat_no_row, silent_row
from sft_play.runtime.shards import SCHEDULER, load_optimizer_shard, save_optimizer_shard

# A pickle that nothing here ever reads, and a script that DeepSpeed copies beside its files.
NEVER_READ = ("training_args.bin", "zero_to_fp32.py")
# Strategies whose optimizer state lies in shards that each rank writes by itself.
KEEPS_SHARDS = ("fsdp", "hsdp", "tp")
# Batches that a streamed run tokenises ahead.
AHEAD = 16
SCHEDULER_SETTINGS = {"cosine_with_min_lr": {"min_lr_rate": 0.1}}


class SftPlayTrainer(SFTTrainer):
    """SFTTrainer with checkpoints that are whole or absent, an evaluation loss over tokens, and no NaN step."""

    _total_train_tokens: int

    def __init__(self, run: RunDir, stamp: dict[str, Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.run = run
        self.stamp = stamp
        self.save_limit: int | None = None
        self.loaded_step: int | None = None
        self.keeps_shards = False
        self._evaluated = torch.zeros(2, dtype=torch.float64)
        if isinstance(self.model, PeftModel):
            train_in_fp32(self.model)

    def get_train_dataloader(self) -> Any:
        return repeat_no_row(super().get_train_dataloader())

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if LENGTHS not in self._signature_columns:
            self._signature_columns.append(LENGTHS)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """trl's loss; of packs it would count the positions of one row as the tokens of all."""
        real, counted = inputs.pop(REAL_TOKENS, None), self._total_train_tokens
        found = super().compute_loss(model, inputs, *args, **kwargs)
        if real is not None:
            self._total_train_tokens = counted + int(self.accelerator.gather(real).sum()) // self._tp_size
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            raise LossNotFiniteError(f"the loss is {loss.item()}", where=f"step {self.state.global_step + 1}")
        return loss

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        # Under fp16 an infinite norm is the loss scaler's business: it skips the step and lowers the scale.
        if not self.args.fp16 and norm is not None and not math.isfinite(float(norm)):
            raise LossNotFiniteError(
                f"the gradient norm is {float(norm)}, before the step", where=f"step {self.state.global_step + 1}"
            )
        return norm

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        """One evaluation batch: its summed loss and its learned tokens are kept, logits never."""
        inputs = self._prepare_inputs(inputs)
        tokens = inputs["labels"][:, 1:].ne(-100).sum()
        with torch.no_grad(), self.compute_loss_context_manager():
            # Divided by one item the loss is the sum over tokens; it is scaled up by the ranks that see other rows.
            total = self.compute_loss(model, inputs, num_items_in_batch=torch.ones_like(tokens))
        total = total.double() / (self.accelerator.num_processes // self.get_tp_size())
        self._evaluated += torch.stack([total.cpu(), tokens.double().cpu()])
        return (total / tokens.clamp(min=1)).float(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """The upstream loop with the loss averaged over tokens, not batches; random state is left as it was."""
        self._evaluated.zero_()
        # Iterating a loader draws a random number; a run that evaluates must train like one that does not.
        gpus = [torch.cuda.current_device()] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        total, tokens = self.accelerator.reduce(self._evaluated.to(self.args.device)).tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = total / max(tokens, 1.0)
        return output

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Let the Trainer write into a staging folder, then publish it whole and rotate. All ranks write their part."""
        main, target = self.accelerator.is_main_process, self.args.output_dir
        staging = staging_folder(self.run, clear=main)
        self.accelerator.wait_for_everyone()
        self.args.output_dir = str(staging)
        try:
            Trainer._save_checkpoint(self, model, trial)  # not trl's: it would add a model card to every checkpoint
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)  # a half checkpoint must not go on filling a full disk
            raise
        finally:
            self.args.output_dir = target
        self.accelerator.wait_for_everyone()
        if main:
            (staged,) = (entry for entry in staging.iterdir() if entry.is_dir())
            for needless in NEVER_READ:
                (staged / needless).unlink(missing_ok=True)
            publish(self.run, staged, self.state.global_step, dict(self.stamp))
            rotate(self.run, self.save_limit, self.state.best_global_step)
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Gather the adapter or the weights, whatever they are sharded by; rank 0 writes them."""
        folder, main = Path(output_dir or self.args.output_dir), self.accelerator.is_main_process
        model = self.accelerator.unwrap_model(self.model)
        weights = gather_weights(model, keep=main)
        folder.mkdir(parents=True, exist_ok=True)  # the other ranks put their shards there
        if main:
            write_weights(model, weights, folder)
            self.processing_class.save_pretrained(str(folder))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        scatter_weights(self.accelerator.unwrap_model(model or self.model), Path(resume_from_checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Shards of DTensors are written by each rank; the rest is the Trainer's."""
        if not self.keeps_shards:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_optimizer_shard(self.optimizer.optimizer, Path(output_dir), self.args.process_index)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.keeps_shards:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_optimizer_shard(self.optimizer.optimizer, Path(checkpoint), self.args.process_index)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))


def build_trainer(
    job: Job, arguments: SFTConfig, model: Any, tokenizer: Any, callbacks: list[TrainerCallback]
) -> SftPlayTrainer:
    """The trainer for the job's prepared rows or packs."""
    held_out, rows = job.dataset("validation"), job.dataset("train")
    trainer = SftPlayTrainer(
        job.run,
        job.stamp,
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=filled(held_out, arguments.eval_batch_size, job.plan) if held_out is not None else None,
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    flat = job.plan.attention.startswith("flash")
    collator = PackCollator(trainer.data_collator, pad_id=tokenizer.pad_token_id, flat=flat)
    trainer.data_collator = SilentWhereEmpty(collator, silent_row(job.first_rows(rows)))
    # Where accelerate has left FSDP out, there is no plugin; the check at start says so.
    if plugin := getattr(trainer.accelerator.state, "fsdp_plugin", None):
        plugin.mixed_precision_policy = sharded_precision(job.config, job.plan)
    trainer.keeps_shards = job.plan.strategy in KEEPS_SHARDS
    trainer.args.save_only_model = False  # the arguments said otherwise where the Trainer knows no way to save shards
    trainer.save_limit = job.config.train.save_total_limit
    # The callbacks of ours print and record; the Trainer's own printer would repeat every line.
    trainer.remove_callback(PrinterCallback)
    return trainer


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
    evaluation = train.eval_strategy
    # Adapters under ZeRO are computed under the engine's own autocast; the Trainer's would make them 16-bit.
    trainer_casts = not (plan.strategy.startswith("zero") and config.tuning.mode is not TuningMode.FULL)
    if evaluation == "auto":
        evaluation = "epoch" if has_validation else "no"
    return SFTConfig(
        output_dir=str(run.path),
        per_device_train_batch_size=plan.micro_batch,
        gradient_accumulation_steps=plan.grad_accum,
        per_device_eval_batch_size=plan.micro_batch if train.eval_batch_size == "auto" else train.eval_batch_size,
        learning_rate=plan.learning_rate,
        num_train_epochs=train.epochs,
        max_steps=train.max_steps or -1,
        bf16=trainer_casts and plan.autocast == "bf16",
        fp16=trainer_casts and plan.autocast == "fp16",
        tf32=None if train.tf32 == "auto" else train.tf32,
        use_cpu=plan.device == "cpu",
        optim=plan.optimizer,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_epsilon=train.adam_epsilon,
        lr_scheduler_type=train.scheduler,
        lr_scheduler_kwargs=SCHEDULER_SETTINGS.get(train.scheduler),
        warmup_steps=train.warmup,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        neftune_noise_alpha=train.neftune_noise_alpha,
        gradient_checkpointing=plan.gradient_checkpointing,
        dataloader_num_workers=1 if config.data.streaming else train.dataloader_num_workers,
        dataloader_pin_memory=plan.pin_memory,
        dataloader_persistent_workers=train.dataloader_persistent_workers,
        dataloader_prefetch_factor=train.dataloader_prefetch_factor or (AHEAD if config.data.streaming else None),
        ignore_data_skip=config.data.streaming,  # the stream itself begins where the run goes on
        dataloader_drop_last=train.dataloader_drop_last,
        eval_strategy=evaluation,
        eval_steps=train.eval_steps,
        eval_on_start=train.eval_on_start and has_validation,
        eval_accumulation_steps=train.eval_accumulation_steps,
        eval_do_concat_batches=train.eval_do_concat_batches,
        prediction_loss_only=True,
        metric_for_best_model=best_metric(config),
        greater_is_better=train.greater_is_better,
        save_strategy=train.save_strategy,
        save_steps=train.save_steps,
        save_total_limit=None,  # rotation is ours
        logging_steps=train.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # it would log a NaN loss as 0.0
        restore_callback_states_from_checkpoint=True,
        average_tokens_across_devices=True,
        seed=train.seed,
        full_determinism=train.deterministic,
        report_to="none",  # the trackers are callbacks of ours
        disable_tqdm=True,
        max_length=None,  # rows come cut to length
        dataset_kwargs={"skip_prepare_dataset": True},
        ddp_timeout=timeout_seconds(config),
        ddp_find_unused_parameters=train.ddp_find_unused_parameters,
        ddp_bucket_cap_mb=train.ddp_bucket_cap_mb,
        ddp_broadcast_buffers=train.ddp_broadcast_buffers,
        ddp_static_graph=train.ddp_static_graph,
        **engine_arguments(config, plan, run),
    )


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
    if plan.sharding_factor is None:
        return {"fsdp": True, "fsdp_config": fsdp}
    mesh = ParallelismConfig(
        dp_replicate_size=plan.world_size // plan.sharding_factor, dp_shard_size=plan.sharding_factor
    )
    return {"fsdp": True, "fsdp_config": fsdp, "parallelism_config": mesh}
