"""A disk that fills up: one line with bytes needed and free, code 4, the earlier checkpoint whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.record.manifest import folder_problem
from tests.faults.hooks import hooked
from tests.tiny import Done, Workplace

NEEDED = r"checkpoint step-4 needs ([\d,]+) bytes and ([\d,]+) are free"
# Free space as it is, until the first checkpoint is there.
FILLING = """
from pathlib import Path
def patch(module):
    real = module.shutil.disk_usage
    def usage(path):
        there = list(Path(path).glob("step-2"))
        found = real(path)
        return found._replace(free=1000) if there else found
    module.shutil.disk_usage = usage
"""
# The n-th sync fails as a full disk does.
NO_SPACE = """
import errno
def patch(module):
    real, calls = os.fsync, []
    def fsync(handle):
        if os.readlink(f"/proc/self/fd/{handle}").rpartition("/")[0].endswith(("/checkpoint-4", "/step-4")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)
    os.fsync = fsync
"""


def only_step_2_is_left(workplace: Workplace) -> None:
    checkpoints = workplace.path / "runs/tiny/checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-2"]
    assert folder_problem(checkpoints / "step-2") == ""


def told_of_bytes(done: Done) -> tuple[int, int]:
    assert done.code == 4, done.out + done.err
    assert len(done.error_lines) == 1
    assert "Traceback" not in done.out + done.err
    found = re.search(NEEDED, done.error_lines[0])
    assert found is not None, done.error_lines
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


@pytest.fixture
def saving(workplace: Workplace) -> Workplace:
    """Four steps, saved at 2 and 4."""
    workplace.config["train"]["save_steps"] = 2
    workplace.write()
    return workplace


@pytest.mark.fault
def test_room_is_asked_for_before_each_save(saving: Workplace, tmp_path: Path) -> None:
    done = saving.train(**hooked(tmp_path / "hook", "sft_play.runtime.room", FILLING))
    needed, free = told_of_bytes(done)
    step_2 = saving.path / "runs/tiny/checkpoints/step-2"
    assert needed == sum(path.stat().st_size for path in step_2.iterdir())
    assert free == 1000
    only_step_2_is_left(saving)
    resumed = saving.train()
    assert resumed.code == 0, resumed.err
    assert "step-2" in resumed.out


@pytest.mark.parametrize(
    "ranks", [pytest.param("1", marks=pytest.mark.fault), pytest.param("2", marks=pytest.mark.slow)]
)
def test_no_space_in_the_middle_of_a_save(saving: Workplace, tmp_path: Path, ranks: str) -> None:
    command = "train" if ranks == "1" else "train-distributed"
    variables = {"NUM_GPUS": ranks, "TRAIN_BATCH_SIZE": "4" if ranks == "1" else "2"}
    hook = hooked(tmp_path / "hook", "sft_play.record.manifest", NO_SPACE)
    done = saving.run(command, CONFIG="tiny.yaml", **{**hook, **variables})
    needed, free = told_of_bytes(done)
    assert 0 < needed < free
    assert "No space left on device" in done.error_lines[0]
    only_step_2_is_left(saving)
    assert saving.run(command, CONFIG="tiny.yaml", **variables).code == 0


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_a_full_disk_and_the_run_goes_on_later(saving: Workplace) -> None:
    """The kernel's own refusal: no file beyond 20 KiB."""
    command = f"ulimit -f 20; exec {sys.executable} -m sft_play train"
    environ = saving.environ(CONFIG="tiny.yaml")
    done = subprocess.run(
        ["bash", "-c", command], cwd=saving.path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert "checkpoint step-2 needs" in done.stderr
    assert list((saving.path / "runs/tiny/checkpoints").iterdir()) == []
    assert saving.train().code == 0


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_minutes_between_saves(workplace: Workplace, ranks: str) -> None:
    """With a minute that is over after every step, every step is saved, on all ranks together."""
    workplace.config["train"] |= {"save_steps": 500, "save_minutes": 1e-9, "save_total_limit": None}
    workplace.write()
    command = "train" if ranks == "1" else "train-distributed"
    batch = "4" if ranks == "1" else "2"
    done = workplace.run(command, CONFIG="tiny.yaml", NUM_GPUS=ranks, TRAIN_BATCH_SIZE=batch)
    assert done.code == 0, done.err
    saved = sorted(path.name for path in (workplace.path / "runs/tiny/checkpoints").iterdir())
    assert saved == ["step-1", "step-2", "step-3", "step-4"]
    state = json.loads((workplace.path / "runs/tiny/checkpoints/step-3/trainer_state.json").read_text())
    assert state["global_step"] == 3
