"""Starting processes: exit codes, logs, signals, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sft_play.launch.execute import execute
from sft_play.launch.spec import LaunchSpec
from sft_play.record.run_dir import RunDir
from tests.tiny import ROOT


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def spec(run: RunDir, program: str) -> LaunchSpec:
    return LaunchSpec(argv=(sys.executable, "-c", program), environment={"ADDED": "yes"}, files={run.run_json: "{}"})


def test_output_goes_to_the_terminal_and_the_log(run: RunDir, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    program = "import os, sys; print('out', os.environ['ADDED']); print('err', file=sys.stderr)"
    assert execute(spec(run, program), run, os.environ) == (0, [])
    for text in (capfdbinary.readouterr().out, run.log.read_bytes()):
        assert b"out yes" in text
        assert b"err" in text
    assert (run.path / "attempts/001.json").read_text() == "{}"


def test_the_code_that_the_worker_left_is_the_code(run: RunDir) -> None:
    left = json.dumps({"code": 75, "lines": ["stopped"]})
    program = (
        f"import pathlib; pathlib.Path({str(run.launch / 'exit-0.json')!r}).write_text({left!r}); raise SystemExit(1)"
    )
    assert execute(spec(run, program), run, os.environ) == (75, ["stopped"])


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("raise SystemExit(3)", "ended with 3"),
    ],
)
def test_a_worker_that_dies_without_a_word_is_code_6(run: RunDir, program: str, said: str) -> None:
    code, lines = execute(spec(run, program), run, os.environ)
    assert code == 6
    assert said in lines[0]


def test_what_an_earlier_attempt_left_is_not_mistaken_for_this_one(run: RunDir) -> None:
    (run.launch / "exit-0.json").write_text(json.dumps({"code": 75, "lines": []}))
    assert execute(spec(run, "pass"), run, os.environ) == (0, [])


def test_grandchildren_end_with_the_run(run: RunDir) -> None:
    program = (
        "import subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL,"
        " stderr=subprocess.DEVNULL); print(child.pid)"
    )
    execute(spec(run, program), run, os.environ)
    pid = int(run.log.read_text())
    time.sleep(0.2)
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(("signals", "expected"), [(1, 7), (2, 130)])
def test_a_signal_reaches_the_worker_and_a_second_ctrl_c_ends_it(run: RunDir, signals: int, expected: int) -> None:
    stubborn = (
        "import signal, sys, time;"
        "signal.signal(signal.SIGINT, lambda *_: None);"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM));"
        "print('ready', flush=True); time.sleep(1.5); sys.exit(7)"
    )
    parent = (
        "import os, sys, json; from pathlib import Path;"
        "from sft_play.launch.execute import execute; from sft_play.launch.spec import LaunchSpec;"
        "from sft_play.record.run_dir import RunDir;"
        f"run = RunDir(Path({str(run.path)!r}));"
        f"code, lines = execute(LaunchSpec(argv=(sys.executable, '-c', {stubborn!r}), environment={{}},"
        " files={run.run_json: '{}'}), run, os.environ);"
        "print(lines); sys.exit(7 if 'ended with 7' in lines[0] else code)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    process.communicate(timeout=30)
    assert process.returncode == expected
