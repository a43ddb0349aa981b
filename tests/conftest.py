from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import Workplace, make_model, make_workplace


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model for the whole session; tests only read it."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def workplace(tmp_path: Path, tiny_model: Path) -> Workplace:
    return make_workplace(tmp_path, tiny_model)
