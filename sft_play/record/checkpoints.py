"""The checkpoints of a run: staged, published by one rename, verified on reading, rotated last."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sft_play.errors import ResumeRefusedError
from sft_play.record.digests import Digests
from sft_play.record.manifest import folder_problem, read_manifest, stamp_of, sync_folder, sync_manifest, write_manifest
from sft_play.record.run_dir import RunDir
from sft_play.record.signature import is_signed
from sft_play.record.stamp import VERSION as STAMP_VERSION
from sft_play.record.stamp import stamp_differences

PREFIX = "step-"
TRASH, REPLACED = ".trash-", ".replaced-"
# Strategies whose engine loads its own files by unpickling.
UNPICKLES = "zero"


def staging_folder(run: RunDir, *, clear: bool = True) -> Path:
    """An empty folder on the target's own disk; what a killed save left there is dropped first.

    Args:
        clear: whether this rank makes it; the others are told where it is.
    """
    staging = run.checkpoints / ".staging"
    if clear:
        sweep_checkpoints(run)
        staging.mkdir(parents=True)
    return staging


def publish(run: RunDir, staged: Path, step: int, stamp: dict[str, Any], digests: Digests | None = None) -> Path:
    """Give a complete staged folder its name, `checkpoints/step-N`; one of that name gives way only then.

    Args:
        digests: of the files that were digested while they were written; `settle` waits for the disk then.
    """
    write_manifest(staged, {"step": step, "stamp": stamp}, digests)
    target = run.checkpoints / f"{PREFIX}{step}"
    replaced = target.with_name(f"{REPLACED}{target.name}")
    if target.exists():
        target.rename(replaced)
    staged.rename(target)
    if digests is None:
        sync_folder(run.checkpoints)
    if replaced.exists():
        _discard(replaced)
    shutil.rmtree(staged.parent)
    return target


def settle(published: Path, digests: Digests) -> None:
    """Wait until a published checkpoint is on the disk; one that does not get there is taken away.

    Until then a power cut may tear it: its checksums tell, and the one before it is there as long as nobody rotates.

    Raises:
        OSError: it does not get there.
    """
    try:
        digests.settle()
        sync_manifest(published)
        sync_folder(published.parent)
    except OSError:
        _discard(published)
        raise


def rotate(run: RunDir, keep: int | None, newest: Path, best_step: int | None) -> None:
    """Delete the oldest checkpoints of this run beyond `keep`, never the newest and never the best.

    A folder that this run did not write (no manifest, another stamp, a later step) is neither deleted nor counted.

    Args:
        newest: the one just published.
    """
    stamp = stamp_of(read_manifest(newest))
    earlier = [folder for folder in newest_first(run) if step_of(folder) < step_of(newest)]
    own = [newest, *(folder for folder in earlier if _is_of(folder, stamp))]
    for folder in own[keep:] if keep else []:
        if folder.name != f"{PREFIX}{best_step}":
            _discard(folder)


def sweep(run: RunDir) -> None:
    """Take away what a killed process of this run left half done; called by whoever holds the run's lock."""
    sweep_checkpoints(run)
    for folder in (run.path, run.own, run.launch, run.attempts, run.data):
        for left in folder.glob(".*.new"):  # half a result, or half a file that would have replaced another
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def sweep_checkpoints(run: RunDir) -> None:
    """Drop half a checkpoint and half a deletion; a replaced checkpoint without a successor gets its name back."""
    for replaced in run.checkpoints.glob(f"{REPLACED}*"):
        target = replaced.with_name(replaced.name.removeprefix(REPLACED))
        _discard(replaced) if target.exists() else replaced.rename(target)
    for left in [run.checkpoints / ".staging", *run.checkpoints.glob(f"{TRASH}*")]:
        shutil.rmtree(left, ignore_errors=True)


def newest_first(run: RunDir) -> list[Path]:
    """Every published checkpoint folder of the run, the highest step first."""
    folders = [folder for folder in run.checkpoints.glob(f"{PREFIX}*") if folder.name[len(PREFIX) :].isdigit()]
    return sorted(folders, key=lambda folder: int(folder.name[len(PREFIX) :]), reverse=True)


def step_of(folder: Path | None) -> int:
    """The optimizer step of a checkpoint folder; 0 without one."""
    return int(folder.name[len(PREFIX) :]) if folder else 0


def newest_good(
    run: RunDir, stamp: dict[str, Any], say: Callable[[str], None], *, trust: bool = False, force: bool = False
) -> Path | None:
    """The newest verified checkpoint; a bad one is set aside by name and the next older one taken.

    Args:
        stamp: of the run that wants to go on; gets `forced`, what differs under `force`.
        trust: load what an engine unpickles whoever wrote it.
        force: go on although settings or data differ.

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
        manifest = read_manifest(folder)
        forced = refuse_another_run(folder, stamp_of(manifest), stamp, force=force)
        if forced:
            stamp["forced"] = [*stamp_of(manifest).get("forced", []), *forced]
            say(f"forced: {', '.join(forced)}; the optimizer's state and the schedule's place are the checkpoint's")
        if str(stamp["strategy"]).startswith(UNPICKLES) and not trust and not is_signed(manifest):
            raise ResumeRefusedError(
                "its engine unpickles files, and these carry no signature of this user",
                where=str(folder),
                fix="ARGS=--trust-checkpoint loads them if you trust who wrote them: a pickle can run any program",
            )
        return folder
    if folders or any(run.checkpoints.glob("damaged-*")):
        raise ResumeRefusedError("no checkpoint of this run is whole", where=str(run.checkpoints))
    return None


def refuse_another_run(folder: Path, made: dict[str, Any], now: dict[str, Any], *, force: bool) -> list[str]:
    """What differs and is forced, as `key made -> now`.

    Raises:
        ResumeRefusedError: the stamp is of a newer program, or differs in what is not forced; both columns are shown.
    """
    if made.get("version", 1) > STAMP_VERSION:
        what = f"it was made by a newer sft-play ({made.get('sft_play', 'unknown')})"
        raise ResumeRefusedError(what, where=str(folder), fix="update this program, or RUN_NAME=... starts another run")
    differences = stamp_differences(made, now)
    if not differences:
        return []
    if force and all(one.forced for one in differences):
        return [f"{one.name} {one.made} -> {one.now}" for one in differences]
    can = "; ARGS=--force goes on nevertheless and records it" if all(one.forced for one in differences) else ""
    raise ResumeRefusedError(
        f"checkpoint {folder.name} is of another run: {', '.join(one.name for one in differences)}",
        where=str(folder.parent.parent),
        fix=ResumeRefusedError.hint + can,
        table=[("", "made by", "this run"), *((one.name, str(one.made), str(one.now)) for one in differences)],
    )


def _is_of(folder: Path, stamp: dict[str, Any]) -> bool:
    """Whether a checkpoint was written by the run of this stamp."""
    try:
        return not stamp_differences(stamp_of(read_manifest(folder)), stamp)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, which is never deleted, to a name that is free."""
    number, target = 1, folder.with_name(f"damaged-{folder.name}")
    while target.exists():
        number += 1
        target = folder.with_name(f"damaged-{folder.name}-{number}")
    return folder.rename(target)


def _discard(folder: Path) -> None:
    """Rename before deleting, so that a kill in between leaves no half checkpoint under a good name."""
    trash = folder.with_name(f"{TRASH}{folder.name.removeprefix(REPLACED)}")
    if trash.exists():
        shutil.rmtree(trash)
    folder.rename(trash)
    shutil.rmtree(trash)
