"""The device that one process trains on, seen without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU, or the CPU.

    `capability` is the CUDA compute capability, (0, 0) on a CPU; `memory_bytes` is the device's whole memory;
    `uuid` names the GPU whatever CUDA_VISIBLE_DEVICES says.
    """

    kind: str
    name: str
    memory_bytes: int = 0
    capability: tuple[int, int] = (0, 0)
    uuid: str = ""

    @property
    def has_bf16(self) -> bool:
        """bf16 matrix units: Ampere and newer; a CPU runs it in software or AMX."""
        return self.kind == "cpu" or self.capability >= (8, 0)


CPU = Accelerator(kind="cpu", name="CPU")


def probe_gpus(environ: Mapping[str, str]) -> list[Accelerator]:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; empty without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver library, no device: all mean that NVML sees no GPU
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        gpus = []
        for index in _visible(environ.get("CUDA_VISIBLE_DEVICES"), uuids):
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handles[index])
            gpus.append(
                Accelerator(
                    kind="cuda",
                    name=_text(pynvml.nvmlDeviceGetName(handles[index])),
                    memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handles[index]).total),
                    capability=(major, minor),
                    uuid=uuids[index],
                )
            )
        return gpus
    finally:
        pynvml.nvmlShutdown()


def _visible(setting: str | None, uuids: list[str]) -> list[int]:
    """Positions that CUDA shows: like CUDA itself, the list ends at the first entry that names no device."""
    if setting is None:
        return list(range(len(uuids)))
    shown: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        found = [i for i, uuid in enumerate(uuids) if entry == str(i) or (len(entry) > 4 and uuid.startswith(entry))]
        if not found:
            break
        shown.append(found[0])
    return shown


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
