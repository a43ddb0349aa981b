"""The checkpoints of a run: staged, published by one rename, verified on reading, rotated last."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sft_play.errors import ResumeRefusedError
from sft_play.record.manifest import NAME, folder_problem, read_manifest, sync_folder, write_manifest
from sft_play.record.run_dir import RunDir
from sft_play.record.signature import is_signed

PREFIX = "step-"
# Strategies whose engine loads its own files by unpickling.
UNPICKLES = "zero"
# Fields of the stamp that a run and the checkpoint it goes on from share.
MUST_MATCH = (
    "config_hash", "backend", "mode", "base_model", "base_identity", "strategy", "world_size", "precision",
    "global_batch", "data_fingerprint",
)  # fmt: skip


def staging_folder(run: RunDir, *, clear: bool = True) -> Path:
    """An empty folder on the target's own disk; what a killed save left there is dropped first.

    Args:
        clear: whether this rank makes it; the others are told where it is.
    """
    staging = run.checkpoints / ".staging"
    if clear:
        for left in [staging, *run.checkpoints.glob(".trash-*")]:
            shutil.rmtree(left, ignore_errors=True)
        staging.mkdir(parents=True)
    return staging


def publish(run: RunDir, staged: Path, step: int, about: dict[str, Any]) -> Path:
    """Give a complete staged folder its name, `checkpoints/step-N`."""
    write_manifest(staged, {"step": step, **about})
    target = run.checkpoints / f"{PREFIX}{step}"
    if target.exists():
        _discard(target)
    staged.rename(target)
    sync_folder(run.checkpoints)
    return target


def rotate(run: RunDir, keep: int | None, best_step: int | None) -> None:
    """Delete the oldest checkpoints of this run beyond `keep`, never the newest and never the best."""
    folders = [folder for folder in newest_first(run) if (folder / NAME).is_file()]
    for folder in folders[keep:] if keep else []:
        if folder.name != f"{PREFIX}{best_step}":
            _discard(folder)


def newest_first(run: RunDir) -> list[Path]:
    """Every published checkpoint folder of the run, the highest step first."""
    folders = [folder for folder in run.checkpoints.glob(f"{PREFIX}*") if folder.name[len(PREFIX) :].isdigit()]
    return sorted(folders, key=lambda folder: int(folder.name[len(PREFIX) :]), reverse=True)


def step_of(folder: Path | None) -> int:
    """The optimizer step of a checkpoint folder; 0 without one."""
    return int(folder.name[len(PREFIX) :]) if folder else 0


def stamp_differences(made: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What a checkpoint was made by and this run is, where the two may not differ."""
    return [
        f"{key}: made by {made.get(key)}, this run is {now.get(key)}"
        for key in MUST_MATCH
        if made.get(key) != now.get(key)
    ]


def newest_good(run: RunDir, stamp: dict[str, Any], say: Callable[[str], None], *, trust: bool = False) -> Path | None:
    """The newest verified checkpoint; a bad one is set aside by name and the next older one taken.

    Args:
        stamp: of the run that wants to go on; `MUST_MATCH` has to be the same in the checkpoint's.
        trust: load what an engine unpickles whoever wrote it.

    Raises:
        ResumeRefusedError: there are checkpoints and none is good, or the newest good one was made by another run.
    """
    folders = newest_first(run)
    for folder in folders:
        problem = folder_problem(folder)
        if problem:
            say(f"checkpoint {folder.name} is set aside: {problem}")
            set_aside(folder)
            continue
        made = read_manifest(folder)
        if wrong := stamp_differences(made, stamp):
            raise ResumeRefusedError(
                f"its checkpoint {folder.name} is of another run: {'; '.join(wrong)}", where=str(run.path)
            )
        if str(stamp["strategy"]).startswith(UNPICKLES) and not trust and not is_signed(made):
            raise ResumeRefusedError(
                "its engine unpickles files, and these carry no signature of this user",
                where=str(folder),
                fix="ARGS=--trust-checkpoint loads them if you trust who wrote them: a pickle can run any program",
            )
        return folder
    if folders or any(run.checkpoints.glob("damaged-*")):
        raise ResumeRefusedError("no checkpoint of this run is whole", where=str(run.checkpoints))
    return None


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, which is never deleted, to a name that is free."""
    number, target = 1, folder.with_name(f"damaged-{folder.name}")
    while target.exists():
        number += 1
        target = folder.with_name(f"damaged-{folder.name}-{number}")
    return folder.rename(target)


def _discard(folder: Path) -> None:
    """Rename before deleting, so that a kill in between leaves no half checkpoint under a good name."""
    trash = folder.with_name(f".trash-{folder.name}")
    if trash.exists():
        shutil.rmtree(trash)
    folder.rename(trash)
    shutil.rmtree(trash)
