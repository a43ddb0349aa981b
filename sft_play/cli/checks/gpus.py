"""GPUs, their driver and the links between them, as NVML or AMD's tools tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sft_play.cli.checks.finding import Finding, Scope, failed, ok, warning
from sft_play.cli.gpu_info import WITHOUT_GPU, gib
from sft_play.errors import SftPlayError
from sft_play.facts.gpu_state import DriverState, GpuState, probe_gpu_state
from sft_play.facts.hardware import GIB, Gpu, Hardware, LinkKind
from sft_play.facts.probe import probe_hardware, refuse_hidden_gpus

# What others may hold of a GPU before it is worth a word.
BUSY_BYTES = 2 * GIB


def check_gpus(scope: Scope) -> Iterator[Finding]:
    """Every visible GPU, the driver and the links; a machine without one is asked whether it hides some."""
    try:
        hardware = probe_hardware(environment=scope.environ)
        refuse_hidden_gpus(hardware, scope.environ)
    except SftPlayError as error:
        yield from failed("GPUs", error)
        return
    if not hardware.gpus:
        yield no_gpu(hardware, scope.environ)
        return
    state = probe_gpu_state(hardware.gpus, environment=scope.environ)
    yield from (check_gpu(gpu, state.gpus[gpu.uuid]) for gpu in hardware.gpus)
    yield check_driver(hardware, state)
    yield check_links(hardware)


def no_gpu(hardware: Hardware, environ: Mapping[str, str]) -> Finding:
    """No GPU is fine where the CPU is meant, and worth a word where it may not be."""
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return ok("GPUs", "hidden by CUDA_VISIBLE_DEVICES: training runs on the CPU")
    found = f"none ({'; '.join(hardware.notes) or 'the driver names none'})"
    return warning("GPUs", found, f"{WITHOUT_GPU}; if there is one here, try nvidia-smi or rocm-smi")


def check_gpu(gpu: Gpu, state: GpuState) -> Finding:
    """One card: what it is, whether it can do bf16, whether others fill it."""
    name = f"GPU {gpu.index}"
    found = f"{gpu.name}, {gib(gpu.memory_bytes)} GiB"
    if state.used_bytes > BUSY_BYTES:
        holder = f", by pid {state.processes[0].pid} first" if state.processes else ""
        found += f", {gib(state.used_bytes)} in use{holder}"
        return warning(name, found, "make memory-check shows who holds it; DIST_GPUS= takes others")
    if not gpu.bf16:
        return warning(name, f"{found}, no bf16 on its tensor cores", "train with TRAIN_BF16=false TRAIN_FP16=true")
    return ok(name, f"{found}, compute capability {gpu.compute_capability or 'unknown'}, bf16")


def check_driver(hardware: Hardware, state: DriverState) -> Finding:
    """The driver's version and the CUDA that it runs."""
    if not state.driver:
        return warning("driver", "its version is unknown", "nvidia-smi (rocm-smi) says more")
    if hardware.gpus[0].amd:
        return ok("driver", f"amdgpu {state.driver}")
    return ok("driver", f"{state.driver}, runs CUDA up to {state.cuda or 'unknown'}")


def check_links(hardware: Hardware) -> Finding:
    """How the GPUs reach each other, and whether they are alike."""
    if hardware.link is LinkKind.NONE:
        return ok("links", "none: fewer than two GPUs")
    words = "xGMI" if hardware.gpus[0].amd else "NVLink"
    kind = words if hardware.link is LinkKind.NVLINK else f"PCIe, no {words}"
    found = f"{kind}, planned with {hardware.link_bytes_per_second / 1e9:,.0f} GB/s each way per GPU"
    if hardware.unequal:
        cure = "the smallest and slowest binds a run over several; DIST_GPUS=0,1 takes the equal ones"
        return warning("links", f"{found}; the GPUs are unequal", cure)
    return ok("links", found)
