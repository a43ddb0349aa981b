"""A place beside a result where it grows until it is whole: never two at once, and nothing is left of a try."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sft_play.errors import EnvironmentProblem, Interrupted


@contextlib.contextmanager
def staged(output: Path) -> Iterator[Path]:
    """Where to write what becomes `output` by a rename: a path in a folder of its own, which is removed at the end.

    What an earlier try left there, killed before its end, is removed first.

    Raises:
        EnvironmentProblem: another process is writing the same output.
        Interrupted: Ctrl-C.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    place = output.with_name(f".{output.name}.new")
    place.mkdir(exist_ok=True)
    handle = os.open(place, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        lock(handle, place, output)
        for left in place.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        try:
            yield place / output.name
        except KeyboardInterrupt:
            raise Interrupted("stopped before it was whole", where=str(output), fix="start it again") from None
        finally:
            shutil.rmtree(place, ignore_errors=True)
    finally:
        os.close(handle)


def lock(handle: int, place: Path, output: Path) -> None:
    """Hold the folder for as long as its handle is open.

    Raises:
        EnvironmentProblem: another process holds it, or has just removed it.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_ino == place.stat().st_ino:
            return
    except (BlockingIOError, FileNotFoundError):
        pass
    raise EnvironmentProblem("another command is writing it", where=str(output), fix="wait for its end")
