"""Damaged and foreign checkpoints: each damage is found and named, and what is not ours is left alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sft_play.errors import ResumeRefusedError
from sft_play.record.checkpoints import newest_good, stamp_of
from sft_play.record.manifest import folder_problem, read_manifest
from sft_play.record.run_dir import RunDir
from tests.tiny import Workplace, make_model, make_workplace


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "delete": Path.unlink,
    "truncate": truncate,
    "empty": lambda path: path.write_bytes(b""),
    "flip": flip,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A run with checkpoints at 2 and 4; tests work on copies."""
    folder = tmp_path_factory.mktemp("finished")
    workplace = make_workplace(folder, make_model(folder / "model"))
    workplace.write(train={**workplace.config["train"], "save_steps": 2})
    done = workplace.train()
    assert done.code == 0, done.err
    return workplace


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damage_to_every_file_is_named_and_the_older_checkpoint_taken(
    finished: Workplace, tmp_path: Path, damage: str
) -> None:
    names = sorted(path.name for path in (finished.path / "runs/tiny/checkpoints/step-4").iterdir())
    assert {"adapter_model.safetensors", "optimizer.pt", "manifest.json", "trainer_state.json"} <= set(names)
    for name in names:
        run = RunDir(shutil.copytree(finished.path / "runs/tiny", tmp_path / name))
        stamp = dict(stamp_of(read_manifest(run.checkpoints / "step-4")))
        DAMAGE[damage](run.checkpoints / "step-4" / name)
        said: list[str] = []
        found = newest_good(run, stamp, said.append)
        assert found == run.checkpoints / "step-2", name
        assert "step-4 is set aside" in said[0]
        assert name in said[0]
        assert (run.checkpoints / "damaged-step-4").is_dir()
        DAMAGE[damage](run.checkpoints / "step-2" / name)
        with pytest.raises(ResumeRefusedError, match="no checkpoint of this run is whole"):
            newest_good(run, stamp, said.append)


@pytest.mark.parametrize(("damage", "name"), [("flip", "optimizer.pt"), ("truncate", "manifest.json")])
def test_the_program_goes_on_from_the_older_one(finished: Workplace, damage: str, name: str) -> None:
    run = finished.path / "runs" / f"whole-{damage}"
    finished.write(run={"name": run.name}, train={**finished.config["train"], "save_steps": 2})
    shutil.copytree(finished.path / "runs/tiny", run)
    (run / "record.json").unlink()
    result = (run / "adapter/adapter_model.safetensors").read_bytes()
    DAMAGE[damage](run / "checkpoints/step-4" / name)
    done = finished.train()
    assert done.code == 0, done.err
    assert f"checkpoint step-4 is set aside: {name}" in done.out
    assert "resuming from" in done.out
    assert (run / "adapter/adapter_model.safetensors").read_bytes() == result


def test_foreign_folders_are_never_deleted_and_never_counted(workplace: Workplace, finished: Workplace) -> None:
    """One slot for checkpoints: stale ones, higher and lower, ours by name or not, do not take it."""
    workplace.write(train={**workplace.config["train"], "save_steps": 2, "save_total_limit": 1})
    checkpoints = workplace.path / "runs/tiny/checkpoints"
    for name in ("checkpoint-1000", "checkpoint-1", "mine"):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "precious.txt").write_text("mine")
    (checkpoints.parent / ".sft-play").touch()
    done = workplace.train()
    assert done.code == 0, done.err
    kept = sorted(path.name for path in checkpoints.iterdir())
    assert kept == ["checkpoint-1", "checkpoint-1000", "mine", "step-4"]
    assert all((checkpoints / name / "precious.txt").is_file() for name in kept[:3])
    assert folder_problem(checkpoints / "step-4") == ""
