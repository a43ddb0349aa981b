"""The config's surface is frozen: its keys, and that no slip in one goes unseen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.config.keys import KEYS, SECTIONS, meanings
from sft_play.config.reference import PAGE, SCHEMA, render_page, render_schema
from sft_play.config.resolve import resolve
from sft_play.config.sources import read_files
from sft_play.config.suggest import nearest_variables, unknown_key

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("config_keys.txt")
CONFIGS = sorted((ROOT / "configs").glob("**/*.yaml"))


def test_the_keys_are_the_golden_ones() -> None:
    """A key that is added, renamed or taken away is a decision: change config_keys.txt with it."""
    assert list(KEYS) == GOLDEN.read_text().split()


def test_every_key_and_section_has_a_meaning_and_a_type_in_words() -> None:
    for name in (*KEYS, *SECTIONS):
        assert meanings()[name].endswith((".", ")")), name
    assert all(key.type.words for key in KEYS.values())


def _slips(leaf: str) -> set[str]:
    """The name with each letter changed, dropped, doubled, and swapped with its neighbour."""
    made = set()
    for at, letter in enumerate(leaf):
        other = "x" if letter != "x" else "y"
        made |= {leaf[:at] + other + leaf[at + 1 :], leaf[:at] + letter + leaf[at:]}
        if len(leaf) > 2:
            made |= {leaf[:at] + leaf[at + 1 :], leaf[:at] + leaf[at + 1 : at + 2] + letter + leaf[at + 2 :]}
    return made - {leaf, ""}


@pytest.mark.parametrize("name", list(KEYS))
def test_every_slip_in_a_key_is_caught_and_names_the_right_one(name: str, tmp_path: Path) -> None:
    key = KEYS[name]
    indented = "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(key.section.split(".")))
    for leaf in sorted(_slips(key.leaf)):
        slip = f"{key.section}.{leaf}"
        if slip in KEYS or slip in SECTIONS:
            continue
        depth = key.section.count(".") + 1
        path = tmp_path / "x.yaml"
        path.write_text(f"{indented}{'  ' * depth}{leaf}: 1\n")
        (error,) = read_files(path).errors
        assert error.where == f"{path}:{depth + 1}"
        assert name in error.what, f"{slip}: {error.what}"


@pytest.mark.parametrize("name", list(KEYS))
def test_every_key_in_the_wrong_section_is_sent_home(name: str) -> None:
    key = KEYS[name]
    for section in ("", *SECTIONS):
        wrong = f"{section}.{key.leaf}" if section else key.leaf
        if wrong not in KEYS and wrong not in SECTIONS:
            assert f"`{key.section}`" in unknown_key(wrong, "x.yaml:1").what


@pytest.mark.parametrize("name", list(KEYS))
def test_every_slip_in_a_variable_names_the_right_one(name: str) -> None:
    variable = KEYS[name].variable
    for slip in sorted(_slips(variable)):
        if slip not in {key.variable for key in KEYS.values()}:
            assert variable in nearest_variables(slip), slip


def test_the_reference_page_and_the_editor_schema_are_current() -> None:
    """`python -m sft_play.config.reference` writes both."""
    assert (ROOT / PAGE).read_text(encoding="utf-8") == render_page()
    assert (ROOT / SCHEMA).read_text(encoding="utf-8") == render_schema()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_resolves(path: Path) -> None:
    resolved = resolve(path, {})
    assert not resolved.notes
    assert not resolved.warnings


def test_the_config_command_is_fast_and_loads_no_heavy_package(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from sft_play.cli.app import run\n"
        "assert run(['config', '--json']) == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'trl', 'peft', 'accelerate', 'pyarrow', 'rich'}\n"
        "print(time.process_time(), *(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    config = tmp_path / "x.yaml"
    config.write_text("model: {name: m}\ndata: {train: a}\n")
    environ = {**os.environ, "CONFIG": str(config), "PYTHONPATH": str(ROOT)}
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=60
        )
        for _ in range(3)
    ]
    figures = [run.stderr.split() for run in runs]
    assert all(len(one) == 1 for one in figures), figures
    assert min(float(one[0]) for one in figures) < 0.5
