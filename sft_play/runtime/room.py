"""Room on the disk for a checkpoint: asked for before it is written, and told of when it runs out all the same."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from sft_play.errors import DiskFullError
from sft_play.plan.disk import CHECKPOINT_BYTES_A_WEIGHT
from sft_play.record.checkpoints import newest_first, step_of
from sft_play.record.run_dir import RunDir
from sft_play.runtime.symptoms import is_disk_full


def bytes_of_next(run: RunDir, model: torch.nn.Module, step: int) -> int:
    """Bytes of the checkpoint of a step: those of the newest one before it, or an estimate where it is the first."""
    for folder in newest_first(run):
        if step_of(folder) < step:
            return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    trained = (weight for weight in model.parameters() if weight.requires_grad)
    return CHECKPOINT_BYTES_A_WEIGHT * sum(int(getattr(one, "ds_numel", one.numel())) for one in trained)


def check_room(folder: Path, step: int, needed: int) -> None:
    """Refuse to begin a checkpoint that cannot be ended.

    Raises:
        DiskFullError: fewer than `needed` bytes are free where `folder` lies.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise no_room(folder, step, needed, "")


def no_room(folder: Path, step: int, needed: int, reason: str) -> DiskFullError:
    """The error, with what is needed and what is free by now."""
    free = shutil.disk_usage(folder).free
    said = f" ({reason})" if reason else ""
    what = f"the disk is full{said}: checkpoint step-{step} needs {needed:,} bytes and {free:,} are free"
    return DiskFullError(f"{what}; the earlier ones are kept", where=str(folder))


@contextlib.contextmanager
def half_dropped(staging: Path, step: int, needed: int) -> Iterator[None]:
    """Remove what was written when a save fails: half a checkpoint must not go on filling a full disk.

    Raises:
        DiskFullError: that was the reason.
    """
    try:
        yield
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if is_disk_full(error):
            raise no_room(staging.parent, step, needed, getattr(error, "strerror", None) or str(error)[:80]) from error
        raise
