"""docs/metrics.md names every event and every key that runs write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.tiny import ROOT, Workplace

PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")


def documented() -> set[str]:
    """Names in backquotes; N, G and M at the end stand for a number."""
    return {re.sub(r"_[NGM]$", "_0", name) for name in re.findall(r"`([a-z_.]+(?:_[NGM])?)`", PAGE)}


def undocumented(events: Iterable[dict[str, Any]]) -> set[str]:
    names = documented()
    missing = set()
    for event in events:
        assert {"time", "event", "step"} <= set(event), event
        keys = {re.sub(r"_\d+$", "_0", key) for key in event if not key.startswith("eval_")}
        missing |= {key for key in (*keys, event["event"]) if key not in names}
    return missing


def undocumented_of(run: Path) -> set[str]:
    """Keys of a run's metrics.jsonl and of its record's summary that the page does not name."""
    record = json.loads((run / "record.json").read_text())
    assert {"summary", "device_names", "bottleneck"} <= set(record)
    summary = {f"summary.{key}" for key in record["summary"] if not key.endswith("_seconds") or key == "train_seconds"}
    return undocumented(map(json.loads, (run / "metrics.jsonl").read_text().splitlines())) | (summary - documented())


def test_a_key_that_the_page_lacks_is_found() -> None:
    line = {"time": 1.0, "event": "train", "step": 1, "loss": 1.0, "loss_rank_3": 1.0}
    assert undocumented([line]) == set()
    assert undocumented([{**line, "colour_gpu_1": 1.0}]) == {"colour_gpu_0"}


def test_what_a_run_of_one_process_writes_is_documented(workplace: Workplace) -> None:
    workplace.write(
        train={**workplace.config["train"], "eval_on_start": True, "save_steps": 2, "save_strategy": "steps"}
    )
    done = workplace.train()
    assert done.code == 0, done.err
    run = workplace.path / "runs/tiny"
    assert undocumented_of(run) == set()
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {one["event"] for one in events} >= {"start", "train", "eval", "save", "phase_memory", "summary"}
    saved = [(one["step"], one["path"]) for one in events if one["event"] == "save"]
    assert saved == [(step, f"checkpoints/step-{step}") for step in (2, 4)]
    assert {one["phase"] for one in events if one["event"] == "phase_memory"} == {"load", "train", "evaluate", "save"}
    assert all(one["wait_seconds"] == 0 for one in events if one["event"] == "train")
