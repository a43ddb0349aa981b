"""Files of a run, torn or edited by hand: shown as far as they go, and refused by what acts on them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from sft_play.cli.app import run as run_command
from sft_play.cli.runs import table
from sft_play.errors import SftPlayError
from sft_play.record.amendments import read_amendments
from sft_play.record.run_dir import RunDir
from sft_play.record.run_record import read_record
from sft_play.record.told import read_model_path, read_told
from sft_play.report.card import model_card
from sft_play.report.compare import render_comparison
from sft_play.report.listing import list_run
from sft_play.report.page import render_report
from sft_play.report.read import read_run
from tests.tiny import make_workplace

WRONG: tuple[Any, ...] = (None, [], {}, "x", 1.5, -1, True)
TORN = ("", "{", "null", "[]", '"x"', "\udcff", '{"plan": [')


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The folder of a finished run."""
    workplace = make_workplace(tmp_path_factory.mktemp("real"), tiny_model)
    assert workplace.train().code == 0
    return workplace.path / "runs/tiny"


@pytest.fixture
def copied(real: Path, tmp_path: Path) -> Path:
    """A copy of its small files, as a run of its own."""
    folder = tmp_path / "copied"
    shutil.copytree(real, folder, ignore=shutil.ignore_patterns("checkpoints", "adapter", "tb"))
    (folder / "amendments.json").write_text('[{"step": 1, "micro_batch": 2, "grad_accum": 2}, {"reason": "room"}]')
    return folder


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The keys of the first two levels."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield (key,)
        inside = value[key]
        if isinstance(inside, dict | list):
            yield from ((key, one) for one in (inside if isinstance(inside, dict) else range(len(inside))))


def with_value(value: Any, place: tuple[Any, ...], wrong: Any) -> Any:
    """A copy with another value at a place."""
    changed = copy.deepcopy(value)
    holder = changed
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = wrong
    return changed


def damaged_by(file: Path, *, every: bool) -> Iterator[str]:
    """Write the file with places damaged and say how: all, by every wrong value, or some, by the next one of them."""
    whole, values = file.read_text(), cycle(WRONG)
    for place in islice(places(json.loads(whole)), 0, None, 1 if every else 3):
        for wrong in WRONG if every else islice(values, 1):
            file.write_text(json.dumps(with_value(json.loads(whole), place, wrong)))
            yield f"{file.name}: {place} = {wrong!r}"
    file.write_text(whole)


def show(folder: Path, other: Path) -> None:
    """Everything that shows a run."""
    facts = read_run(folder)
    table([list_run(folder)])
    render_report(facts)
    render_comparison([read_run(other), facts])
    model_card(facts, kind="adapter")


ALL = pytest.param(True, marks=pytest.mark.slow)


@pytest.mark.parametrize("every", [False, ALL])
@pytest.mark.parametrize("name", ["run.json", "record.json", "data/report.json"])
def test_whatever_stands_in_a_file_the_run_is_shown(real: Path, copied: Path, name: str, every: bool) -> None:
    for how in damaged_by(copied / name, every=every):
        try:
            show(copied, real)
        except Exception as error:
            raise AssertionError(how) from error


READERS: dict[str, Callable[[RunDir], object]] = {
    "run.json": lambda run: (read_model_path(run.run_json), read_told(run.run_json)),
    "record.json": read_record,
    "amendments.json": read_amendments,
}


@pytest.mark.parametrize("name", READERS)
def test_what_acts_on_a_damaged_file_refuses_it_in_one_line(copied: Path, name: str) -> None:
    read, run = READERS[name], RunDir(copied)
    refused: dict[str, SftPlayError] = {}
    read(run)
    for how in damaged_by(copied / name, every=True):
        try:
            read(run)
        except SftPlayError as error:
            refused[how] = error
        except Exception as error:
            raise AssertionError(how) from error
    assert len(refused) > 20
    for error in refused.values():
        (line,) = error.lines()
        assert f"{copied / name}: the file is damaged: " in line
        assert error.exit_code == 2
    for text in TORN:
        (copied / name).write_text(text, errors="surrogateescape")
        if (name, text) != ("amendments.json", "[]"):
            with pytest.raises(SftPlayError, match="damaged"):
                read(run)


def test_a_whole_run_has_nothing_left_out_and_a_damaged_one_says_what(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_run(copied).damaged == ()
    assert list_run(copied).state == "done"
    record = json.loads((copied / "record.json").read_text())
    (copied / "record.json").write_text(json.dumps({**record, "steps": "four", "summary": [1]}))
    monkeypatch.setenv("RUN", str(copied))
    assert run_command(["report"]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f'warning: left out, as the file is damaged: {copied}/record.json: steps cannot be "four"',
        f"warning: left out, as the file is damaged: {copied}/record.json: summary cannot be [1]",
    ]
    page = (copied / "report.html").read_text()
    assert "record.json: steps cannot be &#34;four&#34;" in page
    assert 'data-key="train_loss"' in page
    assert list_run(copied).state == "damaged"
    monkeypatch.setenv("REPO", "me/mine")
    assert run_command(["push"]) == 2
    assert "steps cannot be" in capsys.readouterr().err


def test_counts_and_words_of_the_data_that_are_damaged_or_gone(copied: Path) -> None:
    """At any depth of the report on the data; half a character anywhere is shown as a question mark."""
    file = copied / "data/report.json"
    whole = json.loads(file.read_text())
    pair = ("tokens", "histogram", 0)
    split, proof = ("tokens", "facts", "splits", "train"), ("tokens", "facts", "proofs", 0)
    for place in (split, proof, (*pair, 1), *((*split, key) for key in ("loss_tokens", "dropped")), (*proof, "holds")):
        for wrong in (*WRONG, "\ud800", ...):
            changed = copy.deepcopy(whole)
            holder = changed
            for key in place[:-1]:
                holder = holder[key]
            if wrong is ...:
                del holder[place[-1]]
            else:
                holder[place[-1]] = wrong
            file.write_text(json.dumps(changed))
            facts = read_run(copied)
            render_report(facts).encode()
            assert all(line.startswith("data/report.json: ") for line in facts.damaged)
    record = json.loads((copied / "record.json").read_text())
    (copied / "record.json").write_text(json.dumps({**record, "result": "half \ud800"}))
    assert "half ?" in render_report(read_run(copied))


def test_events_and_answers_that_do_not_fit_are_left_out(copied: Path) -> None:
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    for key in sorted({key for line in lines for key in line}):
        for wrong in WRONG:
            changed = ({**line, key: wrong} if key in line else line for line in lines)
            (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
            read_run(copied).of("train")
            if wrong == "x" and key in ("time", "text", "kind", "bytes", "devices", "loss", "grad_norm", "resumed"):
                render_report(read_run(copied))
    (copied / "eval").mkdir()
    (copied / "eval/step-4.jsonl").write_text('{"row": "x", "prediction": 3}\n{"row": 1, "prediction": "yes"}\n')
    (answers,) = read_run(copied).answers
    assert answers.by_row == {0: {}, 1: {"row": 1, "prediction": "yes"}}
