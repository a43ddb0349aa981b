"""Where each backend's packages are: bnb's in the Python that runs this, unsloth's in an environment of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

FOLDER = "SFT_PLAY_UNSLOTH"
"""Variable that names another folder for the environment."""
ABSENT = "absent"


def unsloth_folder() -> Path:
    """The environment that `make install-unsloth` makes, beside `.venv`."""
    return Path(os.environ.get(FOLDER) or Path(__file__).parents[2] / ".venv-unsloth")


def unsloth_installed() -> bool:
    """Whether it is there, whole: the installer writes its stamp last."""
    folder = unsloth_folder()
    return (folder / "installed").is_file() and (folder / "bin" / "python").exists()


def python_of(backend: str) -> str:
    """The interpreter that a run's worker is started with."""
    return str(unsloth_folder() / "bin" / "python") if backend == "unsloth" else sys.executable


def versions_of(backend: str, packages: Iterable[str]) -> dict[str, str]:
    """Versions of packages where the backend's worker imports them, `absent` where one is not there."""
    folders = [str(one) for one in unsloth_folder().glob("lib/python3*/site-packages")]
    there = distributions(path=folders) if backend == "unsloth" else distributions()
    found = {_plain(one.metadata["Name"] or ""): one.version for one in reversed(list(there))}
    return {name: found.get(_plain(name), ABSENT) for name in packages}


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")
