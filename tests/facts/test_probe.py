"""Probing through a stand-in for NVML: unequal GPUs, MIG slices, visibility, and no GPU at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.errors import EnvironmentProblem
from sft_play.facts.hardware import GIB, LinkKind
from sft_play.facts.probe import probe_hardware


class FakeNvml:
    """The calls that the probe makes, over a list of cards."""

    class NVMLError(Exception):
        pass

    def __init__(self, *cards: dict[str, Any], broken: bool = False) -> None:
        self.cards, self.broken, self.open = cards, broken, 0

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.cards[index]

    def nvmlDeviceGetName(self, card: dict[str, Any]) -> str:
        return str(card["name"])

    def nvmlDeviceGetMemoryInfo(self, card: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(total=card["gib"] * GIB, used=card.get("used", 0) * GIB)

    def nvmlDeviceGetCudaComputeCapability(self, card: dict[str, Any]) -> tuple[int, int]:
        return tuple(card["capability"])  # type: ignore[return-value]

    def nvmlDeviceGetUUID(self, card: dict[str, Any]) -> bytes:
        return str(card["uuid"]).encode()

    def nvmlDeviceGetMigMode(self, card: dict[str, Any]) -> tuple[int, int]:
        if "slices" not in card:
            raise self.NVMLError("Not Supported")
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, card: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: dict[str, Any], number: int) -> dict[str, Any]:
        if number >= len(card["slices"]):
            raise self.NVMLError("Not Found")
        return dict(card["slices"][number])

    def nvmlDeviceGetNvLinkState(self, card: dict[str, Any], link: int) -> int:
        if link >= card.get("links", 0):
            raise self.NVMLError("Invalid Argument")
        return 1


A100 = {"name": "NVIDIA A100-SXM4-80GB", "gib": 80, "capability": (8, 0), "uuid": "GPU-aaaa-1", "links": 12, "used": 1}
A100_B = {**A100, "uuid": "GPU-aabb-2"}
RTX = {"name": "NVIDIA GeForce RTX 3090", "gib": 24, "capability": (8, 6), "uuid": "GPU-cccc-3"}
MIG = {
    **A100, "uuid": "GPU-dddd-4",
    "slices": [{"gib": 40, "uuid": "MIG-e5"}, {"gib": 20, "uuid": "MIG-f6"}],
}  # fmt: skip


def test_no_gpu_is_said_and_is_no_error() -> None:
    hardware = probe_hardware(environment={}, nvml=FakeNvml(broken=True))
    assert hardware.gpus == ()
    assert "no GPU seen by NVML" in hardware.notes[0]
    assert hardware.cpu_cores >= 1
    assert hardware.ram_bytes > 0


def test_the_real_library_answers_on_any_machine() -> None:
    assert probe_hardware().world_size >= 1


def test_cards_are_found_with_what_is_used_and_how_they_are_linked() -> None:
    nvml = FakeNvml(A100, A100_B)
    hardware = probe_hardware(environment={}, nvml=nvml)
    assert [gpu.uuid for gpu in hardware.gpus] == ["GPU-aaaa-1", "GPU-aabb-2"]
    assert hardware.gpus[0].used_bytes == GIB
    assert (hardware.link, hardware.link_bytes_per_second) == (LinkKind.NVLINK, 300e9)
    assert hardware.gpus[0].flops == 312e12
    assert nvml.open == 0


def test_unequal_gpus_are_seen_and_the_smallest_counts() -> None:
    hardware = probe_hardware(environment={}, nvml=FakeNvml(A100, RTX))
    assert hardware.unequal
    assert hardware.smallest_gpu_bytes < 24 * GIB
    assert hardware.link is LinkKind.PCIE


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        ("1", ["GPU-aabb-2"]),
        ("1,0", ["GPU-aabb-2", "GPU-aaaa-1"]),
        ("GPU-aab", ["GPU-aabb-2"]),
        ("0,-1,1", ["GPU-aaaa-1"]),
        ("", []),
    ],
)
def test_visible_devices_by_index_and_uuid(visible: str, uuids: list[str]) -> None:
    hardware = probe_hardware(environment={"CUDA_VISIBLE_DEVICES": visible}, nvml=FakeNvml(A100, A100_B))
    assert [gpu.uuid for gpu in hardware.gpus] == uuids


@pytest.mark.parametrize("visible", ["7", "0,0", "GPU-zz", "GPU-aa"])
def test_a_gpu_that_is_not_there_is_an_error(visible: str) -> None:
    with pytest.raises(EnvironmentProblem, match="CUDA_VISIBLE_DEVICES"):
        probe_hardware(environment={"CUDA_VISIBLE_DEVICES": visible}, nvml=FakeNvml(A100, A100_B))


def test_mig_slices_count_as_small_gpus_of_which_cuda_sees_one() -> None:
    hardware = probe_hardware(environment={}, nvml=FakeNvml(MIG))
    assert [gpu.uuid for gpu in hardware.gpus] == ["MIG-e5"]
    named = probe_hardware(environment={"CUDA_VISIBLE_DEVICES": "MIG-f6"}, nvml=FakeNvml(MIG))
    assert named.gpus[0].memory_bytes == 20 * GIB
    assert named.gpus[0].flops < 312e12 / 3


def test_an_unknown_card_has_its_memory_and_no_rates() -> None:
    odd = {"name": "NVIDIA Future 9000", "gib": 48, "capability": (13, 0), "uuid": "GPU-x"}
    gpu = probe_hardware(environment={}, nvml=FakeNvml(odd)).gpus[0]
    assert (gpu.memory_bytes, gpu.flops, gpu.bf16) == (48 * GIB, 0.0, True)
