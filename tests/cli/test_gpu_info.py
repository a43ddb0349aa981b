"""`make gpu-info` with two made-up GPUs and with none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_play.cli.gpu_info import main
from tests.cli.fake_gpus import SECOND, TwoGpus, cpu_seconds, install
from tests.facts.fake_amd import TWO_MI300X, install_amd_smi
from tests.facts.test_probe import RTX, FakeNvml
from tests.tiny import ROOT


def show(capsys: pytest.CaptureFixture[str], *words: str, **environ: str) -> str:
    assert main(words, environ) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], **environ: str) -> dict[str, Any]:
    return json.loads(show(capsys, "--json", **environ))


def test_two_gpus_with_all_that_is_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    nvml = TwoGpus()
    install(monkeypatch, nvml)
    shown = show(capsys)
    assert shown.startswith("Number of GPUs: 2\n")
    for words in (
        "GPU 0: NVIDIA A100-SXM4-80GB, 79.2 GiB, 62.0 in use",
        "compute capability 8.0, bf16 yes, fp8 no",
        "PCIe 4.0 x16, 12 NVLinks active, GPU-aaaa-1",
        "NVLink, about 300 GB/s each way per GPU",
        "550.54.15, runs CUDA up to 12.4",
    ):
        assert words in shown
    assert "no GPU seen" not in shown
    assert nvml.open == 0


def test_the_page_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, TwoGpus())
    told = as_json(capsys)
    assert (told["version"], told["number_of_gpus"], told["cuda"]) == (1, 2, "12.4")
    assert [gpu["uuid"] for gpu in told["gpus"]] == ["GPU-aaaa-1", "GPU-aabb-2"]
    assert told["link"] == {"kind": "nvlink", "bytes_per_second": 300e9}
    assert set(told) == {
        "version", "number_of_gpus", "gpus", "link", "driver", "cuda", "cpu", "ram", "disk", "versions", "notes",
    }  # fmt: skip


def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, TwoGpus())
    shown = show(capsys, CUDA_VISIBLE_DEVICES="1")
    assert shown.startswith("Number of GPUs: 1\n")
    assert "GPU 1: " in shown
    assert "GPU 0: " not in shown
    hidden = show(capsys, CUDA_VISIBLE_DEVICES="")
    assert "CUDA_VISIBLE_DEVICES hides every GPU" in hidden


def test_unequal_and_unknown_cards_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {"name": "NVIDIA Future 9000", "gib": 48, "capability": (13, 0), "uuid": "GPU-x"}
    install(monkeypatch, TwoGpus(SECOND, RTX, odd))
    shown = show(capsys)
    assert "these GPUs are unequal" in shown
    assert "GPU 2 is not in the catalog" in shown
    assert "PCIe, no NVLink" in shown


def test_a_torch_for_cpus_beside_gpus_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, TwoGpus())
    for number, said in (("2.9.0+cpu", True), ("2.9.0+cu128", False), ("", False)):
        monkeypatch.setattr("sft_play.cli.gpu_info._version", lambda name, number=number: number)
        assert ("torch is a build for CPUs" in show(capsys)) is said


@pytest.mark.parametrize("nvml", [None, FakeNvml(broken=True)])
def test_no_gpu_is_said_with_what_that_leaves_unknown(
    nvml: FakeNvml | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sft_play.facts.probe.load_nvml", lambda: nvml)
    shown = show(capsys)
    assert shown.startswith("Number of GPUs: 0\n")
    assert "unknown" in shown
    assert "training runs on the CPU" in shown
    told = as_json(capsys)
    assert (told["gpus"], told["driver"]) == ([], None)
    assert told["ram"]["total_bytes"] >= told["ram"]["free_bytes"] > 0
    assert told["disk"]["free_bytes"] > 0
    assert told["versions"]["torch"]


def test_amds_cards_are_shown_in_their_own_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install(monkeypatch, FakeNvml(broken=True))
    shown = show(capsys, **install_amd_smi(tmp_path, TWO_MI300X))
    assert shown.startswith("Number of GPUs: 2\n")
    for words in (
        "GPU 0: AMD Instinct MI300X, 191.5 GiB, 20.0 in use",
        "compute capability 9.4, bf16 yes, fp8 yes",
        "PCIe 5.0 x16, 0000:05:00.0, xGMI unknown",
        "xGMI by the catalog, about 448 GB/s each way per GPU",
        "amdgpu 6.12.12",
        "torch's ROCm build",
    ):
        assert words in shown
    assert "NVML" not in shown


def test_the_real_machine_answers_in_half_a_second_without_torch() -> None:
    code = (
        "import sys; from sft_play.cli.gpu_info import main; code = main([], {});"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    seconds = []
    for _ in range(3):
        started = cpu_seconds()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        seconds.append(cpu_seconds() - started)
        assert "Number of GPUs: " in done.stdout
    assert min(seconds) < 0.5, seconds
