"""`probe_gpu_state`: the driver, the memory in use on each GPU and the processes that hold it.

Through NVML, or through AMD's tools where the GPUs are AMD's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_play.facts import probe
from sft_play.facts.amd import AmdCard, probe_amd
from sft_play.facts.hardware import Gpu


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process on a GPU.

    Attributes:
        name: the program's file name; empty where the system does not tell (a process of another container).
        used_bytes: its GPU memory; None where the driver does not tell.
    """

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One GPU now.

    Attributes:
        free_bytes: what a new process could allocate.
        pcie: generation and lanes, such as `PCIe 4.0 x16`; empty where unknown. For AMD's the address too.
        nvlinks: active NVLinks.
    """

    used_bytes: int
    free_bytes: int
    pcie: str = ""
    nvlinks: int = 0
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DriverState:
    """The driver and the state of each GPU by UUID; all empty without a GPU.

    Attributes:
        cuda: the newest CUDA version that the driver runs.
    """

    driver: str = ""
    cuda: str = ""
    gpus: dict[str, GpuState] = field(default_factory=dict)


def probe_gpu_state(
    gpus: tuple[Gpu, ...], *, environment: Mapping[str, str] | None = None, nvml: Any = None
) -> DriverState:
    """Driver, and memory and processes of these GPUs.

    Args:
        gpus: as `probe_hardware` found them.
        environment: read for the PATH of AMD's tools; `os.environ` by default.
        nvml: a stand-in for the pynvml module, for tests.
    """
    if gpus and gpus[0].amd:
        answer = probe_amd(os.environ if environment is None else environment)
        cards = {str(card.index): card for card in answer.cards}
        states = {gpu.uuid: _amd_state(gpu, cards.get(gpu.uuid)) for gpu in gpus}
        return DriverState(driver=answer.driver, gpus=states)
    library = nvml or probe.load_nvml()
    if library is None:
        return DriverState()
    try:
        library.nvmlInit()
    except library.NVMLError:
        return DriverState()
    try:
        cuda = _ask(library, 0, library.nvmlSystemGetCudaDriverVersion)
        return DriverState(
            driver=_ask(library, "", library.nvmlSystemGetDriverVersion),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            gpus={gpu.uuid: _state(library, gpu) for gpu in gpus},
        )
    finally:
        library.nvmlShutdown()


def _state(nvml: Any, gpu: Gpu) -> GpuState:
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    used = int(memory.used)
    return GpuState(
        used_bytes=used,
        free_bytes=max(0, min(gpu.memory_bytes, int(memory.total) - used)),
        pcie=_pcie(nvml, handle),
        nvlinks=probe.count_nvlinks(nvml, handle),
        processes=_processes(nvml, handle),
    )


def _amd_state(gpu: Gpu, card: AmdCard | None) -> GpuState:
    """A card that the tool no longer answers for keeps what was last known of it."""
    used = card.used_bytes if card else gpu.used_bytes
    return GpuState(
        used_bytes=used,
        free_bytes=max(0, gpu.memory_bytes - used),
        pcie=", ".join(filter(None, (card.pcie, card.bus))) if card else "",
        processes=tuple(
            GpuProcess(pid=one.pid, name=one.name, used_bytes=one.used_bytes)
            for one in (card.processes if card else ())
        ),
    )


def _pcie(nvml: Any, handle: Any) -> str:
    generation = _ask(nvml, 0, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lanes = _ask(nvml, 0, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    return f"PCIe {generation}.0 x{lanes}" if generation and lanes else ""


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    """Compute and graphics processes, the largest first; one that is both counts once, by its larger figure."""
    found: dict[int, int | None] = {}
    for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for one in _ask(nvml, [], ask, handle):
            found[one.pid] = max(found.get(one.pid) or 0, one.usedGpuMemory or 0) or None
    ordered = sorted(found.items(), key=lambda item: -(item[1] or 0))
    return tuple(GpuProcess(pid=pid, name=_name(nvml, pid), used_bytes=used) for pid, used in ordered)


def _name(nvml: Any, pid: int) -> str:
    """The program alone: its arguments may hold secrets."""
    told = _ask(nvml, "", nvml.nvmlSystemGetProcessName, pid)
    name = told.decode(errors="replace") if isinstance(told, bytes) else told
    if not name:
        comm = Path(f"/proc/{pid}/comm")
        name = comm.read_text(encoding="utf-8", errors="replace").strip() if comm.is_file() else ""
    return name.split(" ")[0].rsplit("/", 1)[-1]


def _ask(nvml: Any, default: Any, call: Callable[..., Any], *args: Any) -> Any:
    """The answer, or the default where this driver or card has none."""
    try:
        return call(*args)
    except nvml.NVMLError:
        return default
