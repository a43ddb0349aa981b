"""metrics.jsonl after a crash of the machine."""

from __future__ import annotations

import json
from pathlib import Path

from sft_play.record.run_record import append_metrics, trim_metrics


def test_what_a_crash_left_broken_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append_metrics(path, "train", {"step": step})
    with path.open("ab") as stream:
        stream.write(b'\0\0\0\n\xff\xfe\n[1]\n{"event": "train"}\n{"step": "x"}\n{"step": 1, "ev')
    trim_metrics(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
