"""The installer's decisions; that it really installs is what every clean clone shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.cli.install import check_platform, steps
from sft_play.errors import EnvironmentProblem
from tests.tiny import ROOT


@pytest.mark.parametrize(
    ("system", "python", "said"), [("Windows", (3, 12), "WSL"), ("Linux", (3, 10), "3.10 is too old")]
)
def test_what_is_not_supported_is_told(system: str, python: tuple[int, int], said: str) -> None:
    with pytest.raises(EnvironmentProblem, match=said):
        check_platform(system, python)


def test_torch_index_is_for_torch_alone() -> None:
    with_index = [arguments for _, arguments in steps("https://example.org/whl/cpu")]
    assert [("--index-url" in arguments) for arguments in with_index] == [False, True, False]
    assert not any("--index-url" in arguments for _, arguments in steps(""))


def test_every_requirement_of_the_project_is_pinned() -> None:
    import tomllib

    pins = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {name.lower().replace("_", "-") for name in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert [name for name in wanted if name.lower().replace("_", "-") not in pinned] == []


def test_the_pins_are_what_is_installed() -> None:
    from importlib.metadata import version

    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if "==" in line and not line.startswith("#"):
            name, pin = line.split("==")
            assert version(name).split("+")[0] == pin, name


def test_an_installed_environment_is_left_alone(tmp_path: Path) -> None:
    """Everything is current: no pip, no network, under a second."""
    from sft_play.cli.install import fingerprint

    for name in ("constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".venv").mkdir()
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        (tmp_path / ".venv/installed").write_text(fingerprint(""))
    finally:
        os.chdir(here)
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/nonexistent"}
    command = [sys.executable, "-m", "sft_play.cli.install"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True, timeout=10)
    assert "current" in done.stdout
