"""Memory, shared memory and the limits that the system sets to a process."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from sft_play.cli.checks.finding import Finding, Scope, fail, ok, warning
from sft_play.cli.gpu_info import gib
from sft_play.facts.hardware import GIB
from sft_play.facts.ram import probe_free_ram_bytes, probe_ram_bytes

SHARED_MEMORY = Path("/dev/shm")
# NCCL and gloo pass buffers through it: tens of MB a rank; loaders with workers pass whole batches.
SHARED_NEEDED, SHARED_WANTED = 128 * 2**20, GIB
LARGER_SHARED = (
    "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm; else "
    "mount -o remount,size=8g /dev/shm"
)
HANDLES_NEEDED, HANDLES_WANTED = 256, 1024
RAM_WANTED = 2 * GIB


def check_system(scope: Scope) -> Iterator[Finding]:
    """RAM, /dev/shm and ulimits."""
    yield check_ram(probe_ram_bytes(), probe_free_ram_bytes())
    yield check_shared_memory(SHARED_MEMORY, several=scope.hardware is not None and len(scope.hardware.gpus) > 1)
    yield check_handles(resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_file_size(resource.getrlimit(resource.RLIMIT_FSIZE)[0])


def check_ram(total: int, free: int) -> Finding:
    """Free RAM within the control group's limit; a system that does not tell gives 0."""
    found = f"{gib(total)} GiB, {gib(free)} free"
    if total and free < RAM_WANTED:
        return warning("RAM", found, "end what else runs, or raise the container's memory limit")
    return ok("RAM", found if total else "this system does not tell")


def check_shared_memory(folder: Path, *, several: bool, total: int | None = None) -> Finding:
    """The size of /dev/shm.

    Args:
        several: a run would take several GPUs, which need it.
        total: bytes, in place of the folder's own, for tests.
    """
    name = "shared memory"
    if total is None:
        if not folder.is_dir():
            return (fail if several else warning)(name, f"no {folder}", LARGER_SHARED)
        total = shutil.disk_usage(folder).total
    found = f"{folder} has {total / 2**20:,.0f} MiB"
    if total < SHARED_NEEDED and several:
        return fail(name, f"{found}: too little for several GPUs", LARGER_SHARED)
    if total < SHARED_WANTED:
        return warning(name, f"{found}: little for several processes or loader workers", LARGER_SHARED)
    return ok(name, f"{folder} has {gib(total)} GiB")


def check_handles(limits: tuple[int, int]) -> Finding:
    """Files and sockets that a process may have open: soft and hard limit."""
    soft, hard = limits
    if soft == resource.RLIM_INFINITY:
        return ok("file handles", "unlimited")
    found = f"{soft:,} at once"
    more = "ulimit -n 65536" if hard == resource.RLIM_INFINITY or hard >= 65536 else f"ulimit -n {hard}"
    if soft < HANDLES_NEEDED:
        return fail("file handles", f"{found}: a run opens more", more)
    if soft < HANDLES_WANTED:
        return warning("file handles", f"{found}: several ranks with loader workers may open more", more)
    return ok("file handles", found)


def check_file_size(limit: int) -> Finding:
    """The largest file that a process may write."""
    if limit == resource.RLIM_INFINITY:
        return ok("file size", "unlimited")
    return warning(
        "file size", f"files end at {limit / 2**20:,.0f} MiB", "ulimit -f unlimited, or checkpoints break off"
    )
