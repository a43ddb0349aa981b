"""What the devices of a machine say while it trains: NVML is asked in a thread, torch and the kernel when a step is
logged."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from sft_play.facts import probe
from sft_play.facts.hardware import GIB

EVERY_SECONDS = 2.0
# A driver that does not answer any more must not keep a finished run.
CLOSE_SECONDS = 10.0
# The card, its board or its power supply lowers the clock: hardware slowdown, software and hardware thermal, brake.
# The power limit is none of them: every large training reaches it.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
READINGS = ("memory_device_gib", "utilization_percent", "power_watts", "temperature_celsius", "clock_mhz", "throttled")
# Where an interval holds several samples: the largest counts; of the others the mean.
LARGEST = ("memory_device_gib", "temperature_celsius", "throttled")

Readings = dict[str, float]


class Sensors:
    """Samples the GPUs of this machine until it is closed. A GPU that errors is left alone from then on.

    Args:
        uuids: of the GPUs to look at; the thread starts only where there are any, and NVML.
        every: seconds between two samples.
        nvml: a stand-in for the pynvml module, for tests.
    """

    def __init__(self, uuids: Sequence[str], *, every: float = EVERY_SECONDS, nvml: Any = None) -> None:
        self._uuids, self._every = tuple(uuids), every
        self._nvml: Any = (nvml or probe.load_nvml()) if uuids else None
        self._handles: dict[int, Any] = {}
        self._samples: list[list[Readings]] = [[] for _ in uuids]
        self._latest: list[Readings] = [{} for _ in uuids]
        self._lock, self._closed = threading.Lock(), threading.Event()
        self.failed: dict[int, str] = {}
        self._thread: threading.Thread | None = None
        if self._nvml is not None and self._open():
            self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)
            self._thread.start()

    def take(self) -> list[Readings]:
        """Each GPU's readings since the last call, else its latest; empty for one that failed."""
        with self._lock:
            held = [samples or [latest] for samples, latest in zip(self._samples, self._latest, strict=True)]
            self._latest = [samples[-1] for samples in held]
            self._samples = [[] for _ in held]
        return [_summed_up(samples) for samples in held]

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            self._thread = None

    def _open(self) -> bool:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError:
            return False
        return True

    def _run(self) -> None:
        try:
            while True:
                for number in range(len(self._uuids)):
                    self._sample(number)
                if self._closed.wait(self._every):
                    return
        finally:
            self._nvml.nvmlShutdown()

    def _sample(self, number: int) -> None:
        if number in self.failed:
            return
        try:
            if number not in self._handles:
                self._handles[number] = self._nvml.nvmlDeviceGetHandleByUUID(self._uuids[number])
            found = read_gpu(self._nvml, self._handles[number])
        except Exception as error:  # a driver's fault is no reason to stop a run
            with self._lock:
                self.failed[number] = f"{type(error).__name__}: {error}"
                self._samples[number], self._latest[number] = [], {}
            return
        with self._lock:
            self._samples[number].append(found)


def read_gpu(nvml: Any, handle: Any) -> Readings:
    """One GPU now; what this card does not tell is left out.

    Raises:
        nvml.NVMLError: the card does not even tell its memory.
    """
    found = {"memory_device_gib": int(nvml.nvmlDeviceGetMemoryInfo(handle).used) / GIB}
    older: Any = getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
    reasons: Any = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", older)
    asked: dict[str, Callable[[], float]] = {
        "utilization_percent": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_celsius": lambda: float(nvml.nvmlDeviceGetTemperature(handle, 0)),  # 0: the chip's own sensor
        "clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, 1)),  # 1: the streaming multiprocessors'
        "throttled": lambda: float(bool(reasons(handle) & THROTTLED)),
    }
    for name, ask in asked.items():
        try:
            found[name] = ask()
        except (nvml.NVMLError, AttributeError, TypeError):
            continue
    return found


def _summed_up(samples: Sequence[Readings]) -> Readings:
    names = {name: None for one in samples for name in one}
    values = {name: [one[name] for one in samples if name in one] for name in names}
    return {name: max(held) if name in LARGEST else fmean(held) for name, held in values.items()}


def resident_bytes() -> int:
    """Resident set of this process now; 0 where /proc is not there."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


PHASES = ("load", "train", "evaluate", "save")


class Phases:
    """The most memory of each device of this process by phase, in bytes; on a CPU the resident set when it ended.

    Args:
        gpus: numbers of this process's GPUs; none on a CPU.

    Attributes:
        peaks: by phase, a number for each device of the process.
        resident: bytes of this process when it was last looked at.
        allocated, reserved: the most that torch held on the first GPU in any phase: each phase begins torch's count
            anew.
    """

    def __init__(self, gpus: Sequence[int] = ()) -> None:
        self.gpus, self.peaks = tuple(gpus), dict[str, list[float]]()
        self.allocated = self.reserved = self.resident = 0
        self.phase, self._since, self._measured = "load", time.monotonic(), 0.0

    def enter(self, phase: str) -> float:
        """The current phase ends; returns the seconds that it took."""
        self.measure()
        now = time.monotonic()
        seconds, self.phase, self._since = now - self._since, phase, now
        for gpu in self.gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        return seconds

    def measure(self, *, at_least_every: float = 0.0) -> None:
        """Book what the current phase has reached, unless that was done so many seconds ago or less."""
        if time.monotonic() - self._measured < at_least_every:
            return
        self._measured = time.monotonic()
        self.resident = resident_bytes()
        found = [float(device_peak(gpu)) for gpu in self.gpus] or [float(self.resident)]
        held = self.peaks.get(self.phase, [0.0] * len(found))
        self.peaks[self.phase] = [max(pair) for pair in zip(held, found, strict=True)]
        for gpu in self.gpus[:1]:
            self.allocated = max(self.allocated, torch.cuda.max_memory_allocated(gpu))
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(gpu))


def device_peak(number: int) -> int:
    """The most that a GPU held since its count was reset: torch's reserved peak and what is used beside it now."""
    free, total = torch.cuda.mem_get_info(number)
    return total - free - torch.cuda.memory_reserved(number) + torch.cuda.max_memory_reserved(number)
