"""`make memory-check`: who holds what, and whether a config's plan fits into the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.cli.memory_check import main
from sft_play.errors import SftPlayError
from sft_play.facts.hardware import GIB
from tests.cli.fake_gpus import FIRST, SECOND, TwoGpus, cpu_seconds, install
from tests.facts.fake_amd import TWO_MI300X, install_amd_smi
from tests.facts.test_probe import FakeNvml
from tests.tiny import ROOT


@pytest.fixture
def config(tmp_path: Path) -> str:
    """27B under QLoRA: about 40 GiB on each of two A100."""
    path = tmp_path / "27b.yaml"
    path.write_text(
        "model: {name: google/gemma-3-27b-it}\ntuning: {mode: qlora}\ndata: {train: absent.jsonl}\n"
        "train: {batch_size: 8, grad_accum: 4}\n"
    )
    return str(path)


def check(capsys: pytest.CaptureFixture[str], code: int, **environ: str) -> str:
    shown_code = main([], environ)
    shown = capsys.readouterr().out
    assert shown_code == code, shown
    return shown


def test_each_gpu_with_its_processes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    nvml = TwoGpus()
    install(monkeypatch, nvml)
    shown = check(capsys, 0)
    assert "GPU 0   NVIDIA A100-SXM4-80GB, 79.2 GiB: 62.0 in use, 18.0 free" in shown
    assert "pid 4242 (python), 60.0 GiB" in shown
    assert "secret" not in shown
    assert "pid 99999999 (name not visible from here), an unknown amount" in shown
    assert "2.0 GiB more: the driver, or processes that cannot be seen from here" in shown
    assert "GPU 1   NVIDIA A100-SXM4-80GB, 79.2 GiB: 1.0 in use, 79.0 free" in shown
    assert shown.splitlines()[-1].startswith("verdict: nothing to compare with")
    assert nvml.open == 0


def test_a_plan_that_fits_only_without_the_others(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, TwoGpus())
    shown = check(capsys, 4, CONFIG=config)
    assert "plan    ddp over 2 GPUs needs " in shown
    assert "verdict: does not fit now: GPU 0 has 18.0 GiB free of the " in shown
    assert "pid 4242 (python), 60.0 GiB is in the way" in shown
    other = check(capsys, 0, CONFIG=config, DIST_GPUS="[1]")
    assert "verdict: fits now, " in other


def test_a_plan_that_fits(config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, TwoGpus({**FIRST, "used": 1, "processes": []}, SECOND))
    assert "GiB to spare" in check(capsys, 0, CONFIG=config).splitlines()[-1]


def test_memory_that_no_visible_process_holds(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, TwoGpus({**FIRST, "processes": []}, SECOND))
    assert "no process of it can be seen from here" in check(capsys, 4, CONFIG=config)


def test_a_plan_that_never_fits(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, TwoGpus({**FIRST, "used": 1}, SECOND))
    shown = check(capsys, 4, CONFIG=config, TRAIN_BATCH_SIZE="64", DIST_STRATEGY="ddp")
    assert "does not fit, even when nothing else runs: strategy ddp does not fit" in shown
    assert "TRAIN_BATCH_SIZE=" in shown


def test_without_a_gpu_ram_is_compared(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, FakeNvml(broken=True))
    demo = {"CONFIG": str(ROOT / "configs/demo.yaml"), "MODEL_NAME": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    monkeypatch.setattr("sft_play.facts.probe.probe_ram_bytes", lambda: 16 * GIB)
    for free, code, said in ((8, 0, "fits now"), (1, 4, "does not fit now: 1.0 GiB of RAM are free of the ")):
        monkeypatch.setattr("sft_play.cli.memory_check.probe_free_ram_bytes", lambda free=free: free * GIB)
        shown = check(capsys, code, **demo)
        assert "no GPU seen by NVML" in shown
        assert f"RAM     16.0 GiB: {16 - free}.0 in use, {free}.0 free" in shown
        assert "GiB of RAM on the CPU" in shown
        assert said in shown.splitlines()[-1]
    assert "nothing to compare with" in check(capsys, 0)


def test_mistakes_are_errors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, TwoGpus())
    with pytest.raises(SftPlayError):
        main([], {"CONFIG": "configs/absent.yaml"})
    with pytest.raises(SftPlayError, match="--nonsense"):
        main(["--nonsense"], {})


def test_the_real_machine_answers_in_half_a_second_without_torch(config: str) -> None:
    code = (
        "import sys; from sft_play.cli.memory_check import main; code = main([], {'CONFIG': sys.argv[1]});"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    seconds = []
    for _ in range(3):
        started = cpu_seconds()
        done = subprocess.run([sys.executable, "-c", code, config], cwd=ROOT, capture_output=True, text=True)
        seconds.append(cpu_seconds() - started)
        assert done.returncode in (0, 4), done.stderr
        assert "verdict: " in done.stdout
    assert min(seconds) < 0.5, seconds


def test_amds_cards_and_a_verdict_for_them(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install(monkeypatch, FakeNvml(broken=True))
    shown = check(capsys, 0, CONFIG=config, **install_amd_smi(tmp_path / "bin", TWO_MI300X))
    assert "GPU 0   AMD Instinct MI300X, 191.5 GiB: 20.0 in use, 171.5 free" in shown
    assert "pid 77 (python3), 1.0 GiB" in shown
    assert "verdict: fits now, " in shown
