"""No key is accepted and then forgotten: each one is read outside the config, or refused by name."""

from __future__ import annotations

import ast

import pytest

from sft_play.config.keys import KEYS
from sft_play.config.not_yet import NOT_YET
from tests.tiny import ROOT

# Keys that no code outside the config reads, and why that is right.
NOT_READ = {
    "run.strict_env": "resolve itself turns slips into errors under it",
}
REFUSED_WHOLE = {entry.key for entry in NOT_YET if not entry.values}


def _reads() -> set[tuple[str, str]]:
    """(what stands before the dot, name) of every attribute read outside the config."""
    found = set()
    for file in sorted((ROOT / "sft_play").rglob("*.py")):
        if file.is_relative_to(ROOT / "sft_play" / "config"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                before = node.value
                owner = before.attr if isinstance(before, ast.Attribute) else getattr(before, "id", "")
                found.add((owner, node.attr))
    return found


READS = _reads()


@pytest.mark.parametrize("name", [key for key in KEYS if key not in REFUSED_WHOLE and key not in NOT_READ])
def test_a_key_that_is_accepted_is_read(name: str) -> None:
    """As `<section>.<key>`: `config.train.seed`, or `train.seed` where the section has that name."""
    section, _, leaf = name.rpartition(".")
    owner = section.rpartition(".")[2]
    assert (owner, leaf) in READS, f"nothing reads .{owner}.{leaf}: read it, or put the key into NOT_YET"


def test_the_exceptions_are_needed() -> None:
    for name in NOT_READ:
        section, _, leaf = name.rpartition(".")
        assert name in KEYS
        assert name not in REFUSED_WHOLE
        assert (section.rpartition(".")[2], leaf) not in READS
