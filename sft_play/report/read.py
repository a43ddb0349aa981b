"""A run's folder as one value. Unfinished, failed and older runs are read as far as they go."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.record.run_dir import RunDir
from sft_play.record.shapes import Answer, DataReport, Record, Shape, Told, fitting, read_fitting
from sft_play.record.shapes import Event as EventShape
from sft_play.report.state import RunState, state_of

Event = dict[str, Any]
# Answers of one evaluation that are read: the page shows fewer.
ANSWERS_READ = 200


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers of one generating evaluation, by row."""

    step: int
    by_row: dict[int, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a run's folder holds; what it lacks is empty.

    Attributes:
        told: run.json: config, plan and stamp of the latest start.
        record: record.json.
        config_lines: the settings that were set, each line of YAML with where it comes from.
        events: the lines of metrics.jsonl, in their order.
        data: the report on the data.
        answers: the first and the last generating evaluation, or the only one.
        started: of every start, epoch seconds.
        damaged: what was left out because it cannot be what is written there, a line each.
    """

    path: Path
    state: RunState
    told: dict[str, Any]
    record: dict[str, Any]
    config_lines: tuple[tuple[str, str], ...]
    events: tuple[Event, ...]
    data: dict[str, Any]
    answers: tuple[Answers, ...]
    started: tuple[float, ...]
    damaged: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.told.get("config") or {})

    @property
    def plan(self) -> dict[str, Any]:
        return dict(self.told.get("plan") or {})

    @property
    def stamp(self) -> dict[str, Any]:
        return dict(self.told.get("stamp") or self.record.get("stamp") or {})

    def of(self, kind: str) -> list[Event]:
        """The events of one kind."""
        return [event for event in self.events if event["event"] == kind]


def read_run(folder: Path) -> RunFacts:
    """Everything in a run's folder that a report can show."""
    run = RunDir(folder)
    (told, record, data), damaged = read_kept(run)
    return RunFacts(
        path=folder,
        state=state_of(run, record, damaged=bool(damaged)),
        told=told,
        record=record,
        config_lines=tuple(_config_lines(run.config_yaml)),
        events=tuple(read_events(run.metrics)),
        data=data,
        answers=tuple(_first_and_last(folder / "eval")),
        started=tuple(sorted(file.stat().st_mtime for file in run.attempts.glob("*.json"))),
        damaged=damaged,
    )


def read_kept(run: RunDir) -> tuple[tuple[dict[str, Any], dict[str, Any], dict[str, Any]], tuple[str, ...]]:
    """run.json, record.json and the report on the data without what is damaged, and what that is, a line each."""
    files: tuple[tuple[Path, type[Shape]], ...] = (
        (run.run_json, Told),
        (run.record, Record),
        (run.data / "report.json", DataReport),
    )
    (told, first), (record, second), (data, third) = (read_fitting(path, shape) for path, shape in files)
    return (told, record, data), (*first, *second, *(f"{run.data.name}/{line}" for line in third))


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is missing or holds none."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
    return {}


def read_events(path: Path) -> Iterator[Event]:
    """The lines of metrics.jsonl; the last one may be half written."""
    for line in _json_lines(path):
        event, _ = fitting(line, EventShape, path.name)
        if isinstance(event.get("event"), str) and isinstance(event.get("step"), int):
            yield event


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    yield value


def _config_lines(path: Path) -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            setting, _, origin = line.rpartition(" # from ")
            yield (setting.rstrip(), origin) if setting else (line, "")


def _first_and_last(folder: Path) -> Iterator[Answers]:
    steps = {file: file.stem.removeprefix("step-") for file in folder.glob("step-*.jsonl")}
    files = sorted((int(step), file) for file, step in steps.items() if step.isdigit())
    for step, file in [*files[:1], *files[1:][-1:]]:
        yield Answers(step=step, by_row=dict(_answers(file)))


def _answers(file: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_json_lines(file)):
        if number == ANSWERS_READ:
            return
        answer, _ = fitting(line, Answer, file.name)
        row = answer.get("row")
        yield number if row is None else row, answer
