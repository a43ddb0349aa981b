"""The disk of the runs' folder: access, locks, space, speed and its clock."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import _TemporaryFileWrapper

from sft_play.cli.checks.finding import Finding, Scope, existing_part, fail, ok, warning
from sft_play.cli.gpu_info import gib
from sft_play.facts.hardware import GIB

MOVE = "set RUN_OUTPUT_DIR to a folder on another disk"
SPACE_NEEDED, SPACE_WANTED = GIB // 2, 5 * GIB
INODES_NEEDED = 1000
SPEED_BYTES, PART_BYTES = 256 * 2**20, 4 * 2**20
LONGEST_WRITE_SECONDS = 8.0
SLOW_MB_PER_SECOND = 50
SKEW_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """What was written, forced to the disk and read back, in how long.

    Attributes:
        cached: the system kept the file in memory, so that reading says nothing of the disk.
    """

    size_bytes: int
    write_seconds: float
    read_seconds: float
    same: bool
    cached: bool


def check_disk(scope: Scope) -> Iterator[Finding]:
    """All of it, of the folder that runs go to; what cannot be written is not measured."""
    access = check_access(scope.output_dir)
    yield access
    there = existing_part(scope.output_dir)
    if there.is_dir():
        yield check_space(there, shutil.disk_usage(there).free, os.statvfs(there).f_favail, os.statvfs(there).f_files)
    if access.state == "ok":
        yield check_skew(there)
        yield check_speed(there)


def check_access(folder: Path) -> Finding:
    """Write, rename and lock there, as a run does; a folder that is still missing is not made."""
    there = existing_part(folder)
    where = str(folder) if there == Path(folder).absolute() else f"{folder} (to be made in {there})"
    if not there.is_dir():
        return fail("write access", f"{there} is a file, not a folder", MOVE)
    try:
        with _own_file(there) as stream:
            stream.write(b"x")
            os.fsync(stream.fileno())
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            moved = Path(f"{stream.name}.moved")
            Path(stream.name).rename(moved)
            moved.rename(stream.name)
    except OSError as error:
        return fail("write access", f"{where}: {error.strerror or error}", f"{MOVE}, or change its owner (ls -ld)")
    return ok("write access", f"{where}: written, renamed, locked")


def check_space(folder: Path, free: int, inodes_free: int, inodes: int) -> Finding:
    """Free bytes, and free file entries where the file system counts them."""
    found = f"{gib(free)} GiB at {folder}"
    if inodes and inodes_free < INODES_NEEDED:
        return fail("free space", f"{found}, but {inodes_free} more files at most", f"remove small files, or {MOVE}")
    if free < SPACE_NEEDED:
        return fail("free space", found, f"free some, or {MOVE}")
    if free < SPACE_WANTED:
        return warning("free space", found, "enough for adapters only; make doctor CONFIG= says what a run needs")
    return ok("free space", found)


def check_skew(folder: Path) -> Finding:
    """A file server with another clock makes new files look old."""
    with _own_file(folder) as stream:
        stream.write(b"x")
        stream.flush()
        skew = Path(stream.name).stat().st_mtime - time.time()
    if abs(skew) > SKEW_SECONDS:
        return warning("disk's clock", f"{skew:+,.0f} s from this machine's", "set both by NTP")
    return ok("disk's clock", "this machine's")


def check_speed(folder: Path) -> Finding:
    """Write, fsync and read, in MB/s; less is written where less is free."""
    size = min(SPEED_BYTES, shutil.disk_usage(folder).free // 8)
    if size < PART_BYTES:
        return warning("speed", "too little is free to measure it", MOVE)
    try:
        speed = measure(folder, size)
    except OSError as error:
        return fail("speed", f"writing {size / 1e6:,.0f} MB broke off: {error.strerror or error}", MOVE)
    return judge_speed(speed)


def judge_speed(speed: DiskSpeed) -> Finding:
    """What the measured speed means for a run."""
    megabytes = speed.size_bytes / 1e6
    write, read = megabytes / max(speed.write_seconds, 1e-9), megabytes / max(speed.read_seconds, 1e-9)
    from_memory = " (from memory)" if speed.cached else ""
    found = f"{megabytes:,.0f} MB: {write:,.0f} MB/s written with fsync, {read:,.0f} MB/s read{from_memory}"
    if not speed.same:
        return fail("speed", f"{found}; what was read differs from what was written", f"this disk is broken: {MOVE}")
    if min(write, read) < SLOW_MB_PER_SECOND:
        return warning("speed", found, f"checkpoints will take long: {MOVE}, or save less often")
    return ok("speed", found)


def measure(folder: Path, size: int) -> DiskSpeed:
    """Write up to `size` bytes that do not compress, at most for a few seconds, and read them back.

    Raises:
        OSError: the disk refused.
    """
    noise = os.urandom(PART_BYTES - 8)
    with _own_file(folder) as stream:
        started, written = time.monotonic(), 0
        while written < size and time.monotonic() - started < LONGEST_WRITE_SECONDS:
            written += stream.write(written.to_bytes(8, "little") + noise)
        stream.flush()
        os.fsync(stream.fileno())
        wrote = time.monotonic()
        cached = not _forget(stream.fileno())
        with Path(stream.name).open("rb") as reader:
            same = all(
                reader.read(PART_BYTES) == at.to_bytes(8, "little") + noise for at in range(0, written, PART_BYTES)
            )
        read = time.monotonic()
    return DiskSpeed(
        size_bytes=written, write_seconds=wrote - started, read_seconds=read - wrote, same=same, cached=cached
    )


def _forget(descriptor: int) -> bool:
    """Ask the system to drop the file from its memory; whether it could be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _own_file(folder: Path) -> _TemporaryFileWrapper[bytes]:
    """A new file of ours there, gone at the end of the block."""
    return tempfile.NamedTemporaryFile(prefix=".doctor-", dir=folder)
