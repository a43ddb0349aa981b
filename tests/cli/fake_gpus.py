"""A machine with two GPUs for commands that ask NVML."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.facts import probe
from sft_play.facts.hardware import GIB
from tests.facts.test_probe import A100, A100_B, FakeNvml

FIRST = {**A100, "used": 62, "processes": [(4242, "/opt/bin/python train.py --token secret", 60), (99999999, "", None)]}
SECOND = {**A100_B, "used": 1}


class TwoGpus(FakeNvml):
    """What the commands ask beside `probe_hardware`'s questions."""

    def __init__(self, *cards: dict[str, Any]) -> None:
        super().__init__(*(cards or (FIRST, SECOND)))

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54.15"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12040

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        return next(card for card in self.cards if card["uuid"] == uuid)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: dict[str, Any]) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: dict[str, Any]) -> int:
        return 16

    def nvmlDeviceGetComputeRunningProcesses(self, card: dict[str, Any]) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=None if size is None else size * GIB)
            for pid, _, size in card.get("processes", [])
        ]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: dict[str, Any]) -> list[SimpleNamespace]:
        raise self.NVMLError("Not Supported")

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        names = {one[0]: one[1] for card in self.cards for one in card.get("processes", [])}
        if not names.get(pid):
            raise self.NVMLError("Not Found")
        return str(names[pid])


def install(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    """Commands in this process see these GPUs."""
    monkeypatch.setattr(probe, "load_nvml", lambda: nvml)


def cpu_seconds() -> float:
    """Processor time of the finished child processes: what a command costs, however busy the machine is."""
    times = os.times()
    return times.children_user + times.children_system
