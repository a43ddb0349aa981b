"""docs/faults.md names tests that exist, and every fault test stands in it."""

from __future__ import annotations

import re

from tests.tiny import ROOT

PAGE = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
CONTROLS = "tests/faults/test_negative_controls.py"


def defined_in(file: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.M))


def test_every_test_it_names_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 40
    assert [f"{file}::{test}" for file, test in named if test not in defined_in(f"tests/{file}")] == []


def test_every_control_stands_in_it() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named == defined_in(CONTROLS)


def test_every_file_of_faults_stands_in_it() -> None:
    files = {file.name for file in (ROOT / "tests/faults").glob("test_*.py")} - {CONTROLS.rpartition("/")[2]}
    assert files == set(re.findall(r"`faults/(test_\w+\.py)::", PAGE))
