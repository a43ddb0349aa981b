"""`probe_hardware`: this machine's GPUs by NVML or AMD's tools, its CPU and RAM. Works, and says so, without one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sft_play.errors import EnvironmentProblem
from sft_play.facts.amd import AmdAnswer, AmdCard, probe_amd
from sft_play.facts.hardware import (
    DEFAULT_NETWORK_BYTES_PER_SECOND,
    PCIE_BYTES_PER_SECOND,
    Gpu,
    Hardware,
    LinkKind,
    find_gpu,
    link_of,
)
from sft_play.facts.packages import installed_packages
from sft_play.facts.ram import probe_ram_bytes

# One NVLink, one direction, by compute capability's major number: NVLink 2 and 3 25 GB/s, 4 25 GB/s, 5 50 GB/s.
_NVLINK_BYTES_PER_SECOND = {7: 25e9, 8: 25e9, 9: 25e9, 10: 50e9}
_MAX_NVLINKS = 18
ALL_HIDDEN = "CUDA_VISIBLE_DEVICES hides every GPU"
AMD_UNCHECKED = (
    "AMD GPUs: links and rates are the catalog's, training needs torch's ROCm build, and no plan for them is checked "
    "against a measured run"
)


def probe_hardware(*, environment: Mapping[str, str] | None = None, nvml: Any = None) -> Hardware:
    """This machine, with the GPUs that CUDA_VISIBLE_DEVICES (for AMD also HIP_VISIBLE_DEVICES) leaves visible.

    AMD's tools are asked only where NVML finds no GPU.

    Args:
        environment: read for those two and for PATH; `os.environ` by default.
        nvml: a stand-in for the pynvml module, for tests.

    Raises:
        EnvironmentProblem: one of them names a GPU that is not there.
    """
    env = os.environ if environment is None else environment
    gpus, notes, links = _probe_gpus(nvml or load_nvml(), env.get("CUDA_VISIBLE_DEVICES"))
    kind, speed = _link(gpus, links)
    if not gpus and notes != (ALL_HIDDEN,):
        answer = probe_amd(env)
        gpus, amd_notes = _amd_gpus(answer, env)
        kind, speed = link_of(gpus[0], len(gpus)) if gpus else (LinkKind.NONE, 0.0)
        # NVML has nothing to say of a machine whose cards are AMD's.
        notes = amd_notes if answer.cards else (*notes, *amd_notes)
    network = gpus[0].network_bytes_per_second if gpus else 0.0
    installed = installed_packages() if gpus else frozenset()
    return Hardware(
        gpus=tuple(replace(gpu, packages=installed) for gpu in gpus),
        link=kind,
        link_bytes_per_second=speed,
        network_bytes_per_second=network or DEFAULT_NETWORK_BYTES_PER_SECOND,
        ram_bytes=probe_ram_bytes(),
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        notes=notes,
    )


# What a driver leaves on the machine whether or not its library can be asked.
_DEVICE_FILES = ("/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/kfd")


def refuse_hidden_gpus(hardware: Hardware, environment: Mapping[str, str]) -> None:
    """A GPU that is there and cannot be asked is an error: hours on the CPU are not what anyone wants.

    `CUDA_VISIBLE_DEVICES=` (empty) or `-1` says that the CPU is meant.

    Raises:
        EnvironmentProblem: a driver is there and none of its GPUs is seen.
    """
    hidden = environment.get("CUDA_VISIBLE_DEVICES")
    if hardware.gpus or (hidden is not None and hidden.strip() in ("", "-1")):
        return
    if found := [name for name in _DEVICE_FILES if Path(name).exists()]:
        raise EnvironmentProblem(
            f"{found[0]} is there and no GPU is seen ({'; '.join(hardware.notes) or 'the driver names none'})",
            where="GPU",
            fix="try nvidia-smi (rocm-smi); CUDA_VISIBLE_DEVICES= trains on the CPU",
        )


def load_nvml() -> Any:
    """The pynvml module; None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _probe_gpus(nvml: Any, visible: str | None) -> tuple[tuple[Gpu, ...], tuple[str, ...], float]:
    """GPUs, notes, and the slowest NVLink rate between them (0 where a pair has none)."""
    if nvml is None:
        return (), ("nvidia-ml-py is not installed: GPUs, if any, are unknown",), 0.0
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), (f"no GPU seen by NVML ({error}): memory, links and rates are unknown",), 0.0
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        found = [unit for index, handle in enumerate(handles) for unit in _units(nvml, handle, index)]
        chosen = choose_visible([gpu for gpu, _ in found], visible)
        parents = {gpu.index: handle for gpu, handle in found}
        rate = min((_nvlink_rate(nvml, parents[gpu.index], gpu) for gpu in chosen), default=0.0)
        notes = () if found else ("NVML answers and lists no GPU",)
        if found and not chosen:
            notes = (ALL_HIDDEN,)
        return chosen, notes, rate
    finally:
        nvml.nvmlShutdown()


def _units(nvml: Any, handle: Any, index: int) -> list[tuple[Gpu, Any]]:
    """The GPU itself, or its MIG slices where it is cut into some."""
    whole = _gpu(nvml, handle, index)
    try:
        mode, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        mode = 0
    if not mode:
        return [(whole, handle)]
    return [(_slice(nvml, part, whole), handle) for part in _mig_handles(nvml, handle)]


def _mig_handles(nvml: Any, handle: Any) -> list[Any]:
    parts = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
        except nvml.NVMLError:
            continue  # a slot without a slice
    return parts


