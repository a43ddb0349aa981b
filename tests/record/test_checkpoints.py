"""Checkpoints on disk: published whole, verified on reading, rotated without losing the best."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.errors import EnvironmentProblem, ResumeRefusedError, RunLockedError
from sft_play.record.checkpoints import newest_first, newest_good, publish, rotate, staging_folder
from sft_play.record.manifest import folder_problem
from sft_play.record.run_dir import RunDir, locked

STAMP = {"config_hash": "h", "mode": "lora", "strategy": "single", "data_fingerprint": "d", "base_identity": "b"}
CONTENT = {"adapter_model.safetensors": b"weights" * 50, "optimizer.pt": b"moments", "empty": b""}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def save(run: RunDir, step: int) -> Path:
    staged = staging_folder(run) / f"checkpoint-{step}"
    staged.mkdir()
    for name, content in CONTENT.items():
        (staged / name).write_bytes(content)
    return publish(run, staged, step, STAMP)


def steps(run: RunDir) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in newest_first(run)]


def test_the_newest_is_found_by_number_not_by_name_or_time(run: RunDir) -> None:
    for step in (9, 100, 20):
        save(run, step)
    assert steps(run) == [100, 20, 9]
    assert newest_good(run, STAMP, print) == run.checkpoints / "step-100"


@pytest.mark.parametrize("name", [*CONTENT, "manifest.json"])
@pytest.mark.parametrize("damage", ["delete", "truncate", "flip", "append"])
def test_every_damage_to_every_file_is_found(run: RunDir, name: str, damage: str) -> None:
    good, bad = save(run, 1), save(run, 2)
    file = bad / name
    content = file.read_bytes()
    if damage == "delete":
        file.unlink()
    elif damage == "truncate" and content:
        file.write_bytes(content[:-1])
    elif damage == "flip" and content:
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    else:
        file.write_bytes(content + b"x")
    assert folder_problem(bad)
    said: list[str] = []
    assert newest_good(run, STAMP, said.append) == good
    assert "step-2" in said[0]


def test_a_flipped_bit_anywhere_is_found(run: RunDir) -> None:
    folder = save(run, 1)
    file = folder / "optimizer.pt"
    whole = file.read_bytes()
    for position in range(len(whole)):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        assert "optimizer.pt" in folder_problem(folder)
    file.write_bytes(whole)
    assert folder_problem(folder) == ""


def test_rotation_keeps_the_newest_and_the_best_and_touches_nothing_foreign(run: RunDir) -> None:
    for step in (1, 2, 3, 4, 5):
        save(run, step)
    foreign = run.checkpoints / "step-1000"
    foreign.mkdir()
    (foreign / "mine.txt").write_text("mine")
    rotate(run, keep=2, best_step=1)
    assert steps(run) == [1000, 5, 4, 1]
    assert (foreign / "mine.txt").read_text() == "mine"


def test_a_checkpoint_of_another_run_is_refused(run: RunDir) -> None:
    save(run, 1)
    for key in STAMP:
        with pytest.raises(ResumeRefusedError, match=f"{key}: made by {STAMP[key]}, this run is other"):
            newest_good(run, {**STAMP, key: "other"}, print)


def test_what_a_killed_save_left_is_dropped(run: RunDir) -> None:
    (staging_folder(run) / "half").write_text("x")
    assert list(staging_folder(run).iterdir()) == []
    assert newest_good(run, STAMP, print) is None


def test_the_lock_names_its_holder_and_ends_with_it(run: RunDir) -> None:
    import os

    with locked(run), pytest.raises(RunLockedError, match=str(os.getpid())), locked(run):
        pass
    with locked(run):
        pass


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_text("")
    with pytest.raises(EnvironmentProblem, match="no run"):
        RunDir(tmp_path).create()
