"""report, compare, runs, clean-runs and tensorboard as commands."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from sft_play.launch.tensorboard import free_port
from sft_play.record.run_dir import RunDir, locked
from tests.report.made import made_run
from tests.tiny import Workplace


@pytest.fixture
def runs(workplace: Workplace) -> Path:
    """A folder of runs: `one` and `old` are done, `bad` failed, `foreign` is none of ours."""
    folder = workplace.path / "runs"
    for name in ("one", "old", "bad"):
        made_run(folder / name, error="it broke" if name == "bad" else "")
    os.utime(folder / "old/run.json", (0, time.time() - 40 * 86400))
    (folder / "foreign").mkdir()
    (folder / "foreign/run.json").write_text("{}")
    (folder / "link").symlink_to(folder / "one")
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_run_ends_with_its_report_and_a_failing_report_fails_no_run(workplace: Workplace) -> None:
    assert workplace.train().code == 0
    page = (workplace.path / "runs/tiny/report.html").read_text()
    assert f'data-key="train_loss" data-value="{workplace.record()["train_loss"]}"' in page
    (workplace.path / "runs/other/report.html").mkdir(parents=True)
    (workplace.path / "runs/other/.sft-play").touch()
    done = workplace.train(RUN_NAME="other")
    assert done.code == 0
    assert "warning: no report was written" in done.err


def test_report_and_compare_say_where_the_page_is(workplace: Workplace, runs: Path) -> None:
    assert workplace.run("report", RUN="runs/one").out == "runs/one/report.html\n"
    assert (runs / "one/report.html").is_file()
    assert workplace.run("report", RUN="one", RUN_OUTPUT_DIR=str(runs)).out == f"{runs}/one/report.html\n"
    assert workplace.run("compare", RUNS="runs/one old").out == "runs/compare-one-old.html\n"
    assert (runs / "compare-one-old.html").is_file()


@pytest.mark.parametrize(
    ("command", "variables", "said"),
    [
        ("report", {}, "RUN is missing"),
        ("report", {"RUN": "runs/none"}, "there is no run runs/none"),
        ("report", {"RUN": "runs/foreign"}, "is no run of sft-play"),
        ("compare", {"RUNS": "runs/one"}, "two runs or more"),
        ("clean-runs", {}, "nothing is chosen"),
        ("clean-runs", {"RUNS": "runs/foreign", "ARGS": "--yes"}, "is no run of sft-play"),
        ("clean-runs", {"RUNS": "one", "RUN_OUTPUT_DIR": "elsewhere", "ARGS": "--yes"}, "there is no run one"),
        ("compare", {"RUNS": "runs/one one runs/../runs/one/"}, "two runs or more"),
        ("compare", {"RUNS": "'runs/one"}, "cannot be split into words"),
        ("clean-runs", {"RUNS": "'runs/one", "ARGS": "--yes"}, "cannot be split into words"),
        ("clean-runs", {"RUNS": "runs/link", "ARGS": "--yes"}, "is a link"),
        ("clean-runs", {"RUNS": "runs", "ARGS": "--yes"}, "is no run of sft-play"),
        ("clean-runs", {"ARGS": "--older-than soon"}, "12h, 30d, 8w"),
        ("clean-runs", {"ARGS": "--failed"}, "no terminal"),
        ("tensorboard", {"RUN_OUTPUT_DIR": "nowhere"}, "holds no run"),
        ("tensorboard", {"RUN_TENSORBOARD_PORT": "0"}, "is no port"),
    ],
)
def test_a_wrong_input_is_one_line(
    workplace: Workplace, runs: Path, command: str, variables: dict[str, str], said: str
) -> None:
    before = names(runs)
    done = workplace.run(command, **variables)
    assert done.code == 2
    (line,) = done.error_lines
    assert said in line
    assert "->" in line
    assert names(runs) == before


def test_runs_lists_what_is_ours_with_its_state(workplace: Workplace, runs: Path) -> None:
    with locked(RunDir(runs / "one")):
        found = json.loads(workplace.run("runs", ARGS="--json").out)
        table = workplace.run("runs").out.splitlines()
    assert {one["name"]: one["state"] for one in found} == {"old": "done", "bad": "failed", "one": "running"}
    assert found[0]["name"] == "old"
    assert (found[0]["loss"], found[0]["tokens_per_second"], found[0]["method"]) == (1.5, 98.7, "full")
    assert table[0].split() == ["run", "state", "model", "method", "loss", "tokens/s", "age", "size"]
    assert table[1].split()[:7] == ["old", "done", "m", "full", "1.5000", "99", "40"]
    assert workplace.run("runs", RUN_OUTPUT_DIR="nowhere").out == "no runs in nowhere\n"


def test_clean_runs_removes_what_is_chosen_and_never_one_at_work(workplace: Workplace, runs: Path) -> None:
    with locked(RunDir(runs / "bad")):
        assert workplace.run("clean-runs", ARGS="--failed --yes").out == "no run to remove\n"
        named = workplace.run("clean-runs", RUNS="bad", ARGS="--yes")
        assert named.code == 4
        assert "at work" in named.error_lines[0]
    done = workplace.run("clean-runs", ARGS="--older-than 30d --yes")
    assert "removed runs/old" in done.out
    assert names(runs) == {"one", "bad", "foreign", "link"}
    workplace.run("clean-runs", ARGS="--failed --yes")
    assert names(runs) == {"one", "foreign", "link"}


def test_clean_runs_takes_a_run_once_however_it_is_named(workplace: Workplace, runs: Path) -> None:
    (runs / "one/inside").symlink_to(runs / "old")
    done = workplace.run("clean-runs", RUNS="one runs/one/ ./runs/one", ARGS="--yes")
    assert (done.code, done.out.splitlines()[-1]) == (0, "removed runs/one")
    assert "1 to remove" in done.out
    assert names(runs) == {"old", "bad", "foreign", "link"}
    assert names(runs / "old") >= {"run.json", "metrics.jsonl"}
    inside = Workplace(runs / "old", workplace.model).run("clean-runs", RUNS=".", ARGS="--yes")
    assert inside.code == 0
    assert names(runs) == {"bad", "foreign", "link"}


def test_what_clean_runs_left_half_deleted_is_taken_and_a_foreign_folder_is_not(
    workplace: Workplace, runs: Path
) -> None:
    (runs / ".trash-one").mkdir()
    (runs / ".trash-one/precious").touch()
    done = workplace.run("clean-runs", RUNS="one", ARGS="--yes")
    assert done.code == 4
    assert "in the way" in done.error_lines[0]
    assert (runs / ".trash-one/precious").exists()
    (runs / ".trash-one/.sft-play").touch()
    assert workplace.run("clean-runs", RUNS="one", ARGS="--yes").code == 0
    assert names(runs) == {"old", "bad", "foreign", "link"}


@pytest.mark.parametrize(("answer", "left"), [("n", True), ("", True), ("y", False)])
def test_clean_runs_asks(workplace: Workplace, runs: Path, answer: str, left: bool) -> None:
    terminal, inner = pty.openpty()
    os.write(terminal, f"{answer}\n".encode())
    words = [sys.executable, "-m", "sft_play", "clean-runs"]
    environ = workplace.environ(RUNS="runs/one")
    subprocess.run(words, cwd=workplace.path, env=environ, stdin=inner, capture_output=True, check=True)
    os.close(inner)
    os.close(terminal)
    assert (runs / "one").exists() is left


def test_tensorboard_shows_all_runs_until_it_is_ended(workplace: Workplace, runs: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for name in ("one", "old"):
        with SummaryWriter(str(runs / name / "tb")) as writer:
            writer.add_scalar("train/loss", 1.0, 1)
    port = free_port(16206)
    server = workplace.start("tensorboard", RUN_TENSORBOARD_PORT=str(port))
    assert server.stdout is not None
    assert server.stdout.readline() == f"TensorBoard: http://localhost:{port}\n"
    direct, deadline, shown = urllib.request.build_opener(urllib.request.ProxyHandler({})), time.monotonic() + 60, {}
    while len(shown) < 2 and time.monotonic() < deadline:
        with direct.open(f"http://127.0.0.1:{port}/data/plugin/scalars/tags", timeout=10) as answer:
            shown = json.load(answer)
        time.sleep(0.5)
    assert shown.keys() >= {"one/tb", "old/tb"}
    server.send_signal(signal.SIGINT)
    _, said = server.communicate(timeout=30)
    assert (server.returncode, said) == (0, "")
    assert free_port(port) == port


def test_streams_that_are_closed_and_an_output_that_is_full(workplace: Workplace, runs: Path) -> None:
    words = f"{sys.executable} -m sft_play"
    said = {}
    for line in ("runs >&-", "runs <&- >&- 2>&-", "clean-runs <&-", "report >/dev/full"):
        environ = workplace.environ(RUNS="one", RUN="one") if "runs >" not in line else workplace.environ()
        environ.pop("RUN" if "clean" in line else "RUNS", None)
        done = subprocess.run(
            f"{words} {line}", shell=True, cwd=workplace.path, env=environ, capture_output=True, text=True, check=False
        )
        said[line] = (done.returncode, done.stderr.count("\n"), "Traceback" in done.stderr)
    assert said == {
        "runs >&-": (0, 0, False),
        "runs <&- >&- 2>&-": (0, 0, False),
        "clean-runs <&-": (2, 1, False),
        "report >/dev/full": (4, 1, False),
    }
    assert (runs / "one").is_dir()
