"""What a run shows: a live line on a terminal, plain lines in a pipe, one summary at the end."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sft_play.cli.screen import Screen, clock, fitting, trend
from sft_play.record.live import line_of, values_of
from tests.faults.hooks import hooked
from tests.tiny import Workplace

COLUMNS, ROWS = 80, 40
ROOT = Path(__file__).parent.parent.parent
SUMMARY = ["done", "time", "speed", "memory", "result", "report", "next"]
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
BAR = re.compile(r"^[━─]{24} step +[\d,]+/60 +\d+%(  eta \d+:\d\d)?$")
NOW = re.compile(r"^(training|saving|evaluating( \d+/\d+)?)(  loss \d\.\d{4}( [↓↑→])?)?")


class Terminal:
    """A program in a tmux of its own."""

    def __init__(self, folder: Path, command: str) -> None:
        self.name = f"t{uuid.uuid4().hex[:8]}"
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "CONFIG": "tiny.yaml",
            "LANG": "C.UTF-8",
        }
        environ.pop("CI", None)
        whole = f"cd {folder}; {command}; echo ended with $?; sleep 600"
        size = ("-x", str(COLUMNS), "-y", str(ROWS))
        subprocess.run(("tmux", "-u", "-L", self.name, "new-session", "-d", *size, whole), env=environ, check=True)

    def lines(self) -> list[str]:
        """What stands on it now."""
        done = subprocess.run(
            ("tmux", "-L", self.name, "capture-pane", "-p"), capture_output=True, text=True, check=True
        )
        return [line for line in done.stdout.splitlines() if line.strip()]

    def until(self, seen: Callable[[list[str]], bool], seconds: float = 120.0) -> list[str]:
        """The lines at the first look at which they are what is waited for."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            lines = self.lines()
            if seen(lines):
                return lines
            time.sleep(0.05)
        raise AssertionError("never seen:\n" + "\n".join(self.lines()))

    def end(self) -> None:
        subprocess.run(("tmux", "-L", self.name, "kill-server"), check=False)


@pytest.fixture
def terminal(workplace: Workplace) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    workplace.write(train={**workplace.config["train"], "max_steps": 60, "save_steps": 20, "eval_strategy": "epoch"})
    shown = Terminal(workplace.path, f"PYTHONPATH={ROOT} {sys.executable} -m sft_play train")
    yield shown
    shown.end()


def test_the_live_line_at_the_start_in_the_middle_and_at_the_end(terminal: Terminal) -> None:
    start = terminal.until(lambda lines: lines[-1:] == ["starting the worker"])
    assert any(line.startswith("data: train: 32 rows") for line in start)
    middle = terminal.until(lambda lines: len(lines) > 2 and bool(BAR.match(lines[-2])) and "loss" in lines[-1])
    assert NOW.match(middle[-1]), middle[-1]
    assert "planned" in middle[-1]
    assert sum("━" in line or "─" in line for line in middle) == 1
    assert not any(line.startswith("step ") for line in middle)
    end = terminal.until(lambda lines: lines[-1].startswith("ended with"))
    assert end[-1] == "ended with 0"
    assert not any("━" in line for line in end)
    names = [line[:9].strip() for line in end]
    assert [name for name in names if name in SUMMARY] == SUMMARY
    for lines in (start, middle, end):
        assert all(len(line) <= COLUMNS for line in lines)


def test_a_pipe_gets_plain_lines_and_the_log_the_same(workplace: Workplace) -> None:
    done = workplace.train()
    assert done.code == 0
    assert CONTROL.findall(done.out + done.err) == []
    assert len(re.findall(r"^step +\d+/\d+  loss", done.out, re.M)) == workplace.config["train"]["max_steps"]
    log = (workplace.path / "runs/tiny/run.log").read_text()
    assert CONTROL.findall(log) == []
    assert set(log.splitlines()) <= {*done.out.splitlines(), *done.err.splitlines()}
    summary = {line[:9].strip(): line[9:] for line in done.out.splitlines() if line[:9].strip() in ("result", "next")}
    assert (workplace.path / summary["result"]).is_dir()
    assert summary["next"] == "make infer RUN=runs/tiny"


def test_the_trend_and_what_fits() -> None:
    assert [trend(deque(losses)) for losses in ([3, 2], [4, 3, 2, 1], [1, 2, 3, 4], [2, 2, 2, 2])] == [
        "",
        "↓",
        "↑",
        "→",
    ]
    assert fitting(["training", "loss 1", "x" * 70], 30) == "training  loss 1"
    assert [clock(seconds) for seconds in (4, 64, 3600)] == ["0:04", "1:04", "1:00:00"]


def test_a_screen_forgets_the_count_of_the_phase_before() -> None:
    screen = Screen()
    screen.say("data: train: 3,000 of 10,000 rows")
    assert screen.view(80) == "data: train 3,000 of 10,000 rows"
    screen.show({"phase": "loading weights", "done": 3, "of": 7})
    assert screen.view(80) == "loading weights 3/7"
    screen.show(
        {"phase": "training", "step": 30, "steps": 60, "eta_seconds": 61, "loss": 2.5, "tokens_per_second": 1234}
    )
    assert screen.view(80).splitlines() == [
        "━━━━━━━━━━━━──────────── step 30/60  50%  eta 1:01",
        "training  loss 2.5000  1,234 tok/s",
    ]
    assert all(len(row) < 40 for row in screen.view(40).splitlines())
    assert screen.view(40).splitlines()[0] == "━━━━━━─────── step 30/60  50%  eta 1:01"
    assert screen.view(20).splitlines()[0] == "step 30/60  50%  et"


def test_lines_for_the_live_line_are_told_from_all_others() -> None:
    assert values_of(line_of({"step": 3})) == {"step": 3}
    assert values_of("step 3/10 loss 1.0\n") is None
    assert values_of(line_of({"step": 3})[:5]) == {}


UNHAPPY = """
def patch(module):
    original = module.load_model
    def load_model(*items):
        if rank == 1:
            print("warning: rank one found something odd")
        return original(*items)
    module.load_model = load_model
"""


def test_what_other_ranks_say_is_counted_and_kept_in_the_log(workplace: Workplace, tmp_path: Path) -> None:
    done = workplace.run(
        "train-distributed",
        CONFIG="tiny.yaml",
        NUM_GPUS="2",
        **hooked(tmp_path / "hook", "sft_play.runtime.model", UNHAPPY),
    )
    assert done.code == 0, done.err
    assert "found something odd" not in done.out + done.err
    assert "careful  warnings of other ranks in run.log: 1\n" in done.out
    log = (workplace.path / "runs/tiny/run.log").read_text()
    assert log.count("rank 1: warning: rank one found something odd") == 1
