"""Python and the installed packages against what they are tested with."""

from __future__ import annotations

import locale
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sft_play.cli.checks.finding import Finding, Scope, fail, ok, warning
from sft_play.cli.gpu_info import STACK, unsloth_words
from sft_play.cli.install import OLDEST_PYTHON, SYSTEMS

INSTALL = "make install brings .venv back to the pins"
LISTED = 6


def check_program(scope: Scope) -> Iterator[Finding]:
    """Python, packages and text encoding."""
    yield check_python(sys.version_info[:2], platform.system())
    yield from check_pins(scope.constraints)
    yield ok("unsloth", unsloth_words())
    yield check_encoding(sys.getfilesystemencoding(), locale.getpreferredencoding(False))


def check_python(number: tuple[int, int], system: str) -> Finding:
    """The interpreter and the system."""
    found = f"{platform.python_version()} on {system} {platform.machine()}, {sys.prefix}"
    if number < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return fail("Python", f"{number[0]}.{number[1]} is older than {oldest}", f"make install PYTHON=python{oldest}")
    if system not in SYSTEMS:
        return fail("Python", found, "use Linux (on Windows, WSL 2)")
    if system != "Linux":
        return warning("Python", found, "plans and tests may work here; train on Linux")
    return ok("Python", found)


def check_pins(constraints: Path) -> Iterator[Finding]:
    """Installed versions against constraints.txt: a finding for each package of the stack that differs, one for the
    rest together. Other builds of a version (`2.13.0+cpu`) are that version."""
    if not constraints.is_file():
        yield warning("packages", f"no {constraints} to compare with", "call make in the project's folder")
        return
    pins = read_pins(constraints)
    installed = {name: _installed(name) for name in pins}
    wrong = {name: number for name, number in installed.items() if number.partition("+")[0] != pins[name]}
    for name, number in wrong.items():
        if name in STACK:
            found = f"{number} is installed, {pins[name]} is pinned" if number else f"{pins[name]} is not installed"
            yield fail(name, found, INSTALL)
    stack = [f"{name} {installed[name]}" for name in STACK if name in pins and name not in wrong]
    if stack:
        yield ok("stack", ", ".join(stack))
    others = [f"{name} {number or 'missing'} (pin {pins[name]})" for name, number in wrong.items() if name not in STACK]
    if others:
        more = f" and {len(others) - LISTED} more" if len(others) > LISTED else ""
        yield warning("others", ", ".join(others[:LISTED]) + more, INSTALL)
    else:
        yield ok("others", f"{len(pins) - len(stack)} more packages as pinned")


def read_pins(constraints: Path) -> dict[str, str]:
    """Version by package."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("#")[0].strip().partition("==") for line in lines)
    return {name: number for name, _, number in pairs if number}


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def check_encoding(files: str, text: str) -> Finding:
    """Names of files and text outside of this program's own files."""
    if {files.lower().replace("-", ""), text.lower().replace("-", "")} == {"utf8"}:
        return ok("encoding", "UTF-8")
    found = f"file names are {files}, text is {text}"
    return warning("encoding", found, "export LANG=C.UTF-8 (or PYTHONUTF8=1), or names beyond ASCII fail")
