"""`make install`: the virtual environment and the pinned stack, made once and left alone when current.

Runs under the user's own Python with nothing but the standard library, before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from sft_play.errors import EnvironmentProblem, SftPlayError, exit_code_of

OLDEST_PYTHON = (3, 11)
SYSTEMS = ("Linux", "Darwin")
# deepspeed and rouge-score ship as source; with these installed they build without fetching a tool chain.
# No compiled operators at install time; with a GPU and no nvcc even asking which could be compiled would fail.
BUILD_SETTINGS = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
BUILD_TOOLS = ("setuptools", "wheel", "py-cpuinfo", "ninja")


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Bring `.venv` up to date.

    Raises:
        EnvironmentProblem: unsupported system or Python, or a step of pip failed.
    """
    check_platform(platform.system(), sys.version_info[:2])
    venv, stamp, kept_index = Path(".venv"), Path(".venv/installed"), Path(".venv/torch-index")
    earlier = kept_index.read_text() if kept_index.is_file() else ""
    index = environ.get("TORCH_INDEX", earlier)
    wanted = fingerprint(index)
    if stamp.is_file() and stamp.read_text() == wanted:
        stamp.touch()
        print("install: .venv is current")
        return 0
    started = time.monotonic()
    if not (venv / "bin" / "pip").is_file() or venv_version(venv) != platform.python_version():
        if venv.is_symlink():
            raise EnvironmentProblem(
                f"a link whose Python is not {platform.python_version()}; what it leads to is not ours to clear",
                where=".venv",
                fix="remove the link, or call make with the PYTHON that made it",
            )
        say(f"creating .venv with Python {platform.python_version()}")
        run_step([sys.executable, "-m", "venv", "--clear", str(venv)])
    for title, arguments in steps(index, another_build=index != earlier):
        say(title)
        run_step([str(venv / "bin" / "python"), "-m", "pip", "install", *arguments])
    kept_index.write_text(index)
    stamp.write_text(wanted)
    say(f"done in {time.monotonic() - started:.0f} s")
    return 0


def check_platform(system: str, python: tuple[int, ...]) -> None:
    """Refuse what the pinned stack does not run on.

    Raises:
        EnvironmentProblem: naming what was found and what is supported.
    """
    if system not in SYSTEMS:
        raise EnvironmentProblem(
            f"{system} is not supported", fix="use Linux (macOS for planning and tests; on Windows, WSL 2)"
        )
    if python < OLDEST_PYTHON:
        raise EnvironmentProblem(
            f"Python {python[0]}.{python[1]} is too old", fix="make install PYTHON=python3.11 (or newer)"
        )
    if system == "Darwin":
        print("install: on macOS planning and tests may work; training is supported on Linux", file=sys.stderr)


def venv_version(venv: Path) -> str:
    """The Python that an environment was made with; empty where it cannot be read."""
    settings = venv / "pyvenv.cfg"
    lines = settings.read_text().splitlines() if settings.is_file() else []
    return next((line.split("=")[1].strip() for line in lines if line.startswith("version ")), "")


def steps(torch_index: str, *, another_build: bool = False) -> list[tuple[str, list[str]]]:
    """(title, pip arguments) of each step: torch alone first, since deepspeed imports it to build.

    An index gives torch alone, and what torch needs comes from the usual place: an index of builds rarely has it all.
    `another_build` replaces a torch of the same version that another index gave.
    """
    common = ["--disable-pip-version-check", "--no-compile", "-c", "constraints.txt"]
    index = ["--index-url", torch_index, "--no-deps"] if torch_index else []
    replace = ["--force-reinstall", "--no-deps"] if another_build else []
    return [
        ("1/3 build tools", ["-q", *common, *BUILD_TOOLS]),
        ("2/3 torch", [*common, *index, *replace, "torch"]),
        ("3/3 the fine-tuning stack", [*common, "--no-build-isolation", "-e", ".[dev]"]),
    ]


def run_step(command: list[str]) -> None:
    """Run one command, its output on the terminal.

    Raises:
        EnvironmentProblem: it ended with another code than 0.
    """
    done = subprocess.run(command, env={**os.environ, **BUILD_SETTINGS}, check=False)
    if done.returncode:
        raise EnvironmentProblem(
            f"`{' '.join(command[1:4])} ...` ended with {done.returncode}",
            fix="see its lines above; make install goes on from here",
        )


def fingerprint(torch_index: str) -> str:
    """What the environment was made from: the pins, the project file, the Python and the index."""
    parts = [Path(name).read_text() for name in ("constraints.txt", "pyproject.toml")]
    return hashlib.sha256("\0".join([*parts, platform.python_version(), torch_index]).encode()).hexdigest() + "\n"


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SftPlayError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        sys.exit(exit_code_of(error))
