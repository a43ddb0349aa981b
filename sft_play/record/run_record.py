"""What happened in a run: metrics.jsonl line by line, record.json at the end."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from sft_play.config.secrets import redacted
from sft_play.record.run_dir import RunDir, write_atomic
from sft_play.record.shapes import Record, read_fitting, refuse_misfits

VERSION = 1


def append_metrics(path: Path, event: str, values: dict[str, Any]) -> None:
    """Add one line to metrics.jsonl: {time, event, ...values}; a reader never sees half a line."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **values})
    with path.open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")


def append_event(path: Path, step: int, kind: str, text: str) -> None:
    """Something that a reader of the run should know of: a line `event`.

    Args:
        kind: spike, out_of_memory, fallback, evaluation, bottleneck or sensor.
    """
    append_metrics(path, "event", {"step": step, "kind": kind, "text": redacted(text)})


def trim_metrics(path: Path, step: int) -> None:
    """Take back the events beyond a step: the run goes on from there and will write them again."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as stream:
        kept = [line for line in stream if line.endswith("\n") and _step_of(line) <= step]
    write_atomic(path, "".join(kept))


def _step_of(line: str) -> float:
    """The step of a line; endless for one that a crash of the machine left broken."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def write_record(run: RunDir, values: dict[str, Any]) -> None:
    """Replace record.json."""
    write_atomic(run.record, redacted(json.dumps({"version": VERSION, **values}, indent=2)) + "\n")


def read_record(run: RunDir) -> dict[str, Any] | None:
    """record.json, or None where the run has not written one.

    Raises:
        DataError: it is damaged.
    """
    if not run.record.is_file():
        return None
    record, misfits = read_fitting(run.record, Record)
    refuse_misfits(run.record, misfits, fix="move it away: the run goes on from its last checkpoint")
    return record


def write_exit(folder: Path, code: int, lines: list[str], rank: int = 0, kind: str = "") -> None:
    """Leave this process's outcome in its machine's folder for the parent: launchers flatten every failure to 1.

    Args:
        kind: name of the error's class.
    """
    outcome = {"code": code, "lines": lines, "rank": rank, "kind": kind, "time": time.time()}
    write_atomic(folder / f"exit-{rank}.json", redacted(json.dumps(outcome)))


def clear_exits(folder: Path) -> None:
    """Remove what an earlier attempt left."""
    for file in folder.glob("exit-*.json"):
        file.unlink()


def read_exits(folder: Path) -> list[dict[str, Any]]:
    """The outcomes that ranks left, the first to end first: its error is the cause of what came after."""
    exits = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("exit-*.json")]
    return sorted(exits, key=lambda one: one.get("time", 0.0))
