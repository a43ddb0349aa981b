"""Two machines: two network namespaces joined by a cable where the test may make them, else two agents on loopback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sft_play.launch.processes import descendants, send
from tests.distributed.runs import SINGLE, Outcome, run_case, shared_run
from tests.tiny import Workplace

PORT = "29517"
SECONDS = 240


@dataclass(frozen=True)
class Machine:
    """One node: how a command gets onto it, and what its network device is called."""

    number: int
    prefix: tuple[str, ...]
    device: str

    def start(self, workplace: Workplace, config: str, address: str, **variables: str) -> subprocess.Popen[str]:
        environ = workplace.environ(
            CONFIG=config, NUM_NODES="2", NODE_RANK=str(self.number), MAIN_ADDRESS=address, MAIN_PORT=PORT,
            DIST_STRATEGY="ddp", GLOO_SOCKET_IFNAME=self.device, **variables,
        )  # fmt: skip
        return subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "sft_play", "train-distributed"],
            cwd=workplace.path,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine, str]]:
    """Two machines and the address of the first."""
    names = [f"sft{os.getpid()}{end}" for end in "ab"]
    try:
        if shutil.which("ip") is None:
            raise OSError("no ip command")
        for name in names:
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", "va", "netns", names[0], "type", "veth", "peer", "name", "vb", "netns", names[1])
        for end, name in zip("ab", names, strict=True):
            address = f"10.77.0.{1 + 'ab'.index(end)}/24"
            sh("ip", "-n", name, "addr", "add", address, "dev", f"v{end}")
            for device in (f"v{end}", "lo"):
                sh("ip", "-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError):
        yield Machine(0, (), "lo"), Machine(1, (), "lo"), "127.0.0.1"
        return
    finally_delete = [("ip", "netns", "del", name) for name in names]
    try:
        prefixes = [("ip", "netns", "exec", name) for name in names]
        yield Machine(0, prefixes[0], "va"), Machine(1, prefixes[1], "vb"), "10.77.0.1"
    finally:
        for words in finally_delete:
            subprocess.run(words, check=False, capture_output=True)


def finish(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """(exit code, output) of each; all are ended if one takes too long."""
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def prepared(workplace: Workplace, name: str, **train: object) -> str:
    """A config of the shared method `full` under another name, and its rows already in the cache."""
    done = run_case(workplace, "full", SINGLE, name, RUN_RESUME="never", TRAIN_MAX_STEPS="1")
    assert done.code == 0, done.err
    shutil.rmtree(workplace.path / "runs" / name)
    return f"{name}.yaml"


def test_a_run_over_two_machines_is_the_run_on_one(shared: Workplace, machines: tuple[Machine, Machine, str]) -> None:
    single = shared_run(shared, "full", SINGLE)
    one, two, address = machines
    config = prepared(shared, "two-machines")
    batch = {"TRAIN_BATCH_SIZE": "4"}
    results = finish(*(machine.start(shared, config, address, **batch) for machine in (one, two)))
    assert [code for code, _ in results] == [0, 0], results
    outcome = Outcome(shared.path / "runs" / "two-machines")
    assert outcome.series("loss") == pytest.approx(single.series("loss"), abs=5e-5)
    assert (outcome.path / "launch" / "node-1" / "run.json").is_file()


def test_a_machine_with_another_config_stops_both_and_the_key_is_named(
    shared: Workplace, machines: tuple[Machine, Machine, str]
) -> None:
    one, two, address = machines
    config = prepared(shared, "machines-differ")
    first = one.start(shared, config, address, TRAIN_BATCH_SIZE="4")
    second = two.start(shared, config, address, TRAIN_BATCH_SIZE="4", TRAIN_LEARNING_RATE="0.5")
    results = finish(first, second)
    assert [code for code, _ in results] == [2, 2], results
    for _, said in results:
        (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert "config.train.learning_rate" in line
    assert "step  1/" not in results[0][1]


@pytest.mark.slow
def test_a_machine_that_is_killed_and_started_again_goes_on(
    shared: Workplace, machines: tuple[Machine, Machine, str]
) -> None:
    single = shared_run(shared, "full", SINGLE)
    one, two, address = machines
    config = prepared(shared, "machine-lost")
    given = {"TRAIN_BATCH_SIZE": "4", "TRAIN_SAVE_STRATEGY": "steps", "TRAIN_SAVE_STEPS": "2"}
    first, second = (machine.start(shared, config, address, **given) for machine in (one, two))
    folder = shared.path / "runs" / "machine-lost" / "checkpoints"
    wait_for_checkpoint(folder)
    send([*descendants(second.pid), second.pid], signal.SIGKILL)
    second.wait()
    again = two.start(shared, config, address, **given)
    results = finish(first, again)
    assert [code for code, _ in results] == [0, 0], results
    assert "going on from the last checkpoint" in results[0][1]
    outcome = Outcome(shared.path / "runs" / "machine-lost")
    assert outcome.series("loss") == pytest.approx(single.series("loss"), abs=5e-5)


def wait_for_checkpoint(folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not list(folder.glob("step-*/manifest.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
