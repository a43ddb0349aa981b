"""Every command of README.md and the docs runs here, on a tiny model, as it is written."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import ROOT, make_rows

README = (ROOT / "README.md").read_text(encoding="utf-8")
EVALUATION = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
DISTRIBUTED = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
# Run elsewhere: by .ci/run itself, and by every clean clone.
ELSEWHERE = {"make demo", "make test", "make install TORCH_INDEX=URL-of-a-package-index"}


def commands(page: str = README) -> list[str]:
    """Each `make ...` of a page, in order: lines of its shell blocks and code inside its sentences."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", page, re.S))
    text = re.sub(r"```.*?```", "", page, flags=re.S)
    lines = re.findall(r"^\s*(make .*)$", blocks, re.M)
    # In a sentence a bare `make train` is a name; with an input it is something to type.
    lines += [" ".join(code.split()) for code in re.findall(r"`(make [^`]*=[^`]+)`", text)]
    return [line.strip() for line in dict.fromkeys(lines) if "..." not in line and line.strip() not in ELSEWHERE]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The project as a user has it after the README's steps 1 and 2, with a tiny model in the real one's place."""
    folder = tmp_path_factory.mktemp("project")
    for name in (
        "Makefile",
        "sft_play",
        "pyproject.toml",
        "constraints.txt",
        "accelerate_configs",
        "deepspeed_configs",
    ):
        (folder / name).symlink_to(ROOT / name)
    # Not a link to the whole: torch would compile its extensions anew for each path of the environment.
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/installed").symlink_to(Path(sys.prefix) / "installed")
    (folder / ".venv/bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / ".venv/bin/python").chmod(0o755)
    (folder / "models").mkdir()
    (folder / "models/SmolLM2-135M-Instruct").symlink_to(tiny_model)
    (folder / "configs").mkdir()
    (yaml,) = re.findall(r"```yaml\n(.*?)```", README, re.S)
    (folder / "configs/mine.yaml").write_text(yaml)
    make_rows(folder / "data/mine/train.jsonl", 60)
    (row,) = re.findall(r"```json\n(.*?)```", README, re.S)
    with (folder / "data/mine/train.jsonl").open("a") as stream:
        stream.write(row.strip() + "\n")
    return folder


def run(project: Path, command: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "TMPDIR")}
    environ = {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        shlex.split(command), cwd=project, env=environ, capture_output=True, text=True, input="", check=False
    )


def test_the_two_commands_come_first() -> None:
    assert re.findall(r"```sh\n(.*?)```", README, re.S)[0] == "make demo\nmake test\n"


def test_every_command_of_the_readme_runs(project: Path) -> None:
    found = commands()
    assert len(found) >= 4, found
    for command in dict.fromkeys([*found, *commands(EVALUATION)]):
        trained = [f"runs/{path.name}" for path in project.glob("runs/mine-*")]
        if "train-d" in command:  # the run of `make train` is finished, and one of another name may be trained
            command += f" RUN_NAME={command.split()[1]}"
        done = run(project, command.replace("runs/NAME", *trained[:1]) if "runs/NAME" in command else command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("command", commands(DISTRIBUTED))
def test_every_command_about_several_processes_runs(project: Path, command: str) -> None:
    """The lines for several machines run in tests/distributed/test_machines.py."""
    name = f"RUN_NAME=several-{commands(DISTRIBUTED).index(command)}"
    planned = command.startswith("make plan")
    done = run(project, command if planned else f"{command} {name} TRAIN_EPOCHS=1 RUN_TENSORBOARD_PORT=16006")
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    if not planned:
        assert "2 processes train on the CPU" in done.stderr


def test_what_a_failed_run_says_is_explained() -> None:
    from sft_play.runtime.symptoms import SYMPTOMS

    spoken = ("collective", "NCCL", "process group", "port", "rank")
    for symptom in SYMPTOMS:
        if any(word in symptom.what for word in spoken):
            assert symptom.what in DISTRIBUTED


def test_the_misspelt_variable_of_the_readme_is_an_error(project: Path) -> None:
    done = run(project, "make train CONFIG=configs/mine.yaml TRAIN_BATCHSIZE=1")
    assert done.returncode == 2
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    (shown,) = re.findall(r"^error: .*$", README, re.M)
    assert said == shown
