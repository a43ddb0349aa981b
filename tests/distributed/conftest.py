from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from tests.tiny import Workplace, make_model, make_workplace


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Workplace:
    """One workplace for all test processes of this session: a run is made once, whoever asks first."""
    base = tmp_path_factory.getbasetemp()
    folder: Path = (base if worker_id == "master" else base.parent) / "shared-runs"
    folder.mkdir(exist_ok=True)
    with (folder / "made.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        model = folder / "tokenizer-chatml"
        if not (model / "made").exists():
            model = make_model(folder)
            (model / "made").touch()
        return make_workplace(folder, model)
