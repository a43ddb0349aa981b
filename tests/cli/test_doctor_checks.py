"""The doctor's checks one by one: small disks, taken ports, a hub with a wrong clock."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sft_play.cli.checks import disk, network, program, system
from sft_play.cli.checks.finding import Finding, Scope, State, fail, without_secrets
from sft_play.cli.doctor import guarded
from sft_play.config.resolve import resolve
from sft_play.facts.hardware import GIB, Hardware


def scope(hardware: Hardware | None = None, **environ: str) -> Scope:
    return Scope(environ=environ, config=resolve(None, environ, partial=True).config, hardware=hardware)


def states(findings: Iterator[Finding]) -> dict[str, State]:
    return {one.name: one.state for one in findings}


# Program


def test_python_and_pins(tmp_path: Path) -> None:
    assert program.check_python((3, 10), "Linux").state == "fail"
    assert program.check_python((3, 12), "Darwin").state == "warning"
    assert program.check_python((3, 11), "Windows").state == "fail"
    pins = tmp_path / "constraints.txt"
    pins.write_text("# pins\npytest==0.1\nno-such-package==1.0\ndeepspeed==99.0\n")
    found = {one.name: one for one in program.check_pins(pins)}
    assert found["deepspeed"].state == "fail"
    assert "99.0 is pinned" in found["deepspeed"].found
    assert found["others"].state == "warning"
    assert "no-such-package missing (pin 1.0)" in found["others"].found
    assert states(program.check_pins(tmp_path / "absent")) == {"packages": State.WARNING}


# Machine


@pytest.mark.parametrize(
    ("mebibytes", "several", "state"),
    [(64, True, "fail"), (64, False, "warning"), (512, True, "warning"), (8192, True, "ok")],
)
def test_shared_memory(mebibytes: int, several: bool, state: str) -> None:
    found = system.check_shared_memory(Path("/dev/shm"), several=several, total=mebibytes * 2**20)
    assert found.state == state
    assert ("--shm-size" in found.cure) == (state != "ok")


def test_no_shared_memory(tmp_path: Path) -> None:
    assert system.check_shared_memory(tmp_path / "absent", several=True).state == "fail"
    assert system.check_shared_memory(tmp_path / "absent", several=False).state == "warning"


def test_limits_and_ram() -> None:
    assert system.check_handles((100, 4096)) == fail("file handles", "100 at once: a run opens more", "ulimit -n 4096")
    assert system.check_handles((512, resource.RLIM_INFINITY)).state == "warning"
    assert system.check_handles((resource.RLIM_INFINITY, resource.RLIM_INFINITY)).state == "ok"
    assert system.check_file_size(100 * 2**20).state == "warning"
    assert system.check_ram(64 * GIB, GIB).state == "warning"
    assert system.check_ram(64 * GIB, 32 * GIB).state == "ok"
    assert system.check_ram(0, 0).state == "ok"


# Disk


def test_a_folder_that_cannot_be_written() -> None:
    found = disk.check_access(Path("/proc/sft-play/runs"))
    assert found.state == "fail"
    assert found.found.startswith("/proc/sft-play/runs (to be made in /proc): ")
    assert "speed" not in states(disk.check_disk(scope(RUN_OUTPUT_DIR="/proc/sft-play/runs")))


def test_a_folder_of_another_owner(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o555)
    as_root = os.geteuid() == 0
    if as_root:  # root may write anywhere: be nobody for a moment, who may not even look below pytest's folder
        os.seteuid(65534)
    try:
        found = disk.check_access(tmp_path / "theirs/runs")
    finally:
        if as_root:
            os.seteuid(0)
    assert found.state == "fail"
    assert "Permission denied" in found.found
    assert "RUN_OUTPUT_DIR" in found.cure


def test_a_disk_that_fills_up_while_it_is_measured(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * 2**20, hard))
    try:
        found = disk.check_speed(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found.state == "fail"
    assert "broke off" in found.found
    assert list(tmp_path.iterdir()) == []


def test_speed_is_measured_and_judged(tmp_path: Path) -> None:
    measured = disk.measure(tmp_path, 2 * disk.PART_BYTES)
    assert (measured.size_bytes, measured.same) == (2 * disk.PART_BYTES, True)
    assert list(tmp_path.iterdir()) == []
    for write, read, same, state in ((1, 1, 1, "ok"), (9, 1, 1, "warning"), (1, 9, 1, "warning"), (1, 1, 0, "fail")):
        speed = disk.DiskSpeed(size_bytes=2**28, write_seconds=write, read_seconds=read, same=bool(same), cached=False)
        assert disk.judge_speed(speed).state == state


def test_free_space_and_file_entries(tmp_path: Path) -> None:
    for free, entries, state in ((100, 9999, "ok"), (2, 9999, "warning"), (0, 9999, "fail"), (100, 5, "fail")):
        assert disk.check_space(tmp_path, free * GIB, entries, 10**6).state == state
    assert disk.check_space(tmp_path, 100 * GIB, 0, 0).state == "ok"  # a file system that counts no entries


def test_a_disk_with_another_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.check_skew(tmp_path).state == "ok"
    now = time.time()
    monkeypatch.setattr("sft_play.cli.checks.disk.time.time", lambda: now + 3600)
    assert disk.check_skew(tmp_path).state == "warning"


# Network and clock


class Hub(BaseHTTPRequestHandler):
    status, ahead = 200, 0.0
    asked: list[dict[str, str]] = []

    def do_HEAD(self) -> None:
        Hub.asked.append(dict(self.headers))
        self.send_response(Hub.status)
        self.end_headers()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() + Hub.ahead)  # type: ignore[arg-type]

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "ahead", "hub_state", "clock_state"),
    [(200, 0, "ok", "ok"), (401, 1000, "ok", "warning"), (503, -1000, "warning", "warning"), (200, 9e5, "ok", "fail")],
)
def test_a_hub_that_answers(hub: str, status: int, ahead: float, hub_state: str, clock_state: str) -> None:
    Hub.status, Hub.ahead = status, ahead
    answer = network.ask_hub(hub)
    environ = {"HF_TOKEN": "hf_secretsecret"}
    assert network.check_hub(answer, hub, "", environ).state == hub_state
    assert network.check_clock(time.time(), time.time() - 100, answer.seconds_ahead).state == clock_state
    assert not any("authorization" in name.lower() for name in Hub.asked[-1])


def test_a_hub_that_is_left_alone_or_silent() -> None:
    for value, quiet in (("1", True), ("true", True), ("0", False), ("", False)):
        assert bool(network.offline_by({"HF_HUB_OFFLINE": value})) is quiet
    with socket.socket() as silent:  # accepts, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        answer = network.ask_hub(f"http://127.0.0.1:{silent.getsockname()[1]}", seconds=0.3)
    assert answer.problem
    assert network.ask_hub("no address at all").problem
    assert network.hub_of({"HF_ENDPOINT": "https://me:secret@hub.example:8443/api/"}) == "https://hub.example:8443/api"


def test_a_clock_before_the_files() -> None:
    assert network.check_clock(1e9, 1.7e9, None).state == "fail"
    assert network.check_clock(1.8e9, 1.7e9, None).state == "ok"


def test_ports_and_addresses() -> None:
    assert network.check_rendezvous("auto").state == "ok"
    assert network.check_rendezvous(1, node_rank=1).state == "ok"
    assert network.check_address("127.0.0.1").state == "ok"
    assert network.check_address("no.such.machine.invalid").state == "fail"
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        assert network.check_rendezvous(taken.getsockname()[1]).state == "fail"


# All of them


def test_a_check_that_breaks_is_a_finding_and_hides_no_secret() -> None:
    def check(scope: Scope) -> Iterator[Finding]:
        yield fail("first", "https://me:pass-word@hub/x", "")
        raise RuntimeError(f"cannot use {scope.environ['HF_TOKEN']}")

    here = scope(HF_TOKEN="hf_0123456789")
    first, broken = (without_secrets(one, here.environ) for one in guarded(check, here))
    assert first.found == "https://***@hub/x"
    assert broken.found == "broke off with RuntimeError: cannot use ***"
