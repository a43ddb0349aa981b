"""One thing that was checked: its state, what was found and the cure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.config.secrets import redacted
from sft_play.errors import SeveralErrors, SftPlayError
from sft_play.facts.hardware import Hardware


class State(StrEnum):
    """How a check came out. Only `FAIL` changes the exit code."""

    OK = "ok"
    WARNING = "warning"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the page.

    Attributes:
        cure: what to do; empty where the state is ok.
    """

    name: str
    state: State
    found: str
    cure: str = ""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What the checks are about.

    Attributes:
        named: a config was given; without one its defaults under the environment stand here.
        hardware: with the GPUs that a distributed run would take; None where even asking for them failed.
        seconds: longest wait for the child processes of one check.
    """

    environ: Mapping[str, str]
    config: Config
    named: bool = False
    hardware: Hardware | None = None
    constraints: Path = Path("constraints.txt")
    seconds: float = 60.0

    @property
    def output_dir(self) -> Path:
        return Path(self.config.run.output_dir).expanduser()


def ok(name: str, found: str) -> Finding:
    """A finding that is as it should be."""
    return Finding(name, State.OK, found)


def warning(name: str, found: str, cure: str) -> Finding:
    """A finding that may hurt."""
    return Finding(name, State.WARNING, found, cure)


def fail(name: str, found: str, cure: str) -> Finding:
    """A finding that will stop a run."""
    return Finding(name, State.FAIL, found, cure)


def failed(name: str, error: SftPlayError) -> list[Finding]:
    """A finding for each of the user's errors behind one exception."""
    errors = error.errors if isinstance(error, SeveralErrors) else [error]
    return [fail(name, f"{one.where}: {one.what}" if one.where else one.what, one.fix) for one in errors]


def without_secrets(finding: Finding, environ: Mapping[str, str]) -> Finding:
    """The finding with credentials taken out: others' messages may quote what they were given."""
    return replace(finding, found=redacted(finding.found, environ), cure=redacted(finding.cure, environ))


def existing_part(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there and may be looked at."""
    path = Path(os.path.abspath(path))  # noqa: PTH100  (links stay as the user wrote them)
    while not os.path.exists(path) and path != path.parent:  # noqa: PTH110  (pathlib's raises where it may not look)
        path = path.parent
    return path
