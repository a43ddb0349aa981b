"""The demo's data: real, split by module, and nothing of the held-out sets in the training set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_play.data.stdlib_docs import TEST_MODULES, VALIDATION_MODULES, documented_names, split_of, write_demo_data


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    folder = tmp_path_factory.mktemp("demo")
    counts = write_demo_data(folder)
    read = {}
    for split in counts:
        lines = (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == counts[split]
        read[split] = [tuple(turn["content"] for turn in json.loads(line)["messages"]) for line in lines]
    return read


def test_there_is_enough_of_each(rows: dict[str, list[tuple[str, str]]]) -> None:
    assert len(rows["train"]) > 2000
    assert len(rows["validation"]) > 64
    assert len(rows["test"]) > 64


def test_no_answer_occurs_twice(rows: dict[str, list[tuple[str, str]]]) -> None:
    answers = [answer for split in rows.values() for _, answer in split]
    assert len(answers) == len(set(answers))


def test_whole_modules_are_held_out(rows: dict[str, list[tuple[str, str]]]) -> None:
    for module in VALIDATION_MODULES | TEST_MODULES:
        assert not any(f"`{module}." in question for question, _ in rows["train"])
    for entry in documented_names():
        assert (split_of(entry.module) == "train") == (entry.module not in VALIDATION_MODULES | TEST_MODULES)


def test_the_same_interpreter_gives_the_same_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_demo_data(tmp_path / name)
    for split in ("train", "validation", "test"):
        assert (tmp_path / f"one/{split}.jsonl").read_bytes() == (tmp_path / f"two/{split}.jsonl").read_bytes()


def test_an_answer_is_what_the_documentation_says(rows: dict[str, list[tuple[str, str]]]) -> None:
    test = dict(rows["test"])
    (question,) = [one for one in test if "`shutil.copytree`" in one]
    assert test[question] == "Recursively copy a directory tree and return the destination directory."
