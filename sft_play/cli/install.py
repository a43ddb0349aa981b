"""`make install` and `make install-unsloth`: a virtual environment and its pinned stack, made once and left alone
when current.

Runs under the user's own Python with nothing but the standard library, before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_play.errors import EnvironmentProblem, SftPlayError, exit_code_of

OLDEST_PYTHON = (3, 11)
SYSTEMS = ("Linux", "Darwin")
# deepspeed and rouge-score ship as source; with these installed they build without fetching a tool chain.
# No compiled operators at install time; with a GPU and no nvcc even asking which could be compiled would fail.
BUILD_SETTINGS = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
BUILD_TOOLS = ("setuptools", "wheel", "py-cpuinfo", "ninja")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment that a command makes.

    Attributes:
        made_from: files whose change makes it anew; the first one holds the pins.
    """

    command: str
    folder: str
    made_from: tuple[str, ...]

    def kept_index(self) -> str:
        """The index that torch came from the last time; at first the one that .venv was made with."""
        kept = (Path(folder) / "torch-index" for folder in (self.folder, STACK.folder))
        return next((path.read_text() for path in kept if path.is_file()), "")


STACK = Environment(command="install", folder=".venv", made_from=("constraints.txt", "pyproject.toml"))
UNSLOTH = Environment(command="install-unsloth", folder=".venv-unsloth", made_from=("constraints-unsloth.txt",))


def main(argv: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> int:
    """Bring `.venv`, or with `unsloth` the environment of that backend, up to date.

    Raises:
        EnvironmentProblem: unsupported system or Python, or a step of pip failed.
    """
    check_platform(platform.system(), sys.version_info[:2])
    made = UNSLOTH if "unsloth" in argv else STACK
    venv, stamp = Path(made.folder), Path(made.folder) / "installed"
    earlier = made.kept_index()
    index = environ.get("TORCH_INDEX", earlier)
    wanted = fingerprint(index, made)
    if stamp.is_file() and stamp.read_text() == wanted:
        stamp.touch()
        say(f"{venv} is current", made)
        return 0
    started = time.monotonic()
    stamp.unlink(missing_ok=True)  # half installed, it is not used
    if not (venv / "bin" / "pip").is_file() or venv_version(venv) != platform.python_version():
        if venv.is_symlink():
            raise EnvironmentProblem(
                f"a link whose Python is not {platform.python_version()}; what it leads to is not ours to clear",
                where=str(venv),
                fix="remove the link, or call make with the PYTHON that made it",
            )
        say(f"creating {venv} with Python {platform.python_version()}", made)
        run_step([sys.executable, "-m", "venv", "--clear", str(venv)], made)
    another = index != earlier
    for title, arguments in unsloth_steps(index, another) if made is UNSLOTH else steps(index, another_build=another):
        say(title, made)
        run_step([str(venv / "bin" / "python"), "-m", "pip", "install", *arguments], made)
    (venv / "torch-index").write_text(index)
    stamp.write_text(wanted)
    say(f"done in {time.monotonic() - started:.0f} s", made)
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


def unsloth_steps(torch_index: str, another_build: bool = False) -> list[tuple[str, list[str]]]:
    """(title, pip arguments) of each step of the environment for unsloth.

    Everything that is pinned is installed and nothing else: unsloth also asks for torchvision and xformers, which
    models of texts do not need and which stop it where they are built for another torch. This project is used from
    where it lies: what it requires of `.venv` is not what unsloth takes.
    """
    common = ["--disable-pip-version-check", "--no-compile", "-c", UNSLOTH.made_from[0]]
    index = ["--index-url", torch_index, "--no-deps"] if torch_index else []
    replace = ["--force-reinstall", "--no-deps"] if another_build else []
    return [
        ("1/4 torch", [*common, *index, *replace, "torch"]),
        ("2/4 what torch needs", [*common, "torch"]),
        ("3/4 unsloth and the stack", ["-q", *common[:2], "--no-deps", "-r", UNSLOTH.made_from[0]]),
        ("4/4 sft-play", ["-q", *common, "--no-deps", "--no-build-isolation", "-e", "."]),
    ]


def run_step(command: list[str], made: Environment = STACK) -> None:
    """Run one command, its output on the terminal.

    Raises:
        EnvironmentProblem: it ended with another code than 0.
    """
    done = subprocess.run(command, env={**os.environ, **BUILD_SETTINGS}, check=False)
    if done.returncode:
        raise EnvironmentProblem(
            f"`{' '.join(command[1:4])} ...` ended with {done.returncode}",
            fix=f"see its lines above; make {made.command} goes on from here",
        )


def fingerprint(torch_index: str, made: Environment = STACK) -> str:
    """What the environment was made from: the pins, the project file, the Python and the index."""
    parts = [Path(name).read_text() for name in made.made_from]
    return hashlib.sha256("\0".join([*parts, platform.python_version(), torch_index]).encode()).hexdigest() + "\n"


def say(text: str, made: Environment = STACK) -> None:
    print(f"{made.command}: {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SftPlayError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        sys.exit(exit_code_of(error))
