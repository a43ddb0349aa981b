"""The trainer: trl's SFTTrainer with the few methods overridden that docs/architecture.md lists."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PrinterCallback, Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from sft_play.data.template import load_text_tokenizer
from sft_play.record.checkpoints import publish, staging_folder
from sft_play.record.digests import Digests
from sft_play.record.run_dir import RunDir
from sft_play.record.run_record import append_event
from sft_play.runtime.adapters import train_in_fp32
from sft_play.runtime.arguments import sharded_precision
from sft_play.runtime.by_length import sampler_by_length
from sft_play.runtime.callbacks import full_name
from sft_play.runtime.collate import LENGTHS, REAL_TOKENS, PackCollator
from sft_play.runtime.dist import Ranks
from sft_play.runtime.evaluate import row_sums
from sft_play.runtime.evaluation import TrainingEvaluation, timed_losses
from sft_play.runtime.finite import Finite, poisoned
from sft_play.runtime.fitting import Fitting
from sft_play.runtime.fused import set_loss
from sft_play.runtime.gather import gather_weights, scatter_weights, write_weights
from sft_play.runtime.job import SOURCE, Job
from sft_play.runtime.meter import Totals
from sft_play.runtime.paged import page_again
from sft_play.runtime.room import bytes_of_next, check_room, half_dropped
from sft_play.runtime.rows import ROW, KeepNumbers, SilentWhereEmpty, filled, numbered, repeat_no_row, silent_row
from sft_play.runtime.settling import Settling
from sft_play.runtime.shards import SCHEDULER, load_optimizer_shard, save_optimizer_shard, without_crc32
from sft_play.runtime.spikes import SpikeCallback, spikes_of
from sft_play.runtime.tally import Tally
from sft_play.runtime.watching import meter_of, watch_of

# A pickle that nothing here ever reads, and a script that DeepSpeed copies beside its files.
NEVER_READ = ("training_args.bin", "zero_to_fp32.py")
# Strategies whose optimizer state lies in shards that each rank writes by itself.
KEEPS_SHARDS = ("fsdp", "hsdp", "tp")


class SftPlayTrainer(SFTTrainer):
    """SFTTrainer with checkpoints that are whole or absent, an evaluation loss over tokens, and no NaN step."""

    _total_train_tokens: int

    def __init__(
        self, run: RunDir, stamp: dict[str, Any], callbacks: Sequence[TrainerCallback] = (), **settings: Any
    ) -> None:
        super().__init__(callbacks=[*callbacks, SpikeCallback(), Totals()], **settings)
        self.run = run
        self.stamp = stamp
        self.save_limit: int | None = None
        self.settling = Settling(run)
        self.loaded_step: int | None = None
        self.keeps_shards = self.skips_spikes = False
        self.step_rows_by_length = 0
        self.finite, self.meter = Finite(), meter_of(callbacks)
        self.evaluation: TrainingEvaluation  # given once the trainer is built
        alone = self.accelerator.num_processes == 1 and not self.is_deepspeed_enabled
        # Not the optimizer's: accelerate lets that do nothing between the micro-batches of a step.
        self.fitting = Fitting(run, lambda: self.model.zero_grad(), alone=alone)
        if isinstance(self.model, PeftModel):
            train_in_fp32(self.model)

    def get_train_dataloader(self) -> Any:
        return repeat_no_row(super().get_train_dataloader())

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Upstream's random order, or rows of like length; the sampler upstream has for that cannot be resumed."""
        rows = self.train_dataset if train_dataset is None else train_dataset
        if not self.step_rows_by_length:
            return super()._get_train_sampler(rows)
        return sampler_by_length(rows, self.step_rows_by_length, self.args.seed)

    def get_batch_samples(self, *items: Any) -> Any:
        """A step's batches. Opening a stream draws random numbers, and a run that goes on opens it later than the
        straight run did: dropout must not see that.
        """
        forked = torch.random.fork_rng(devices=[]) if self.args.ignore_data_skip else contextlib.nullcontext()
        with self.meter.part("data"), forked:
            return super().get_batch_samples(*items)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns += [one for one in (LENGTHS, SOURCE, ROW) if one not in self._signature_columns]

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """trl's loss; of packs it would count the positions of one row as the tokens of all."""
        real, counted = inputs.pop(REAL_TOKENS, None), self._total_train_tokens
        found = super().compute_loss(model, inputs, *args, **kwargs)
        if real is not None:
            self._total_train_tokens = counted + int(self.accelerator.gather(real).sum()) // self._tp_size
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return (poisoned(found[0]), *found[1:]) if isinstance(found, tuple) else poisoned(found)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *items: Any, **named: Any) -> torch.Tensor:
        """One micro-batch, in parts where it does not fit."""
        counted, upstream, rows = self._total_train_tokens, super().training_step, inputs.pop(ROW, None)

        def recount() -> None:
            self._total_train_tokens = counted

        def once(part: Any) -> torch.Tensor:
            return upstream(model, part, *items, **named)

        with self.meter.part("compute"):
            loss = self.fitting.train(self.state.global_step, inputs, once, recount)
        self.meter.add(inputs, rows, loss, items[0] if items else named.get("num_items_in_batch"))
        self.finite.add(self.state.global_step, loss, rows)
        if self.accelerator.sync_gradients:
            self.finite.measure(model)
        return loss

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """Upstream's; called once a step, after accumulation and before the optimizer step."""
        norm = super()._get_grad_norm(model, grad_norm)
        if norm is None:
            return norm
        if not math.isfinite(float(norm)):
            self.finite.refuse(float(norm), scaled=self.args.fp16)
            return norm
        spikes, step = spikes_of(self.callback_handler.callbacks), self.state.global_step + 1
        if spikes.is_spike(float(norm), step, skip=self.skips_spikes):
            if self.is_world_process_zero():
                append_event(self.run.metrics, step, "spike", spikes.told)
            if self.skips_spikes:
                model.zero_grad()  # without a gradient no optimizer touches a weight, nor its state
        return norm

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        """One evaluation batch: the sums of its rows are kept, logits never."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            rows, sources = row_sums(model, inputs)
        self.evaluation.tally.add(rows, sources)
        total, tokens, _ = rows.sum(0)
        return (total / tokens.clamp(min=1)).float().to(self.args.device), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """The upstream loop with losses averaged over tokens, and answers; random state is left as it was."""
        evaluation, started = self.evaluation, time.monotonic()
        evaluation.tally = Tally()
        # Iterating a loader draws a random number; a run that evaluates must train like one that does not.
        gpus = [torch.cuda.current_device()] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
            output.metrics.update(evaluation.losses(metric_key_prefix))
            timed_losses(evaluation.budget, started)
            output.metrics.update(evaluation.answered(metric_key_prefix))
        return output

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Upstream's, where this evaluation has the metric: answers may not have fitted into the budget."""
        name = full_name(self.args.metric_for_best_model or "eval_loss")
        return name in metrics and bool(super()._determine_best_metric(metrics, trial))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Let the Trainer write into a staging folder, then publish it whole. All ranks write their part."""
        main, target, step = self.accelerator.is_main_process, self.args.output_dir, self.state.global_step
        self.meter.phases.enter("save")
        self.settling.wait()
        staging, needed = staging_folder(self.run, clear=main), bytes_of_next(self.run, self.model, step)
        self.digests = Digests()
        with half_dropped(staging, step, needed):
            if main:
                check_room(self.run.checkpoints, step, needed)
            self.accelerator.wait_for_everyone()
            self.args.output_dir = str(staging)
            try:
                Trainer._save_checkpoint(self, model, trial)  # not trl's: it would add a model card to every checkpoint
            finally:
                self.args.output_dir = target
            self.accelerator.wait_for_everyone()
            if main:
                (staged,) = (entry for entry in staging.iterdir() if entry.is_dir())
                for needless in NEVER_READ:
                    (staged / needless).unlink(missing_ok=True)
                published = publish(self.run, staged, step, dict(self.stamp), self.digests)
        if main:
            best = self.state.best_global_step
            self.settling.begin(published, self.digests, needed, self.save_limit, best)
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
        """Shards of DTensors are written by each rank; the rest is the Trainer's.

        What is written already is digested meanwhile, where no other rank may be in the middle of a file of its own.
        """
        if self.accelerator.num_processes == 1 and not self.is_deepspeed_enabled:
            self.digests.begin(Path(output_dir))
        with without_crc32():
            if not self.keeps_shards:
                super()._save_optimizer_and_scheduler(output_dir)
                return
            save_optimizer_shard(self.optimizer.optimizer, Path(output_dir), self.args.process_index)
            if self.args.should_save:
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.keeps_shards:
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                page_again(getattr(self.optimizer, "optimizer", self.optimizer))
            return
        load_optimizer_shard(self.optimizer.optimizer, Path(checkpoint), self.args.process_index)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))


def build_trainer(
    job: Job, arguments: SFTConfig, model: Any, tokenizer: Any, callbacks: list[TrainerCallback], ranks: Ranks
) -> SftPlayTrainer:
    """The trainer for the job's prepared rows or packs."""
    held_out, rows = job.dataset("validation"), numbered(job.dataset("train"))
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
    train = job.config.train
    set_loss(trainer.model, job.plan, train.label_smoothing)
    trainer.step_rows_by_length = job.plan.global_batch if train.group_by_length else 0
    unsloth = job.plan.kernels == "unsloth"
    flat = unsloth or job.plan.attention.startswith("flash")
    collator = PackCollator(trainer.data_collator, pad_id=tokenizer.pad_token_id, flat=flat, unsloth=unsloth)
    trainer.data_collator = SilentWhereEmpty(KeepNumbers(collator), silent_row(job.first_rows(rows)))
    text_tokenizer = load_text_tokenizer(job.model_path, job.config.model.chat_template)
    trainer.evaluation = TrainingEvaluation(trainer, job, held_out, text_tokenizer, ranks)
    # Where accelerate has left FSDP out, there is no plugin; the check at start says so.
    if plugin := getattr(trainer.accelerator.state, "fsdp_plugin", None):
        plugin.mixed_precision_policy = sharded_precision(job.config, job.plan)
    trainer.finite.ranks, trainer.skips_spikes = ranks, job.config.train.on_spike == "skip"
    if watch := watch_of(callbacks):
        watch.trainer = trainer
    trainer.keeps_shards = job.plan.strategy in KEEPS_SHARDS
    trainer.args.save_only_model = False  # the arguments said otherwise where the Trainer knows no way to save shards
    trainer.save_limit = job.config.train.save_total_limit
    # The callbacks of ours print and record; the Trainer's own printer would repeat every line.
    trainer.remove_callback(PrinterCallback)
    return trainer
