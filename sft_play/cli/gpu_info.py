"""`make gpu-info`: what this machine has to train on: GPUs, links, driver, CPU, memory, disk, installed versions."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sft_play.cli.options import Options
from sft_play.facts.backends import unsloth_folder, unsloth_installed, versions_of
from sft_play.facts.gpu_state import DriverState, GpuState, probe_gpu_state
from sft_play.facts.hardware import GIB, Gpu, Hardware, LinkKind
from sft_play.facts.probe import probe_hardware
from sft_play.facts.ram import probe_free_ram_bytes

JSON_VERSION = 1
STACK = (
    "torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "deepspeed", "datasets", "tokenizers",
    "safetensors", "tensorboard", "nvidia-ml-py",
)  # fmt: skip
# Named where they are installed, and missed by nobody where they are not.
EXTRAS = ("flash-attn", "liger-kernel", "kernels", "triton")
# What the environment for `tuning.backend: unsloth` is told by.
UNSLOTH = ("unsloth", "trl", "transformers", "torch")
WITHOUT_GPU = "without a GPU training runs on the CPU; HARDWARE=1xRTX4090 plans for a card that is elsewhere"


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """Everything that `gpu-info` shows."""

    hardware: Hardware
    state: DriverState
    cpu_name: str
    ram_free_bytes: int
    disk_path: Path
    disk_total_bytes: int
    disk_free_bytes: int
    versions: dict[str, str]
    notes: tuple[str, ...]


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print what the machine has; no GPU is said, and is no error.

    Raises:
        EnvironmentProblem: CUDA_VISIBLE_DEVICES names a GPU that is not there.
    """
    parser = Options(prog="make gpu-info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the same for programs")
    options = parser.parse_args(list(argv))
    info = collect(environ)
    print(json.dumps(info_as_json(info), indent=2) if options.json else "\n".join(render_info(info)))
    return 0


def collect(environ: Mapping[str, str]) -> MachineInfo:
    """Ask NVML or AMD's tools, the system and the installed packages' metadata; nothing of the stack is imported."""
    hardware = probe_hardware(environment=environ)
    disk = shutil.disk_usage(Path.cwd())
    versions = stack_versions()
    return MachineInfo(
        hardware=hardware,
        state=probe_gpu_state(hardware.gpus, environment=environ),
        cpu_name=cpu_name(),
        ram_free_bytes=probe_free_ram_bytes(),
        disk_path=Path.cwd(),
        disk_total_bytes=disk.total,
        disk_free_bytes=disk.free,
        versions=versions,
        notes=(*hardware.notes, *_notes(hardware, versions)),
    )


def _notes(hardware: Hardware, versions: Mapping[str, str]) -> Iterator[str]:
    if not hardware.gpus:
        yield WITHOUT_GPU
    elif versions["torch"].endswith("+cpu"):
        yield "torch is a build for CPUs and will use none of these GPUs; make install TORCH_INDEX= takes another"
    if hardware.unequal:
        yield "these GPUs are unequal: a run over several is bound by the smallest and the slowest"
    yield unsloth_words()
    for gpu in hardware.gpus:
        if not gpu.flops:
            yield f"GPU {gpu.index} is not in the catalog: its speed is unknown, plans for it show memory only"


