"""The fuzzer of `tests.data.fuzz_rows` for a few seconds, and that it sees what it looks for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sft_play.errors import DataError
from tests.data import fuzz_rows


def test_damaged_files_give_rows_or_one_line(tmp_path: Path) -> None:
    counts, faults = fuzz_rows.fuzz(tmp_path, seconds=5, seed=5)
    assert faults == []
    assert counts.total() > 200
    assert all(counts[kind] for kind in ("rows", "bad rows", "refused"))


def test_undamaged_files_read_well(tmp_path: Path) -> None:
    for name, content in fuzz_rows.valid_files().items():
        (tmp_path / name).write_bytes(content)
        assert fuzz_rows.check_file(tmp_path / name) == "rows", name


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: time.sleep(60), "TimeoutError"),
        (lambda: (_ for _ in ()).throw(DataError("two\x1blines")), "AssertionError"),
    ],
)
def test_a_fault_is_found_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault, said: str) -> None:
    monkeypatch.setattr(fuzz_rows, "LIMIT_SECONDS", 1)
    monkeypatch.setattr(fuzz_rows, "read_rows", lambda *_: fault())
    _, faults = fuzz_rows.fuzz(tmp_path, seconds=0.2, seed=1)
    assert any(one.startswith(said) for one in faults), faults
    assert list(tmp_path.glob("fault-0-*"))
