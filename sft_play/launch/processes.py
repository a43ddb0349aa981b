"""The processes below this one: found, signalled and ended through /proc; elsewhere than on Linux none is found."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# What a process gets between being asked to end and being ended.
GRACE_SECONDS = 5.0


def tie_to_parent(number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent dies, however it dies. Survives exec."""
    _prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make processes below this one its children when their parent dies, so that none is lost sight of."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def descendants(root: int) -> list[int]:
    """Ids of all living processes below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found = list(children.get(root, []))
    for pid in found:
        found += children.get(pid, [])
    return found


def ranks_below(root: int) -> list[int]:
    """Ids of the ranks that a launcher below `root` started: each is told its number; its children are not meant."""
    told = {pid for pid in descendants(root) if "LOCAL_RANK" in environment_of(pid)}
    return sorted(pid for pid in told if parent_of(pid) not in told)


def environment_of(pid: int) -> Mapping[str, str]:
    """The environment that a process was started with; empty where it may not be read."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (word.decode(errors="replace").partition("=") for word in words if word)
    return {name: value for name, _, value in pairs}


def parent_of(pid: int) -> int:
    """Id of a process's parent; 0 where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def send(pids: Iterable[int], number: int) -> None:
    """Signal processes that may be gone already."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_all(root: int, keep: Collection[int] = ()) -> None:
    """Leave no process below `root` but those to keep: asked first, ended after `GRACE_SECONDS`, and taken leave of."""
    deadline = time.monotonic() + GRACE_SECONDS
    while left := [pid for pid in descendants(root) if pid not in keep]:
        send(left, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # it is a grandchild, or another one waited for it
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)
