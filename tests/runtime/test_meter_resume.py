"""A run that was stopped and goes on: its figures are those of one run."""

from __future__ import annotations

import json
import signal

import pytest

from tests.contract.test_metrics_schema import undocumented_of
from tests.faults.test_stop_and_resume import finish, wait_for
from tests.tiny import Workplace


@pytest.mark.slow
def test_totals_are_those_of_all_attempts(workplace: Workplace) -> None:
    workplace.write(train={**workplace.config["train"], "max_steps": 12, "logging_steps": 1, "eval_strategy": "no"})
    process = workplace.start("train", CONFIG="tiny.yaml")
    wait_for(process, "step  4/12")
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 75
    assert workplace.train().code == 0
    run = workplace.path / "runs/tiny"
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [one for one in events if one["event"] == "train"]
    first, second = (one for one in events if one["event"] == "start")
    assert (first["attempt"], first["resumed"], first["step"]) == (1, False, 0)
    assert (second["attempt"], second["resumed"]) == (2, True)
    assert 4 <= second["step"] < 12
    assert [one["step"] for one in steps] == list(range(1, 13))
    summary = workplace.record()["summary"]
    assert summary["tokens"] == sum(one["tokens_rank_0"] for one in steps)
    means = {part: sum(one[part] for one in steps) / 12 for part in ("step_seconds", "compute_seconds")}
    for part, mean in means.items():
        assert abs(summary[part] - mean) < 1e-4
    assert abs(summary["train_seconds"] - 12 * means["step_seconds"]) < 0.01
    assert undocumented_of(run) == set()
