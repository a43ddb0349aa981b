"""What NVML tells the product against what torch tells of the same card."""

from __future__ import annotations

import json
import os

import pytest

from sft_play.cli.doctor import main as doctor
from sft_play.cli.gpu_info import main as gpu_info
from sft_play.cli.memory_check import main as memory_check
from sft_play.facts.gpu_state import probe_gpu_state
from sft_play.facts.hardware import GIB
from sft_play.facts.probe import probe_hardware

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nvml")]


def test_the_probe_agrees_with_torch() -> None:
    import torch

    hardware = probe_hardware()
    assert len(hardware.gpus) == torch.cuda.device_count()
    for number, gpu in enumerate(hardware.gpus):
        seen = torch.cuda.get_device_properties(number)
        assert gpu.name == seen.name or gpu.mig
        assert gpu.compute_capability == f"{seen.major}.{seen.minor}"
        assert gpu.bf16 == (seen.major >= 8)
        # Usable memory must not be promised beyond what torch can have, nor much of it be left unused.
        assert 0.98 <= gpu.memory_bytes / seen.total_memory <= 1.005, (gpu.memory_bytes, seen.total_memory)
        if hasattr(seen, "uuid"):
            assert gpu.uuid.lower().endswith(str(seen.uuid).lower().removeprefix("gpu-"))


def test_memory_in_use_follows_what_torch_takes() -> None:
    import torch

    hardware = probe_hardware()
    before = probe_gpu_state(hardware.gpus).gpus[hardware.gpus[0].uuid]
    held = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    after = probe_gpu_state(hardware.gpus).gpus[hardware.gpus[0].uuid]
    free, total = torch.cuda.mem_get_info()
    assert after.used_bytes - before.used_bytes >= held.numel()
    assert after.used_bytes == pytest.approx(total - free, abs=2 * GIB)
    assert after.free_bytes == pytest.approx(free, abs=2 * GIB)
    del held
    torch.cuda.empty_cache()


def test_gpu_info_and_memory_check_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_info(["--json"], os.environ) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["number_of_gpus"] == len(told["gpus"]) >= 1
    assert told["driver"]
    assert told["cuda"]
    assert gpu_info([], os.environ) == 0
    assert "Number of GPUs: " in capsys.readouterr().out
    assert memory_check([], {key: value for key, value in os.environ.items() if key != "CONFIG"}) == 0
    assert "verdict: " in capsys.readouterr().out


def test_the_doctor_tries_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Packages, ports and the hub of the machine are not this test's business: only what GPUs answer."""
    doctor(["--json"], {key: value for key, value in os.environ.items() if key != "CONFIG"})
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    for name in ("driver", "links", "torch", "bf16", "4-bit", "all-reduce"):
        assert found[name]["state"] == "ok", found[name]
    assert "under nccl" in found["all-reduce"]["found"]
    assert "TFLOP/s" in found["bf16"]["found"]
