"""Memory of this machine, within what the control group allows."""

from __future__ import annotations

from pathlib import Path


def probe_ram_bytes() -> int:
    """Memory this process may use: the machine's, or the control group's limit where that is lower."""
    total = 0
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        total = int(meminfo.read_text(encoding="utf-8").split("MemTotal:")[1].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text(encoding="utf-8").strip()).isdigit():
        total = min(total, int(text)) if total else int(text)
    return total


def probe_free_ram_bytes() -> int:
    """Memory that a new process could take now: what the kernel calls available, within the control group's limit."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return 0
    free = int(meminfo.read_text(encoding="utf-8").split("MemAvailable:")[1].split()[0]) * 1024
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit.is_file() and used.is_file() and (text := limit.read_text(encoding="utf-8").strip()).isdigit():
        held = int(used.read_text(encoding="utf-8")) - _reclaimable_bytes()
        free = min(free, max(0, int(text) - held))
    return free


def _reclaimable_bytes() -> int:
    """Cached file pages that the control group gives back when asked."""
    stat = Path("/sys/fs/cgroup/memory.stat")
    lines = stat.read_text(encoding="utf-8").splitlines() if stat.is_file() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
