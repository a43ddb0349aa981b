"""The speed that a calibration reports: that of its settled steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_play.cli.calibrate import STEPS, WARM_UP_STEPS, settled_speed


def test_the_first_steps_are_not_timed(tmp_path: Path) -> None:
    """As a real calibration left it: a first step of half a minute, then steady ones."""
    rows = [(0.0, 892), (18.4, 1872), (23.4, 2834), (27.3, 3731)]
    assert len(rows) == STEPS > WARM_UP_STEPS
    lines = [
        json.dumps({"time": 1e9 + seconds, "event": "train", "step": step, "num_tokens": float(tokens)})
        for step, (seconds, tokens) in enumerate(rows, start=1)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*lines, json.dumps({"time": 1e9 + 60, "event": "summary", "step": 4})]) + "\n")
    assert settled_speed(path) == pytest.approx((3731 - 1872) / (27.3 - 18.4), rel=1e-3)
