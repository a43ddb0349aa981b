"""Whatever ends a run, nothing of it is left 10 seconds later: ranks, launcher, TensorBoard, loader workers."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from sft_play.launch.processes import environment_of
from sft_play.record.checkpoints import newest_first
from sft_play.record.manifest import folder_problem
from sft_play.record.run_dir import RunDir
from tests.distributed.runs import TRAIN
from tests.tiny import ROOT, Workplace


@pytest.fixture
def taken_port() -> int:
    """A port that something listens to, and will."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    yield server.getsockname()[1]
    server.close()


def start(workplace: Workplace, port: int, *, through_make: bool) -> subprocess.Popen[str]:
    workplace.write(train={**TRAIN, "bf16": False, "max_steps": 100_000, "dataloader_num_workers": 1})
    given = {"CONFIG": "tiny.yaml", "NUM_GPUS": "2", "TRAIN_BATCH_SIZE": "4", "RUN_TENSORBOARD_PORT": str(port)}
    environ = workplace.environ(**given, SFT_PLAY_TEST_RUN=str(workplace.path))
    words = [sys.executable, "-m", "sft_play", "train-distributed-tb"]
    if through_make:
        for name in ("Makefile", "sft_play", "pyproject.toml", "constraints.txt"):
            (workplace.path / name).symlink_to(ROOT / name)
        (workplace.path / ".venv").symlink_to(sys.prefix)
        words = ["make", "train-distributed-tb"]
    return subprocess.Popen(
        words, cwd=workplace.path, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def of_this_run(workplace: Workplace) -> list[int]:
    """Living processes that were started with this run's mark in their environment.

    Not by their parents: one whose parent dies during the look has none for a moment.
    """
    mark, every = str(workplace.path), [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in every if environment_of(pid).get("SFT_PLAY_TEST_RUN") == mark]


def read_until(process: subprocess.Popen[str], word: str) -> list[str]:
    said: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line.rstrip())
        if word in line:
            return said
    raise AssertionError("\n".join(said[-20:]))


@pytest.mark.parametrize(
    ("number", "through_make"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGKILL, False), (signal.SIGKILL, True)],
)
def test_nothing_is_left_and_the_state_is_saved(
    workplace: Workplace, taken_port: int, number: signal.Signals, through_make: bool
) -> None:
    process = start(workplace, taken_port, through_make=through_make)
    said = read_until(process, "step      3/100000")
    (address,) = [line.split()[-1] for line in said if line.startswith("TensorBoard: ")]
    assert address != f"http://localhost:{taken_port}"
    assert said.index(f"TensorBoard: {address}") < next(i for i, line in enumerate(said) if line.startswith("step "))
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    assert b"TensorBoard" in direct.open(address.replace("localhost", "127.0.0.1"), timeout=10).read()
    assert len(of_this_run(workplace)) >= 6, "make or python, TensorBoard, launcher, two ranks, their loaders"
    process.send_signal(number)
    process.stdout.close()
    code = process.wait(timeout=60)
    deadline = time.monotonic() + 10
    while (left := of_this_run(workplace)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGKILL: -9}[number]
    (saved, *_) = newest_first(RunDir(workplace.path / "runs/tiny"))
    assert folder_problem(saved) == ""


def test_ranks_whose_parent_died_while_they_were_starting_leave(workplace: Workplace) -> None:
    process = start(workplace, 16106, through_make=False)
    deadline = time.monotonic() + 60
    while not [pid for pid in of_this_run(workplace) if "LOCAL_RANK" in environment_of(pid)]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.communicate()
    while (left := of_this_run(workplace)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