def _gpu(nvml: Any, handle: Any, index: int) -> Gpu:
    name = _text(nvml.nvmlDeviceGetName(handle))
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = _capability(nvml, handle)
    known = find_gpu(name, int(memory.total))
    unknown = Gpu(name=name, family="unknown", memory_bytes=0, flops=0.0, bandwidth=0.0, bf16=major >= 8)
    return replace(
        known or unknown,
        name=name,
        memory_bytes=min(int(memory.total), known.memory_bytes) if known else int(memory.total),
        used_bytes=int(memory.used),
        compute_capability=f"{major}.{minor}" if major else "",
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
    )


def _slice(nvml: Any, part: Any, whole: Gpu) -> Gpu:
    """A MIG slice: its own memory, and of the rates the share that its memory is of the whole's."""
    memory = nvml.nvmlDeviceGetMemoryInfo(part)
    share = min(1.0, int(memory.total) / max(1, whole.memory_bytes))
    return replace(
        whole,
        name=f"{whole.name} MIG slice",
        uuid=_text(nvml.nvmlDeviceGetUUID(part)),
        memory_bytes=int(memory.total),
        used_bytes=int(memory.used),
        flops=whole.flops * share,
        bandwidth=whole.bandwidth * share,
        nvlink_bytes_per_second=0.0,
        mig=True,
    )


def _capability(nvml: Any, handle: Any) -> tuple[int, int]:
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except nvml.NVMLError:
        return 0, 0
    return int(major), int(minor)


def _amd_gpus(answer: AmdAnswer, env: Mapping[str, str]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """The cards that are visible, and notes. HIP's own variable goes before CUDA's, which it reads as well."""
    found = [_amd_gpu(card) for card in answer.cards]
    variable = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in env else "CUDA_VISIBLE_DEVICES"
    chosen = choose_visible(found, env.get(variable), variable=variable) if found else ()
    if not found:
        return (), answer.notes
    return chosen, (*answer.notes, AMD_UNCHECKED if chosen else f"{variable} hides every GPU")


def _amd_gpu(card: AmdCard) -> Gpu:
    known = find_gpu(card.name, card.total_bytes)
    unknown = Gpu(name=card.name, family="unknown", memory_bytes=0, flops=0.0, bandwidth=0.0, bf16=card.bf16)
    return replace(
        known or unknown,
        name=card.name,
        memory_bytes=min(card.total_bytes, known.memory_bytes) if known else card.total_bytes,
        used_bytes=card.used_bytes,
        compute_capability=card.capability or (known.compute_capability if known else ""),
        index=card.index,
        uuid=str(card.index),
        amd=True,
    )


def choose_visible(gpus: list[Gpu], visible: str | None, *, variable: str = "CUDA_VISIBLE_DEVICES") -> tuple[Gpu, ...]:
    """What CUDA_VISIBLE_DEVICES leaves, in its order: indices, UUIDs or their beginnings; -1 or nothing ends it.

    A MIG slice is visible by its UUID only; where nothing is said, CUDA sees the first slice alone.

    Args:
        variable: what an error calls the list of visible GPUs.

    Raises:
        EnvironmentProblem: an entry that names no GPU of this machine, or one named twice.
    """
    if visible is None:
        whole = [gpu for gpu in gpus if not gpu.mig]
        return tuple(whole or gpus[:1])
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry in {"", "-1", "NoDevFiles", "none"}:
            break
        gpu = _named(gpus, entry)
        if gpu is None or gpu in chosen:
            reason = "names a GPU twice" if gpu else f"names {entry!r}, which is not among this machine's {len(gpus)}"
            tool = "amd-smi list shows them" if gpus and gpus[0].amd else "nvidia-smi -L shows them"
            raise EnvironmentProblem(f"it {reason}", where=variable, fix=f"give indices or UUIDs as {tool}")
        chosen.append(gpu)
    return tuple(chosen)


def _named(gpus: list[Gpu], entry: str) -> Gpu | None:
    if entry.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(entry)), None)
    matches = [gpu for gpu in gpus if gpu.uuid.lower().startswith(entry.lower())]
    return matches[0] if len(matches) == 1 else None


def _nvlink_rate(nvml: Any, handle: Any, gpu: Gpu) -> float:
    """Bytes a second, one direction, over all active NVLinks of a GPU."""
    if gpu.mig or not gpu.compute_capability:
        return 0.0
    rate = _NVLINK_BYTES_PER_SECOND.get(int(gpu.compute_capability.split(".")[0]), 25e9)
    return count_nvlinks(nvml, handle) * rate


def count_nvlinks(nvml: Any, handle: Any) -> int:
    """Active NVLinks of a GPU."""
    active = 0
    for link in range(_MAX_NVLINKS):
        try:
            active += int(nvml.nvmlDeviceGetNvLinkState(handle, link) == 1)
        except nvml.NVMLError:
            break
    return active


def _link(gpus: tuple[Gpu, ...], nvlink_rate: float) -> tuple[LinkKind, float]:
    if len(gpus) < 2:
        return LinkKind.NONE, 0.0
    if nvlink_rate:
        return LinkKind.NVLINK, nvlink_rate
    slowest = min(gpu.pcie_generation for gpu in gpus)
    return LinkKind.PCIE, PCIE_BYTES_PER_SECOND.get(slowest, PCIE_BYTES_PER_SECOND[4])


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
