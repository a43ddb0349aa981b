"""Sensors through a stand-in for NVML: unequal GPUs, one that errors while the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.facts import probe
from sft_play.runtime.sensors import Phases, Sensors
from tests.cli.fake_gpus import TwoGpus
from tests.facts.test_probe import A100, A100_B

BIG = {**A100, "used": 40, "power": 390_000, "celsius": 71, "clock": 1410, "busy": 97}
SMALL = {
    **A100_B,
    "name": "NVIDIA A10G",
    "gib": 24,
    "used": 8,
    "power": 150_000,
    "celsius": 60,
    "clock": 1700,
    "busy": 50,
}


class Watched(TwoGpus):
    """Two unequal GPUs with sensors; a card whose `gone` is set answers nothing, one without a key lacks the sensor."""

    def _of(self, card: dict[str, Any], key: str) -> Any:
        if card.get("gone") or key not in card:
            raise self.NVMLError("GPU is lost" if card.get("gone") else "Not Supported")
        return card[key]

    def nvmlDeviceGetMemoryInfo(self, card: dict[str, Any]) -> SimpleNamespace:
        self._of(card, "gib")
        return super().nvmlDeviceGetMemoryInfo(card)

    def nvmlDeviceGetUtilizationRates(self, card: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._of(card, "busy"))

    def nvmlDeviceGetPowerUsage(self, card: dict[str, Any]) -> int:
        return int(self._of(card, "power"))

    def nvmlDeviceGetTemperature(self, card: dict[str, Any], sensor: int) -> int:
        return int(self._of(card, "celsius"))

    def nvmlDeviceGetClockInfo(self, card: dict[str, Any], clock: int) -> int:
        return int(self._of(card, "clock"))

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: dict[str, Any]) -> int:
        return int(self._of(card, "reasons"))


def until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("waited five seconds")


def watched(*cards: dict[str, Any]) -> tuple[Watched, Sensors]:
    nvml = Watched(*[dict(card) for card in cards])
    return nvml, Sensors([card["uuid"] for card in cards], every=0.01, nvml=nvml)


def test_every_gpu_has_its_own_readings() -> None:
    nvml, sensors = watched({**BIG, "reasons": 0x4}, {**SMALL, "reasons": 0x40})
    try:
        until(lambda: all(sensors._samples))
        big, small = sensors.take()
        assert big == {
            "memory_device_gib": 40.0,
            "utilization_percent": 97.0,
            "power_watts": 390.0,
            "temperature_celsius": 71.0,
            "clock_mhz": 1410.0,
            "throttled": 0.0,  # a power limit is no throttling
        }
        assert (small["memory_device_gib"], small["power_watts"], small["throttled"]) == (8.0, 150.0, 1.0)
    finally:
        sensors.close()
    assert nvml.open == 0


def test_a_gpu_that_errors_is_marked_and_the_other_goes_on() -> None:
    nvml, sensors = watched(BIG, SMALL)
    try:
        until(lambda: all(sensors._samples))
        nvml.cards[1]["gone"] = True
        until(lambda: 1 in sensors.failed)
        nvml.cards[0]["used"] = 55
        until(lambda: sensors.take()[0]["memory_device_gib"] == 55.0)
        assert sensors.take()[1] == {}
        assert "GPU is lost" in sensors.failed[1]
        nvml.cards[1]["gone"] = False  # what comes and goes is not trusted again
        time.sleep(0.05)
        assert sensors.take()[1] == {}
    finally:
        sensors.close()


def test_a_sensor_that_a_card_lacks_is_left_out() -> None:
    _, sensors = watched({key: value for key, value in BIG.items() if key != "power"})
    try:
        until(lambda: bool(sensors._samples[0]))
        found = sensors.take()[0]
        assert "power_watts" not in found
        assert "throttled" not in found
        assert found["clock_mhz"] == 1410.0
    finally:
        sensors.close()


def test_between_two_samples_the_latest_counts_and_of_several_the_largest_or_the_mean() -> None:
    _, sensors = watched(BIG)
    try:
        until(lambda: bool(sensors._samples[0]))
    finally:
        sensors.close()
    sensors._samples = [
        [{"memory_device_gib": 1.0, "power_watts": 100.0}, {"memory_device_gib": 3.0, "power_watts": 200.0}]
    ]
    assert sensors.take() == [{"memory_device_gib": 3.0, "power_watts": 150.0}]
    assert sensors.take() == [{"memory_device_gib": 3.0, "power_watts": 200.0}]
    sensors._samples = [[{"memory_device_gib": 2.0, "power_watts": 100.0}]]
    assert sensors.take() == [{"memory_device_gib": 2.0, "power_watts": 100.0}]


def test_without_gpus_or_without_nvml_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "load_nvml", lambda: None)
    for sensors in (Sensors(()), Sensors(["GPU-1"]), Sensors(["GPU-1"], nvml=TwoGpus(BIG))):
        sensors.close()
    broken = TwoGpus(BIG)
    broken.broken = True
    sensors = Sensors(["GPU-aaaa-1"], nvml=broken)
    assert sensors.take() == [{}]
    sensors.close()


def test_memory_is_booked_by_phase() -> None:
    phases = Phases()
    phases.enter("train")
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    seconds = phases.enter("save")
    assert seconds > 0
    del held
    phases.measure()
    assert set(phases.peaks) == {"load", "train", "save"}
    assert phases.peaks["train"][0] >= phases.peaks["load"][0] + (60 << 20)
