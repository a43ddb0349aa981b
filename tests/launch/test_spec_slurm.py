"""The sbatch script, run by bash with stand-ins for Slurm's own programs: what starts where, and what ends how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import ROOT

PROGRAMS = {
    "scontrol": """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then printf 'node%s\\n' a b c; else echo "$@" >> "$LOG/scontrol"; fi
""",
    # One task a machine, at the same time; TERM goes to each, and the highest code comes back.
    "srun": """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
trap 'kill -TERM $tasks' TERM
for node in 0 1 2; do SLURM_NODEID=$node "$@" & tasks="$tasks $!"; done
worst=0
for task in $tasks; do
  wait $task; code=$?
  while [ $code -gt 128 ] && [ $code -ne 127 ]; do
    alive=no; kill -0 $task 2>/dev/null && alive=yes
    wait $task; last=$?; [ $last -eq 127 ] || code=$last
    [ $alive = yes ] || break
  done
  [ $code -gt $worst ] && worst=$code
done
exit $worst
""",
    "python": """#!/bin/bash
trap 'exit 75' TERM
{ echo "$PWD"; echo "$@"; echo "$NODE_RANK/$NUM_NODES $MAIN_ADDRESS:$MAIN_PORT"; echo "$CONFIG"
  echo "$TRAIN_SEED"; } \\
  > "$LOG/task-$NODE_RANK"
if [ -n "$SLEEP" ]; then sleep "$SLEEP" > /dev/null & wait $!; fi
exit ${CODE:-0}
""",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder whose name a shell would take apart, with a config and Slurm's stand-ins."""
    folder = tmp_path / "it's my $HOME"
    (folder / "bin").mkdir(parents=True)
    for name, text in PROGRAMS.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "a config.yaml").write_text("model: {name: m}\ndata: {train: a}\n")
    return folder


def write(place: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CONFIG": "a config.yaml", **variables}
    command = [sys.executable, "-m", "sft_play", "slurm"]
    return subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, check=False)


def script_of(place: Path, **variables: str) -> Path:
    done = write(place, NUM_NODES="3", **variables)
    assert done.returncode == 0, done.stderr
    (script,) = (place / "runs/slurm").glob("*.sbatch")
    assert f"runs/slurm/{script.name}" in done.stdout
    assert f"runs/slurm/{script.stem}-%j.out" in done.stdout
    return script


def start(place: Path, script: Path, **variables: str) -> subprocess.Popen[str]:
    """Run the script with the interpreter replaced by a stand-in that writes down how it was started."""
    quoted = next(line for line in script.read_text().splitlines() if line.startswith("python="))
    stand_in = str(place / "bin/python").replace("'", "'\"'\"'")
    script.write_text(script.read_text().replace(quoted, f"python='{stand_in}'"))
    log = place / "log"
    log.mkdir()
    environ = {
        "PATH": f"{place / 'bin'}:/usr/bin:/bin", "LOG": str(log), "SLURM_JOB_ID": "41234",
        "SLURM_JOB_NODELIST": "node[a-c]", **variables,
    }  # fmt: skip
    return subprocess.Popen(["bash", str(script)], env=environ, cwd="/", stdout=subprocess.PIPE, text=True)


def test_every_machine_starts_the_command_with_its_number(place: Path) -> None:
    script = script_of(place, TRAIN_SEED="5")
    subprocess.run(["bash", "-n", str(script)], check=True)
    process = start(place, script)
    process.communicate(timeout=30)
    assert process.returncode == 0
    for rank in range(3):
        folder, words, meeting, config, seed = (place / f"log/task-{rank}").read_text().splitlines()
        assert (folder, words) == (str(place), "-m sft_play train-distributed")
        assert meeting == f"{rank}/3 nodea:{20000 + 41234 % 20000}"
        assert (config, seed) == (str(place / "a config.yaml"), "5")
    assert not (place / "log/scontrol").exists()


def test_the_head_says_what_slurm_has_to_know(place: Path) -> None:
    text = script_of(place, NUM_GPUS="4", ARGS="--partition=a100 --time=1-0").read_text()
    for line in (
        "--nodes=3",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--requeue",
        "--partition=a100",
        "--time=1-0",
    ):
        assert f"\n#SBATCH {line}\n" in text
    (output,) = [line for line in text.splitlines() if line.startswith("#SBATCH --output=")]
    assert output.startswith(f'#SBATCH --output="{place}/runs/slurm/')
    assert output.endswith('-%j.out"')
    assert "#SBATCH --signal=B:USR1@" in text
    assert "make " not in text.replace("Written by make slurm", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_preempted_job_saves_and_queues_again(place: Path, number: int) -> None:
    process = start(place, script_of(place), SLEEP="30")
    deadline = time.monotonic() + 20
    while len(list((place / "log").glob("task-*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 75
    assert (place / "log/scontrol").read_text() == "requeue 41234\n"


def test_a_job_that_failed_does_not_queue_again(place: Path) -> None:
    process = start(place, script_of(place), CODE="6")
    process.communicate(timeout=30)
    assert process.returncode == 6
    assert not (place / "log/scontrol").exists()


def test_zero_goes_through_the_other_command(place: Path) -> None:
    assert "-m sft_play train-deepspeed" in script_of(place, DIST_STRATEGY="zero2").read_text()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "NUM_NODES: several machines are needed"),
        ({"NUM_NODES": "1"}, "NUM_NODES: several machines are needed"),
        ({"NUM_NODES": "2", "MAIN_ADDRESS": "a"}, "MAIN_ADDRESS: is decided by Slurm"),
        ({"NUM_NODES": "2", "TRAIN_BATCH_SIZE": "x"}, "TRAIN_BATCH_SIZE=x: train.batch_size takes"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(place: Path, variables: dict[str, str], said: str) -> None:
    done = write(place, **variables)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith(f"error: {said}")
