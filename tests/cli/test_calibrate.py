"""What calibration refuses, and the speed it reports: that of its settled steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_play.cli.calibrate import STEPS, WARM_UP_STEPS, settled_speed
from sft_play.cli.plan import main
from sft_play.errors import UsageError
from tests.tiny import ROOT


@pytest.mark.parametrize(
    ("given", "said"), [({"CALIBRATE": "1", "HARDWARE": "1xT4"}, "HARDWARE"), ({"CALIBRATE": "yes"}, "'yes'")]
)
def test_what_cannot_be_calibrated_is_refused_before_anything_is_printed(
    given: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="CALIBRATE") as caught:
        main([], {"CONFIG": str(ROOT / "configs/run_bnb.yaml"), **given})
    assert said in caught.value.line()
    assert capsys.readouterr().out == ""


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
