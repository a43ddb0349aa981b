"""A run in one line: what `make runs` shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.record.run_dir import RunDir
from sft_play.report.read import read_events, read_kept
from sft_play.report.state import runs_in, size_of, state_of


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One run.

    Attributes:
        loss: held-out where it was measured, else the training loss; of a run without a record the last one logged.
        started: of the last start, epoch seconds; 0 where it never started.
        bytes: of all its files.
    """

    name: str
    path: str
    state: str
    model: str
    method: str
    loss: float | None
    tokens_per_second: float | None
    steps: int | None
    started: float
    bytes: int


def listed(folder: Path) -> list[Listed]:
    """Every run of an output folder, the last started last."""
    return sorted(map(list_run, runs_in(folder)), key=lambda run: (run.started, run.name))


def list_run(folder: Path) -> Listed:
    """One run of any state."""
    run = RunDir(folder)
    (told, record, _), damaged = read_kept(run)
    config = told.get("config") or {}
    last = record if "train_loss" in record else _last(run)
    return Listed(
        name=folder.resolve().name,
        path=str(folder),
        state=str(state_of(run, record, damaged=bool(damaged))),
        model=str((config.get("model") or {}).get("name") or ""),
        method=str((config.get("tuning") or {}).get("mode") or ""),
        loss=last.get("eval_loss", last.get("train_loss")),
        tokens_per_second=last.get("tokens_per_second"),
        steps=last.get("steps"),
        started=run.run_json.stat().st_mtime if told else 0.0,
        bytes=size_of(folder),
    )


def _last(run: RunDir) -> dict[str, Any]:
    """The last figures that were logged, by the record's names."""
    found: dict[str, Any] = {}
    names = {"loss": "train_loss", "eval_loss": "eval_loss", "tokens_per_second": "tokens_per_second"}
    for event in read_events(run.metrics):
        found |= {name: event[key] for key, name in names.items() if isinstance(event.get(key), int | float)}
        found["steps"] = event["step"]
    return found
