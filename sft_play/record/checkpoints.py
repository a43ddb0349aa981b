"""The checkpoints of a run: staged, published by one rename, verified on reading, rotated last."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sft_play.errors import ResumeRefusedError
from sft_play.record.manifest import NAME, folder_problem, read_manifest, sync_folder, write_manifest
from sft_play.record.run_dir import RunDir

PREFIX = "step-"


def staging_folder(run: RunDir) -> Path:
    """An empty folder on the target's own disk; what a killed save left there is dropped first."""
    staging = run.checkpoints / ".staging"
    if staging.exists():
        shutil.rmtree(staging)
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


def newest_good(run: RunDir, config_hash: str, say: Callable[[str], None]) -> Path | None:
    """The newest verified checkpoint; a bad one is set aside by name and the next older one taken.

    Raises:
        ResumeRefusedError: there are checkpoints and none is good, or the newest good one has another config.
    """
    folders = newest_first(run)
    for folder in folders:
        problem = folder_problem(folder)
        if problem:
            say(f"checkpoint {folder.name} is set aside: {problem}")
            folder.rename(folder.with_name(f"damaged-{folder.name}"))
            continue
        if read_manifest(folder).get("config_hash") != config_hash:
            raise ResumeRefusedError("its checkpoints were made with another config", where=str(run.path))
        return folder
    if folders or any(run.checkpoints.glob("damaged-*")):
        raise ResumeRefusedError("no checkpoint of this run is whole", where=str(run.checkpoints))
    return None


def _discard(folder: Path) -> None:
    """Rename before deleting, so that a kill in between leaves no half checkpoint under a good name."""
    trash = folder.with_name(f".trash-{folder.name}")
    if trash.exists():
        shutil.rmtree(trash)
    folder.rename(trash)
    shutil.rmtree(trash)
