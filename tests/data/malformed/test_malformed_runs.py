"""A sample of the malformed inputs through the real command line: one line each, exit code 2, nothing trained."""

from __future__ import annotations

import pytest

from tests.data.malformed.container_cases import DOCUMENTS, PACKED, TABLES
from tests.data.malformed.json_cases import ENCODINGS, JSON
from tests.data.malformed.made import Case
from tests.data.malformed.turn_cases import TOOLS, TURNS
from tests.tiny import Workplace


def named(said: str) -> Case:
    cases = [*ENCODINGS, *JSON, *TURNS, *TOOLS, *TABLES, *PACKED, *DOCUMENTS]
    return next(case for case in cases if case.said == said)


ROWS = ["latin-1", "a cut off last line", "a number of 10,000 digits", "system later", "a picture", "a tool as text"]
ROWS += ["ragged rows", "a PDF of pictures"]


def test_bad_rows_of_many_files_are_listed_together(workplace: Workplace) -> None:
    names, complaints = [], []
    for number, case in enumerate(map(named, ROWS)):
        name = f"{number}-{case.name}"
        (workplace.path / name).write_bytes(case.content)
        names.append(name)
        complaints += [f"error: {number}-{one}" for one in case.expected if isinstance(one, str)]
    workplace.write(data={"train": names, "validation": None})
    done = workplace.train()
    assert done.code == 2, done.err
    assert "Traceback" not in done.out + done.err
    lines = done.error_lines
    assert len(lines) == len(complaints) == 9
    for line, expected in zip(lines, complaints, strict=True):
        assert line.startswith(expected)
        assert line.endswith("-> docs/data.md shows the formats")


@pytest.mark.parametrize("said", ["UTF-16, big end first", "zstd cut off", "no Word file"])
def test_a_file_that_cannot_be_read_is_one_line(workplace: Workplace, said: str) -> None:
    case = named(said)
    (workplace.path / case.name).write_bytes(case.content)
    done = workplace.train(DATA_TRAIN=case.name)
    assert done.code == 2, done.err
    assert done.error_lines == [f"error: {case.expected[0]}"]
    assert "Traceback" not in done.out + done.err


def test_a_hub_id_that_is_not_there_offline(workplace: Workplace) -> None:
    done = workplace.train(DATA_TRAIN="owner/nope", HF_HOME=str(workplace.path / "hub"))
    assert done.code == 4, done.err
    (line,) = done.error_lines
    assert "data.train: owner/nope is not whole on this disk and HF_HUB_OFFLINE is set" in line
