from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from written import BASE, ErrorLines, ResolveText

from sft_play.config.origin import Resolved
from sft_play.config.resolve import resolve
from sft_play.errors import SftPlayError


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs are written as `x.yaml` in the working folder, so places are short."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def resolve_text() -> ResolveText:
    def run(text: str = "", *, base: str = BASE, **environ: str) -> Resolved:
        Path("x.yaml").write_text(base + textwrap.dedent(text), encoding="utf-8")
        return resolve(Path("x.yaml"), environ)

    return run


@pytest.fixture
def error_lines(resolve_text: ResolveText) -> ErrorLines:
    """The lines that a wrong config is refused with."""

    def run(text: str = "", *, base: str = BASE, **environ: str) -> list[str]:
        with pytest.raises(SftPlayError) as caught:
            resolve_text(text, base=base, **environ)
        lines = caught.value.lines()
        assert all("\n" not in line for line in lines)
        return lines

    return run
