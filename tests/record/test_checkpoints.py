"""Checkpoints on disk: published whole, verified on reading, rotated without losing the best."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from sft_play.errors import EnvironmentProblem, ResumeRefusedError, RunLockedError
from sft_play.record.checkpoints import newest_first, newest_good, publish, rotate, staging_folder
from sft_play.record.manifest import folder_problem
from sft_play.record.run_dir import RunDir, locked

STAMP: dict[str, Any] = {
    "version": 2,
    "mode": "lora",
    "backend": "bnb",
    "quantization": None,
    "adapter": {"r": 4},
    "base_model": "m",
    "base_identity": "b",
    "precision": {"weights": "fp32"},
    "tokenizer_hash": "t",
    "template_hash": "c",
    "strategy": "fsdp",
    "world_size": 2,
    "global_batch": 8,
    "data_fingerprint": "d",
    "settings": {"train.seed": 1, "train.learning_rate": 0.01},
}
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
    for name in ("optimizer.pt", "manifest.json"):
        file = folder / name
        whole = file.read_bytes()
        for position in range(len(whole)):
            for bit in (1, 4):
                file.write_bytes(whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :])
                assert name in folder_problem(folder), (name, position)
        file.write_bytes(whole)
    assert folder_problem(folder) == ""


def test_rotation_keeps_the_newest_and_the_best_and_touches_nothing_foreign(run: RunDir) -> None:
    for step in (1, 2, 3, 4, 5):
        save(run, step)
    foreign = run.checkpoints / "step-1000"
    foreign.mkdir()
    (foreign / "mine.txt").write_text("mine")
    rotate(run, 2, run.checkpoints / "step-5", best_step=1)
    assert steps(run) == [1000, 5, 4, 1]
    assert (foreign / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("key", [key for key in STAMP if key not in ("version", "settings")])
def test_a_checkpoint_of_another_run_is_refused_in_two_columns(run: RunDir, key: str) -> None:
    save(run, 1)
    with pytest.raises(ResumeRefusedError) as caught:
        newest_good(run, {**STAMP, key: "other"}, print)
    error, columns, difference = caught.value.lines()
    assert f"checkpoint step-1 is of another run: {key}" in error
    assert "RUN_NAME=" in error
    assert columns.split() == ["made", "by", "this", "run"]
    assert difference.split() == [key, *str(STAMP[key]).split(), "other"]


@pytest.mark.parametrize("key", ["backend", "mode", "quantization", "adapter", "base_identity", "strategy"])
def test_what_cannot_be_loaded_cannot_be_forced(run: RunDir, key: str) -> None:
    save(run, 1)
    with pytest.raises(ResumeRefusedError) as caught:
        newest_good(run, {**STAMP, key: "other"}, print, force=True)
    assert "--force" not in caught.value.line()


def test_other_settings_are_forced_and_recorded(run: RunDir) -> None:
    folder = save(run, 1)
    now = {**STAMP, "settings": {"train.seed": 2, "train.learning_rate": 0.01}}
    with pytest.raises(ResumeRefusedError) as caught:
        newest_good(run, now, print)
    assert "ARGS=--force" in caught.value.line()
    assert newest_good(run, now, print, force=True) == folder
    assert now["forced"] == ["train.seed 1 -> 2"]


def test_whole_checkpoints_go_on_with_any_number_of_ranks(run: RunDir) -> None:
    staged = staging_folder(run) / "checkpoint-1"
    staged.mkdir()
    folder = publish(run, staged, 1, {**STAMP, "strategy": "ddp", "world_size": 2})
    for strategy, ranks in (("single", 1), ("ddp", 4)):
        assert newest_good(run, {**STAMP, "strategy": strategy, "world_size": ranks}, print) == folder
    with pytest.raises(ResumeRefusedError, match="strategy"):
        newest_good(run, {**STAMP, "strategy": "fsdp"}, print)


def test_data_that_an_earlier_version_knew_by_another_fingerprint_are_the_same(run: RunDir) -> None:
    folder = save(run, 1)
    now = {**STAMP, "data_fingerprint": "blocks", "data_fingerprint_before": "d"}
    assert newest_good(run, now, print) == folder
    for other in ({**now, "data_fingerprint_before": "other"}, {**STAMP, "data_fingerprint": "blocks"}):
        with pytest.raises(ResumeRefusedError, match="data_fingerprint"):
            newest_good(run, other, print)


def test_stamps_of_version_1_are_read_and_newer_ones_refused(run: RunDir) -> None:
    folder = save(run, 1)
    flat = {"version": 1, "step": 1, "strategy": "fsdp", "world_size": 2, "config_hash": "h", "mode": "lora"}
    manifest = {**flat, "files": json.loads((folder / "manifest.json").read_text())["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert newest_good(run, {**STAMP, "config_hash": "h"}, print) == folder
    with pytest.raises(ResumeRefusedError, match="config_hash"):
        newest_good(run, {**STAMP, "config_hash": "other"}, print)
    save(run, 2)
    newer = staging_folder(run) / "checkpoint-3"
    newer.mkdir()
    publish(run, newer, 3, {**STAMP, "version": 99, "sft_play": "9.0"})
    with pytest.raises(ResumeRefusedError, match="made by a newer sft-play"):
        newest_good(run, STAMP, print)


def test_what_a_killed_save_left_is_dropped(run: RunDir) -> None:
    (staging_folder(run) / "half").write_text("x")
    assert list(staging_folder(run).iterdir()) == []
    assert newest_good(run, STAMP, print) is None


def test_the_lock_names_its_holder_and_ends_with_it(run: RunDir) -> None:
    with locked(run), pytest.raises(RunLockedError, match=str(os.getpid())), locked(run):
        pass
    with locked(run):
        pass


def test_whoever_only_looks_at_the_lock_keeps_nobody_out(run: RunDir) -> None:
    with locked(run):
        pass
    with (run.launch / "lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        release = threading.Timer(0.03, fcntl.flock, (looking, fcntl.LOCK_UN))
        release.start()
        with locked(run):
            assert (run.launch / "lock").read_text() == str(os.getpid())
        release.join()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_text("")
    with pytest.raises(EnvironmentProblem, match="no run"):
        RunDir(tmp_path).create()
