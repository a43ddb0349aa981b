"""metrics.jsonl where a run goes on."""

from __future__ import annotations

import json
from pathlib import Path

from sft_play.record.run_record import append_event, append_metrics, trim_metrics


def test_what_a_crash_left_broken_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append_metrics(path, "train", {"step": step})
    with path.open("ab") as stream:
        stream.write(b'\0\0\0\n\xff\xfe\n[1]\n{"event": "train"}\n{"step": "x"}\n{"step": 1, "ev')
    trim_metrics(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_lines_beyond_the_checkpoint_are_taken_back_and_earlier_starts_stay(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step, resumed in ((0, False), (10, True), (20, True)):
        append_metrics(path, "start", {"step": step, "resumed": resumed})
        append_metrics(path, "train", {"step": step + 5})
        append_event(path, step + 6, "spike", "far above")
    trim_metrics(path, 15)
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    told = [(one["event"], one["step"]) for one in kept]
    assert told == [("start", 0), ("train", 5), ("event", 6), ("start", 10), ("train", 15)]
