"""A pickle that runs a program, put into each file of a checkpoint: nothing of it ever runs.

The attacker recomputes the manifest, but has no key to sign it with.
"""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest

from sft_play.record import manifest
from sft_play.record.run_dir import write_atomic
from tests.tiny import Workplace

# Strategy -> ranks.
STRATEGIES = {"single": 1, "fsdp": 2, "zero2": 2}


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def replace_by_bomb(file: Path, canary: Path) -> None:
    """A file of the same kind with the bomb in it: torch's archives keep theirs in data.pkl."""
    if file.suffix not in (".pt", ".pth", ".bin"):
        file.write_bytes(pickle.dumps(Bomb(canary)))
        return
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(canary), protocol=2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")


def forge(folder: Path) -> None:
    """The manifest as it would be of these files, unsigned as by one who lacks the key."""
    said = json.loads((folder / manifest.NAME).read_text())
    for file in (one for one in folder.rglob("*") if one.is_file() and one.name != manifest.NAME):
        said["files"][str(file.relative_to(folder))] = {"bytes": file.stat().st_size, "sha256": manifest.sha256(file)}
    said["checksum"] = manifest._checksum(said)
    write_atomic(folder / manifest.NAME, manifest._text(said))


def checkpointed(workplace: Workplace, strategy: str) -> dict[str, str]:
    """A finished run of two steps that may be gone on with after its first; returns how it is called."""
    given = {"CONFIG": "tiny.yaml", "NUM_GPUS": str(STRATEGIES[strategy]), "DIST_STRATEGY": strategy}
    given |= {"TRAIN_BATCH_SIZE": "2", "XDG_CONFIG_HOME": str(workplace.path / "home")}
    workplace.write(train={**workplace.config["train"], "max_steps": 2, "save_steps": 1, "eval_strategy": "no"})
    assert workplace.run("train-distributed", **given).code == 0
    run = workplace.path / "runs/tiny"
    shutil.rmtree(run / "checkpoints/step-2")
    (run / "record.json").unlink()
    return given


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=pytest.mark.slow if name == "fsdp" else pytest.mark.fault) for name in STRATEGIES],
)
def test_a_pickle_in_any_file_runs_nothing(workplace: Workplace, strategy: str) -> None:
    """All files that may be pickles at once, with one that was never there; then one alone."""
    given = checkpointed(workplace, strategy)
    run, canary = workplace.path / "runs/tiny", workplace.path / "PWNED"
    folder, good = run / "checkpoints/step-1", workplace.path / "good"
    shutil.copytree(folder, good)
    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.suffix in (".pt", ".pth", ".bin")]
    assert names
    for attacked in ([*names, "training_args.bin"], *([name] for name in names[: 1 if strategy == "single" else 0])):
        shutil.rmtree(run / "checkpoints")
        (run / "record.json").unlink(missing_ok=True)
        shutil.copytree(good, folder)
        for name in attacked:
            replace_by_bomb(folder / name, canary)
        forge(folder)
        done = workplace.run("train-distributed", **given)
        assert not canary.exists(), attacked
        assert done.code == 3, (attacked, done.out + done.err)
        assert len([line for line in done.error_lines if not line.startswith("error:   ")]) == 1
        assert "Traceback" not in done.out + done.err


def test_the_bomb_goes_off_where_pickles_are_trusted(tmp_path: Path) -> None:
    """The control: the file is a working pickle."""
    import torch

    replace_by_bomb(tmp_path / "optimizer.pt", tmp_path / "PWNED")
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert not (tmp_path / "PWNED").exists()
    torch.load(tmp_path / "optimizer.pt", weights_only=False)
    assert (tmp_path / "PWNED").exists()
