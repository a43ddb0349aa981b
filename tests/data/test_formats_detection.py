"""Which format a file has: from its first row that has any, from the mapping of columns, or as it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sft_play.data.formats import FORMATS, PAIR_FORMATS, Row, Text, check_columns, read_rows
from sft_play.data.raw import BadRow
from sft_play.data.sources import resolve_sources
from sft_play.errors import DataError

TURNS = [{"role": "user", "content": "q"}]
SPOKEN = [{"from": "human", "value": "q"}]


def read(
    folder: Path, *rows: dict[str, Any], columns: dict[str, str] | None = None, told: Any = "auto"
) -> tuple[list[Row | BadRow], set[str]]:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    (source,) = resolve_sources(str(path), key="data.train", default_format=told)
    unused: set[str] = set()
    return list(read_rows(source.files[0], columns or {}, unused)), unused


@pytest.mark.parametrize(
    ("row", "name", "not_used"),
    [
        ({"messages": TURNS, "text": "t"}, "messages", {"text"}),
        ({"messages": None, "text": "t"}, "text", {"messages"}),
        ({"messages": SPOKEN}, "sharegpt", set()),
        ({"conversation": SPOKEN, "id": 1}, "sharegpt", {"id"}),
        ({"conversations": TURNS, "messages": None}, "messages", {"messages"}),
        ({"conversations": json.dumps(SPOKEN)}, "sharegpt", set()),
        ({"instruction": "i", "output": "o", "text": "t"}, "alpaca", {"text"}),
        ({"instruction": "i", "input": "x", "output": "o", "target": "t"}, "alpaca", {"target"}),
        ({"prompt": "p", "completion": "c", "text": "t"}, "prompt_completion", {"text"}),
        ({"input": "i", "target": "t", "output": "o"}, "input_target", {"output"}),
        ({"user": "u", "assistant": "a", "input": "i", "target": "t"}, "user_assistant", {"input", "target"}),
    ],
)
def test_found_by_the_fields(tmp_path: Path, row: dict[str, Any], name: str, not_used: set[str]) -> None:
    (found,), unused = read(tmp_path, row)
    assert isinstance(found, Row), found
    assert found.format == name
    assert unused == not_used


def test_the_first_row_that_has_a_format_decides(tmp_path: Path) -> None:
    rows, _ = read(tmp_path, {"id": 1}, {"text": "t"}, {"prompt": "p", "completion": "c"}, {"text": "u"})
    assert [row.format if isinstance(row, Row) else "bad" for row in rows] == ["bad", "text", "bad", "text"]
    mixed = rows[2]
    assert isinstance(mixed, BadRow)
    assert "looks like prompt_completion in a file of text" in mixed.reason


def test_told_instead_of_found(tmp_path: Path) -> None:
    (row,), unused = read(tmp_path, {"messages": TURNS, "text": "t"}, told="text")
    assert isinstance(row, Row)
    assert row.body == Text(text="t")
    assert unused == {"messages"}
    (bad,), _ = read(tmp_path, {"messages": TURNS}, told="alpaca")
    assert isinstance(bad, BadRow)
    assert bad.reason.endswith("the row looks like messages in a file of alpaca: put it into a file of its own")


def test_a_mapping_tells_the_format(tmp_path: Path) -> None:
    row = {"messages": TURNS, "q": "p", "a": "c"}
    (found,), unused = read(tmp_path, row, columns={"prompt": "q", "completion": "a"})
    assert isinstance(found, Row)
    assert found.format == "prompt_completion"
    assert unused == {"messages"}
    (found,), _ = read(tmp_path, {"dialog": SPOKEN}, columns={"conversations": "dialog"})
    assert isinstance(found, Row)
    assert found.format == "sharegpt"


def test_a_mapping_to_fields_of_two_formats_is_refused() -> None:
    check_columns({"instruction": "i", "output": "o", "input": "x"})
    with pytest.raises(DataError, match="no one format has all the fields prompt, output"):
        check_columns({"prompt": "p", "output": "o"})
    with pytest.raises(DataError, match="the column q stands for prompt, completion"):
        check_columns({"prompt": "q", "completion": "q"})


def test_fields_that_are_not_used_are_bounded(tmp_path: Path) -> None:
    rows, unused = read(tmp_path, *({"text": "t", f"f{n}": 1} for n in range(3000)))
    assert all(isinstance(row, Row) for row in rows)
    assert len(unused) == 100


def test_names_of_formats() -> None:
    assert set(PAIR_FORMATS) < set(FORMATS)
    assert {"messages", "sharegpt", "text"} | set(PAIR_FORMATS) == set(FORMATS)
