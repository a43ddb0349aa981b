from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.tiny import Workplace, make_model, make_workplace


def pytest_configure() -> None:
    """A shell ignores SIGINT for what it starts in the background, and every program started from there would too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model for the whole session; tests only read it."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def workplace(tmp_path: Path, tiny_model: Path) -> Workplace:
    return make_workplace(tmp_path, tiny_model)
