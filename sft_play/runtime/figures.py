"""What a training came to: its held-out losses, and the figures that its record keeps."""

from __future__ import annotations

import resource
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from sft_play.record.amendments import read_amendments
from sft_play.runtime.callbacks import ProgressCallback
from sft_play.runtime.job import Job
from sft_play.runtime.meter import totals_of
from sft_play.runtime.spikes import spikes_of
from sft_play.runtime.trainer import SftPlayTrainer
from sft_play.runtime.watching import WatchCallback, summary_of

Kind = TypeVar("Kind")


def figures(trainer: SftPlayTrainer, job: Job, resident: int) -> dict[str, Any]:
    """Time, speed, memory, and what happened on the way, for the record.

    Args:
        resident: bytes that this process held before it loaded anything.
    """
    plan, watch = job.plan, callback_of(trainer, WatchCallback)
    return {
        "seconds": round(watch.wall_seconds(totals_of(trainer.callback_handler.callbacks)), 1),
        "tokens_per_second": round(callback_of(trainer, ProgressCallback).tokens_per_second, 1),
        "peak_memory_bytes": peak_memory_bytes(plan.device, watch),
        "spikes": spikes_of(trainer.callback_handler.callbacks).summary(),
        "amendments": [asdict(one) for one in read_amendments(job.run)],
        "predicted": plan.predicted,
        "measured": measured_memory(plan.device, resident, watch),
        "summary": summary_of(watch),
        "device_names": watch.names,
        "bottleneck": watch.bottleneck.text,
    }


def callback_of(trainer: SftPlayTrainer, kind: type[Kind]) -> Kind:
    """The trainer's callback of a class that it has one of."""
    return next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind))


def evaluate_at_end(trainer: SftPlayTrainer) -> dict[str, float]:
    """The held-out loss before the first step (where it was measured) and of the finished model."""
    history = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    if trainer.eval_dataset is None or trainer.args.eval_strategy == "no":
        return {}
    at_end = [entry["eval_loss"] for entry in history if entry["step"] == trainer.state.global_step]
    after = at_end[-1] if at_end and trainer.loaded_step is None else trainer.evaluate()["eval_loss"]
    before = [entry["eval_loss"] for entry in history if entry["step"] == 0]
    return {"eval_loss": after, **({"eval_loss_before": before[0]} if before else {})}


def final_metrics(trainer: SftPlayTrainer) -> dict[str, float]:
    """Every figure of the last evaluation."""
    measured = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    last = measured[-1] if measured else {}
    return {name: value for name, value in last.items() if name.startswith("eval_")}


def train_loss(trainer: SftPlayTrainer) -> float:
    """The last logged training loss."""
    return next(entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry)


def measured_memory(device: str, before: int, watch: WatchCallback) -> dict[str, int]:
    """Peak allocated, reserved and used on the device; on a CPU what the process grew by since `before`, in bytes."""
    if device == "cpu":
        return {"memory_bytes": peak_memory_bytes(device, watch) - before}
    free, total = torch.cuda.mem_get_info()
    return {
        "memory_bytes": peak_memory_bytes(device, watch),
        "reserved_bytes": max(torch.cuda.max_memory_reserved(), watch.meter.phases.reserved),
        "device_bytes": total - free,
    }


def peak_memory_bytes(device: str, watch: WatchCallback) -> int:
    """Most memory allocated on the GPU, or the largest resident set of this process on a CPU."""
    if device == "cuda":
        return max(int(torch.cuda.max_memory_allocated()), watch.meter.phases.allocated)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
