"""Every malformed input gives its exact complaint or its exact rows; nothing else comes out."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from sft_play.data.formats import Body, Row, read_rows
from sft_play.data.sources import resolve_sources
from sft_play.data.validate import Rejects, survey_rows
from sft_play.errors import SftPlayError
from tests.data.malformed.container_cases import DOCUMENTS, PACKED, TABLES
from tests.data.malformed.field_cases import FIELDS, SHAREGPT
from tests.data.malformed.json_cases import ENCODINGS, JSON
from tests.data.malformed.made import Case
from tests.data.malformed.turn_cases import TOOLS, TURNS

GROUPS = {
    "encoding": ENCODINGS,
    "json": JSON,
    "turns": TURNS,
    "tools": TOOLS,
    "sharegpt": SHAREGPT,
    "fields": FIELDS,
    "table": TABLES,
    "packed": PACKED,
    "document": DOCUMENTS,
}
CASES = [pytest.param(case, id=f"{group}: {case.said}") for group, cases in GROUPS.items() for case in cases]
HINT = " -> docs/data.md shows the formats"


def found_in(path: Path) -> list[str | Body]:
    """What reading a file gives: bodies and complaints, the whole file's error last."""
    found: list[str | Body] = []
    try:
        (source,) = resolve_sources(str(path), key="data.train", default_format="auto")
        for row in read_rows(source.files[0], {}, set()):
            found.append(row.body if isinstance(row, Row) else complaint(row.error(), path))
    except SftPlayError as error:
        found.append(complaint(error, path))
    return found


def complaint(error: SftPlayError, path: Path) -> str:
    """An error's line without the folder, the row's beginning and the class's own hint."""
    line = error.line()
    assert "\n" not in line
    assert line.isprintable()
    assert len(line) < 1500
    assert line.startswith(f"{path.parent}/")
    line = line.removeprefix(f"{path.parent}/").removesuffix(HINT)
    return line.rsplit(" (row begins ", 1)[0]


def agree(found: str | Body, expected: str | Body) -> bool:
    if isinstance(found, str) and isinstance(expected, str) and expected.endswith("*"):
        return fnmatchcase(found, expected.replace("[", "[[]"))  # libraries word the cause, by version
    return found == expected


@pytest.mark.parametrize("case", CASES)
def test_each_case(tmp_path: Path, case: Case) -> None:
    path = tmp_path / case.name
    path.write_bytes(case.content)
    found = found_in(path)
    assert len(found) == len(case.expected), found
    for one, expected in zip(found, case.expected, strict=True):
        assert agree(one, expected), f"{str(one)[:400]} is not {str(expected)[:400]}"


def test_the_corpus_is_large() -> None:
    assert len(CASES) >= 150
    assert len({param.id for param in CASES}) == len(CASES)


def test_a_survey_counts_and_lists_them(tmp_path: Path) -> None:
    """The pass over all files of a split: each bad row is taken note of, each good one hashed or empty."""
    whole = [case for cases in (TURNS, SHAREGPT, FIELDS) for case in cases]
    for number, case in enumerate(whole):
        (tmp_path / f"{number:03}.jsonl").write_bytes(case.content)
    expected = [one for case in whole for one in case.expected]
    complaints = [one for one in expected if isinstance(one, str)]
    rejects = Rejects("skip")
    sources = resolve_sources(str(tmp_path), key="data.train", default_format="auto")
    survey = survey_rows("train", sources, {}, 0, rejects, lambda _: None)
    assert survey.read == len(expected)
    assert [complaint(row.error(), tmp_path).split(":", 2)[2] for row in rejects.rows] == [
        one.split(":", 2)[2] for one in complaints
    ]
    assert len(survey.hashes) + survey.empty == len(expected) - len(complaints)
