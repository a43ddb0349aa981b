"""Whether a run is at work, finished, failed or stopped: from its lock, its record and what it has written."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from sft_play.record.run_dir import MARKER, RunDir

STOPPED_OUTCOMES = ("Preempted", "Interrupted")


class RunState(StrEnum):
    """What a run is doing or came to."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    DAMAGED = "damaged"
    NOT_STARTED = "not started"


def state_of(run: RunDir, record: Mapping[str, Any], *, damaged: bool = False) -> RunState:
    """A run that was killed has written nothing of its end, and can be gone on with: it is stopped.

    Args:
        record: record.json; empty where there is none.
        damaged: whether part of what the run keeps of itself cannot be read.
    """
    if is_running(run):
        return RunState.RUNNING
    if damaged:
        return RunState.DAMAGED
    outcome = record.get("outcome")
    if outcome == "done":
        return RunState.DONE
    if outcome and outcome not in STOPPED_OUTCOMES:
        return RunState.FAILED
    return RunState.STOPPED if outcome or run.run_json.is_file() else RunState.NOT_STARTED


def is_running(run: RunDir) -> bool:
    """Whether a process of any machine holds its lock of the run. To ask is to take it, shared, for a moment."""
    return any(_held(lock) for lock in [run.launch / "lock", *run.launch.glob("node-*/lock")])


def _held(lock: Path) -> bool:
    try:
        with lock.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def runs_in(folder: Path) -> list[Path]:
    """The runs in an output folder: what carries the program's marker and is not hidden, by name."""
    if not folder.is_dir():
        return []
    return sorted(
        one for one in folder.iterdir() if not one.name.startswith(".") and not one.is_symlink() and is_run(one)
    )


def is_run(folder: Path) -> bool:
    """Whether this program made the folder for a run."""
    return folder.is_dir() and (folder / MARKER).is_file() and (folder / "launch").is_dir()


def size_of(folder: Path) -> int:
    """Bytes of all files, each hard link once."""
    seen: dict[tuple[int, int], int] = {}
    for file in folder.rglob("*"):
        try:
            status = file.lstat()
        except OSError:  # a live run moves files
            continue
        if not file.is_dir() or file.is_symlink():
            seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())
