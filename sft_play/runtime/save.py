"""Write what a run is for: an adapter or a model that others can load, complete or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig

from sft_play.config.schema import TuningMode
from sft_play.data.template import load_text_tokenizer
from sft_play.errors import AppliedDiffersError
from sft_play.record.checkpoints import PREFIX
from sft_play.record.manifest import sync_folder, write_manifest
from sft_play.runtime.gather import gather_weights, scatter_weights, write_weights
from sft_play.runtime.generate import end_token_ids
from sft_play.runtime.job import Job
from sft_play.runtime.trainer import SftPlayTrainer


def save_result(trainer: SftPlayTrainer, job: Job, tokenizer: Any) -> Path:
    """The adapter (`adapter/`) or the model (`model/`), tokenizer, template and generation config beside it.

    A collective: every rank gathers, rank 0 writes.

    Raises:
        AppliedDiffersError: a tensor to be saved is empty or not finite.
    """
    full = job.config.tuning.mode is TuningMode.FULL
    target = job.run.model if full else job.run.adapter
    main = trainer.accelerator.is_main_process
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = gather_weights(model, keep=main)
    if main:
        check_tensors(weights)
        write_result(model, weights, tokenizer, target, job.stamp)
    return target


def write_result(
    model: Any, weights: dict[str, torch.Tensor], tokenizer: Any, target: Path, stamp: dict[str, Any]
) -> None:
    """Write into a folder beside `target` and give it the name once it is whole."""
    staging = target.with_name(f".{target.name}.new")
    shutil.rmtree(staging, ignore_errors=True)
    write_weights(model, weights, staging)
    tokenizer.save_pretrained(staging)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    # Whoever serves this must stop where it was taught to: at the template's end of turn too.
    settings = base.generation_config or GenerationConfig()
    settings.eos_token_id = end_token_ids(load_text_tokenizer(staging), settings)
    settings.save_pretrained(staging)
    (staging / "README.md").unlink(missing_ok=True)  # peft's empty card; ours is written from the record
    write_manifest(staging, {"stamp": stamp})
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    sync_folder(target.parent)


def check_tensors(weights: dict[str, torch.Tensor]) -> None:
    """Every weight must have elements and be finite.

    Raises:
        AppliedDiffersError: naming the first that is not.
    """
    for name, weight in weights.items():
        if weight.is_floating_point() and (weight.numel() == 0 or not bool(torch.isfinite(weight).all())):
            raise AppliedDiffersError("a trained weight is empty or not finite", where=name)


def load_best(trainer: SftPlayTrainer, job: Job) -> int | None:
    """Put the best checkpoint's weights into the model; returns its step."""
    step = trainer.state.best_global_step
    if not step or step == trainer.state.global_step:
        return trainer.state.global_step
    scatter_weights(trainer.accelerator.unwrap_model(trainer.model), job.run.checkpoints / f"{PREFIX}{step}")
    trainer.loaded_step = step
    print(f"loaded the best checkpoint, step {step}")
    return step
