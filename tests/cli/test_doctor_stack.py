"""The doctor's checks of GPUs and of the stack: made-up cards, what kernels may say, children that hang."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_play.cli.checks import gpus, stack
from sft_play.cli.checks.finding import Finding, Scope, State
from sft_play.config.resolve import resolve
from sft_play.facts.hardware import Hardware
from sft_play.facts.probe import probe_hardware
from sft_play.launch.processes import parent_of
from tests.cli.fake_gpus import FIRST, SECOND, TwoGpus, install
from tests.facts.test_probe import RTX, FakeNvml


def scope(hardware: Hardware | None = None, **environ: str) -> Scope:
    return Scope(environ=environ, config=resolve(None, environ, partial=True).config, hardware=hardware)


def states(findings: Iterator[Finding]) -> dict[str, State]:
    return {one.name: one.state for one in findings}


# GPUs, as NVML tells


def test_two_gpus_one_of_them_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, TwoGpus())
    found = {one.name: one for one in gpus.check_gpus(scope())}
    assert found["GPU 0"].state == "warning"
    assert found["GPU 0"].found.endswith(", 62.0 in use, by pid 4242 first")
    assert "memory-check" in found["GPU 0"].cure
    assert found["GPU 1"].state == found["driver"].state == found["links"].state == "ok"
    assert found["driver"].found == "550.54.15, runs CUDA up to 12.4"
    assert found["links"].found == "NVLink, planned with 300 GB/s each way per GPU"


def test_unequal_and_old_gpus_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"name": "Tesla V100-SXM2-32GB", "gib": 32, "capability": (7, 0), "uuid": "GPU-v"}
    install(monkeypatch, TwoGpus(SECOND, RTX, old))
    found = {one.name: one for one in gpus.check_gpus(scope())}
    assert found["links"].state == "warning"
    assert "unequal" in found["links"].found
    assert "no bf16" in found["GPU 2"].found
    assert "TRAIN_FP16=true" in found["GPU 2"].cure


def test_a_gpu_that_is_there_and_not_seen_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, FakeNvml(broken=True))
    monkeypatch.setattr("sft_play.facts.probe._DEVICE_FILES", (str(tmp_path),))
    (only,) = gpus.check_gpus(scope(PATH=""))
    assert (only.state, "nvidia-smi" in only.cure) == ("fail", True)
    (hidden,) = gpus.check_gpus(scope(PATH="", CUDA_VISIBLE_DEVICES=""))
    assert hidden.state == "ok"
    monkeypatch.setattr("sft_play.facts.probe._DEVICE_FILES", ())
    (none,) = gpus.check_gpus(scope(PATH=""))
    assert none.state == "warning"


def test_a_gpu_that_is_named_and_not_there_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, TwoGpus())
    (only,) = gpus.check_gpus(scope(CUDA_VISIBLE_DEVICES="7"))
    assert only.state == "fail"
    assert "CUDA_VISIBLE_DEVICES" in only.found


# Stack


def told(*devices: str, flops: float = 700e12, **more: Any) -> dict[str, Any]:
    one = {"bf16": {"error": None, "flops": flops, "emulated": False}, "nf4": {"error": None, "off": 0.002}}
    made = {"torch": "2.13.0", "cuda": "12.8", "hip": None, "nccl": "2.27.5", "gpus": len(devices)}
    return {**made, "devices": [{"device": name, **one} for name in devices or ("cpu",)], **more}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    install(monkeypatch, TwoGpus({**FIRST, "used": 0, "processes": []}, SECOND))
    return probe_hardware(environment={})


def test_kernels_of_two_gpus(two_gpus: Hardware) -> None:
    fine = told("cuda:0", "cuda:1", flops=250e12)
    assert set(states(stack.judge_kernels(fine, two_gpus)).values()) == {State.OK}
    slow = {one.name: one for one in stack.judge_kernels(told("cuda:0", "cuda:1", flops=50e12), two_gpus)}
    assert slow["bf16"].state == "warning"
    assert "16% of what the card is made for" in slow["bf16"].found
    unseen = {one.name: one for one in stack.judge_kernels(told(cuda=None), two_gpus)}
    assert "can use 0 of the 2 GPUs that are there" in unseen["torch"].found
    assert "TORCH_INDEX" in unseen["torch"].cure


def test_kernels_that_break(two_gpus: Hardware) -> None:
    bad = told("cuda:0", "cuda:1")
    bad["devices"][1] = {
        "device": "cuda:1",
        "bf16": {"error": "RuntimeError: no kernel image is available"},
        "nf4": {"error": "ArithmeticError: output nan"},
    }
    found = {one.name: one for one in stack.judge_kernels(bad, two_gpus)}
    assert found["bf16"].found == "cuda:1: RuntimeError: no kernel image is available"
    assert found["4-bit"].found == "cuda:1: ArithmeticError: output nan"
    assert found["bf16"].state == found["4-bit"].state == "fail"


@pytest.mark.parametrize(
    ("rate", "right", "state"), [(250e9, True, "ok"), (20e9, True, "warning"), (250e9, False, "fail")]
)
def test_an_all_reduce_over_nccl(two_gpus: Hardware, rate: float, right: bool, state: str) -> None:
    answer = stack.Answer(told={"world": 2, "right": right, "bytes": 2**28, "bytes_per_second": rate})
    assert stack.judge_all_reduce(answer, "nccl", scope(two_gpus)).state == state


def test_which_ranks_and_which_backend(two_gpus: Hardware) -> None:
    assert stack.ranks_of(told("cuda:0", "cuda:1"), scope(two_gpus)) == 2
    assert stack.ranks_of(told(), scope()) == 2
    assert stack.backend_of(told("cuda:0"), scope()) == "nccl"
    assert stack.backend_of(told("cuda:0"), scope(DIST_SYNC_BACKEND="gloo")) == "gloo"
    assert stack.backend_of(told(), scope()) == "gloo"
    assert stack.child_environment(scope(two_gpus))["CUDA_VISIBLE_DEVICES"] == "GPU-aaaa-1,GPU-aabb-2"
    alone = {"world": 1, "right": True, "bytes": 4, "bytes_per_second": 0.0}
    assert "no link to measure" in stack.judge_all_reduce(stack.Answer(told=alone), "nccl", scope()).found


def test_a_child_that_hangs_is_ended_with_all_below_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time;"
        "below = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True);"
        "open('pid', 'w').write(str(below.pid)); time.sleep(60)"
    )
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        started = time.monotonic()
        environ = {**os.environ, "PYTHONPATH": str(before)}
        answer = stack.ask((sys.executable, "-c", code), environ, 2.0)
    finally:
        os.chdir(before)
    assert time.monotonic() - started < 10
    assert answer.problem == "no end after 2 s"
    below = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while parent_of(below) and _state(below) != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not parent_of(below) or _state(below) == "Z"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_how_a_child_ended_is_said() -> None:
    def ask(code: str) -> stack.Answer:
        return stack.ask((sys.executable, "-c", code), os.environ, 20)

    assert ask("import os, signal; os.kill(os.getpid(), signal.SIGILL)").problem.startswith("died of SIGILL")
    assert ask("raise ImportError('no torch here')").problem == "ended with 1: ImportError: no torch here"
    assert ask(f"print('noise'); print({json.dumps(json.dumps({'a': 1}))})").told == {"a": 1}
    assert stack.judge_all_reduce(stack.Answer(problem="ended"), "nccl", scope()).cure.startswith("NCCL_DEBUG=INFO")