def unsloth_words() -> str:
    """Whether the environment for `tuning.backend: unsloth` is there, and what it holds."""
    if not unsloth_installed():
        return "unsloth has no environment here; make install-unsloth makes it"
    found = versions_of("unsloth", UNSLOTH)
    return f"unsloth's environment {unsloth_folder().name}: {', '.join(f'{one} {two}' for one, two in found.items())}"


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def stack_versions() -> dict[str, str]:
    """Versions by package: Python's, the stack's (`not installed` where one is missing) and what extras there are."""
    found = {name: _version(name) for name in (*STACK, *EXTRAS)}
    return {"python": platform.python_version()} | {
        name: number or "not installed" for name, number in found.items() if number or name in STACK
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def render_info(info: MachineInfo) -> Iterator[str]:
    """The page, line by line."""
    hardware, state = info.hardware, info.state
    yield f"Number of GPUs: {len(hardware.gpus)}"
    for gpu in hardware.gpus:
        yield from _gpu_lines(gpu, state.gpus[gpu.uuid])
    rows = [
        ("links", _links(hardware)),
        ("driver", _driver(info)),
        ("CPU", f"{hardware.cpu_cores} cores, {info.cpu_name}"),
        ("RAM", f"{gib(hardware.ram_bytes)} GiB, {gib(info.ram_free_bytes)} free"),
        ("disk", f"{gib(info.disk_total_bytes)} GiB, {gib(info.disk_free_bytes)} free, at {info.disk_path}"),
    ]
    yield ""
    yield from (f"{name:<8}{text}" for name, text in rows)
    yield ""
    yield from (f"{name:<14}{number}" for name, number in info.versions.items())
    if info.notes:
        yield ""
        yield from (f"note: {note}" for note in info.notes)


def _driver(info: MachineInfo) -> str:
    if not info.state.driver:
        return "none seen"
    if info.hardware.gpus and info.hardware.gpus[0].amd:
        return f"amdgpu {info.state.driver}"
    return f"{info.state.driver}, runs CUDA up to {info.state.cuda or 'unknown'}"


def _gpu_lines(gpu: Gpu, state: GpuState) -> Iterator[str]:
    yield f"  GPU {gpu.index}: {gpu.name}, {gib(gpu.memory_bytes)} GiB, {gib(state.used_bytes)} in use"
    capability = f"compute capability {gpu.compute_capability or 'unknown'}"
    yield f"    {capability}, bf16 {_yes(gpu.bf16)}, fp8 {_yes(gpu.fp8)}"
    nvlinks = f"{state.nvlinks} NVLinks active" if state.nvlinks else "no NVLink"
    beside = "xGMI unknown" if gpu.amd else f"{nvlinks}, {gpu.uuid}"
    yield f"    {state.pcie or 'PCIe unknown'}, {beside}"


def _links(hardware: Hardware) -> str:
    if hardware.link is LinkKind.NONE:
        return "none: fewer than two GPUs"
    amd = hardware.gpus[0].amd
    fast, slow = ("xGMI by the catalog", "PCIe") if amd else ("NVLink", "PCIe, no NVLink")
    kind = {LinkKind.NVLINK: fast, LinkKind.PCIE: slow}[hardware.link]
    return f"{kind}, about {hardware.link_bytes_per_second / 1e9:,.0f} GB/s each way per GPU"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def gib(number: int) -> str:
    """Bytes as GiB with one decimal."""
    return f"{number / GIB:,.1f}"


def info_as_json(info: MachineInfo) -> dict[str, Any]:
    """The page for programs: bytes and bytes a second, null where unknown; `version` rises when a field changes."""
    hardware, state = info.hardware, info.state
    return {
        "version": JSON_VERSION,
        "number_of_gpus": len(hardware.gpus),
        "gpus": [_gpu_as_json(gpu, state.gpus[gpu.uuid]) for gpu in hardware.gpus],
        "link": {"kind": hardware.link.value, "bytes_per_second": hardware.link_bytes_per_second or None},
        "driver": state.driver or None,
        "cuda": state.cuda or None,
        "cpu": {"name": info.cpu_name, "cores": hardware.cpu_cores},
        "ram": {"total_bytes": hardware.ram_bytes, "free_bytes": info.ram_free_bytes},
        "disk": {
            "path": str(info.disk_path),
            "total_bytes": info.disk_total_bytes,
            "free_bytes": info.disk_free_bytes,
        },
        "versions": {name: None if text == "not installed" else text for name, text in info.versions.items()},
        "notes": list(info.notes),
    }


def _gpu_as_json(gpu: Gpu, state: GpuState) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "mig": gpu.mig,
        "memory_bytes": gpu.memory_bytes,
        "used_bytes": state.used_bytes,
        "free_bytes": state.free_bytes,
        "compute_capability": gpu.compute_capability or None,
        "bf16": gpu.bf16,
        "fp8": gpu.fp8,
        "pcie": state.pcie or None,
        "nvlinks": state.nvlinks,
    }
