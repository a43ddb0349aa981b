"""Every row counts once: odd numbers of rows are neither repeated nor dropped, under any strategy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.runs import CASES, SINGLE, Case, Outcome, run_case
from tests.tiny import Workplace, make_rows

SLOW = pytest.mark.slow
# Nine rows of training are one step of eight and one of a single row; seven held-out rows fill no batch of four twice.
EPOCH = {"TRAIN_MAX_STEPS": "none", "TRAIN_EPOCHS": "1", "TRAIN_EVAL_STRATEGY": "epoch", "TRAIN_WARMUP": "0"}


def run_epoch(workplace: Workplace, case: Case, name: str, **variables: str) -> tuple[Outcome, list[float]]:
    make_rows(workplace.path / "train.jsonl", 9)
    make_rows(workplace.path / "validation.jsonl", 7, first=100)
    done = run_case(workplace, "full", case, name, **EPOCH, **variables)
    assert done.code == 0, done.err
    outcome = Outcome(workplace.path / "runs" / name)
    events: list[dict[str, Any]] = [json.loads(line) for line in (outcome.path / "metrics.jsonl").open()]
    return outcome, [event["eval_loss"] for event in events if event["event"] == "eval"]


@pytest.mark.parametrize("name", [pytest.param("ddp", marks=SLOW), "fsdp", pytest.param("tp", marks=SLOW)])
def test_an_epoch_of_an_odd_number_of_rows_is_the_same_everywhere(workplace: Workplace, name: str) -> None:
    single, held_out = run_epoch(workplace, SINGLE, "single")
    assert len(single.steps) == 2
    outcome, held_out_here = run_epoch(workplace, CASES[name], name)
    assert outcome.series("loss") == pytest.approx(single.series("loss"), abs=5e-6)
    assert outcome.series("grad_norm") == pytest.approx(single.series("grad_norm"), abs=5e-5)
    assert held_out_here == pytest.approx(held_out, abs=5e-6)


@pytest.mark.slow
def test_drop_last_leaves_out_no_held_out_row(workplace: Workplace) -> None:
    before = {"TRAIN_EVAL_ON_START": "true", "TRAIN_EVAL_BATCH_SIZE": "4"}
    _, every = run_epoch(workplace, SINGLE, "every", **before)
    outcome, dropping = run_epoch(workplace, SINGLE, "dropping", TRAIN_DATALOADER_DROP_LAST="true", **before)
    assert len(outcome.steps) == 1
    assert dropping[0] == pytest.approx(every[0], abs=1e-6)


def test_drop_last_with_fewer_rows_than_all_ranks_take_is_refused(workplace: Workplace) -> None:
    make_rows(workplace.path / "train.jsonl", 7)
    done = run_case(workplace, "full", CASES["ddp"], "few", **EPOCH, TRAIN_DATALOADER_DROP_LAST="true")
    assert done.code == 2
    assert "train.dataloader_drop_last" in done.error_lines[0]
