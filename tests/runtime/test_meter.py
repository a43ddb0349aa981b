"""The figures of an interval from what the ranks measured, and what is said of a run that is held back."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_play.config.schema import Config
from sft_play.runtime.bottleneck import WINDOW, Bottleneck
from sft_play.runtime.collate import REAL_TOKENS
from sft_play.runtime.meter import Meter, Totals, step_figures

LABELS = torch.tensor([[-100, -100, 5, 6], [-100, 7, 8, 9]])
ROWS = {"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": LABELS}


def rank(**values: float) -> dict[str, float]:
    usual = {"steps": 1, "loss": 1, "share": 0.5, "tokens": 10, "rows": 2}
    times = {"step": 1.0, "data": 0.05, "compute": 0.6, "wait": 0.05, "optimizer": 0.1}
    return {**usual, **times, **values}


def test_a_micro_batch_is_counted_by_its_real_tokens_and_its_answer_tokens() -> None:
    meter = Meter()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    meter.add({**ROWS, "attention_mask": mask}, torch.tensor([4, 7]), torch.tensor(2.0), torch.tensor(10.0))
    meter.add({**ROWS, REAL_TOKENS: torch.tensor(6)}, None, torch.tensor(3.0), torch.tensor(10.0))
    found = meter.take()
    assert (found["loss"], found["tokens"], found["rows"]) == (5.0, 13.0, 4.0)
    assert found["share"] == pytest.approx(1.0)
    assert meter.take()["tokens"] == 0.0
    meter.add({**ROWS, "labels": torch.full((2, 4), -100)}, torch.tensor([-1]), torch.tensor(0.0), torch.tensor(10.0))
    assert meter.take()["rows"] == 0.0  # a row that only fills the batch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands until it is set."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_time_is_booked_to_its_part_less_what_was_waited_inside(clock: list[float]) -> None:
    meter = Meter()
    meter.go_on()
    clock[0] += 1
    with meter.part("data"):
        clock[0] += 2
    with meter.part("compute"):
        clock[0] += 8
        meter.seconds["wait"] += 3
    clock[0] += 4
    assert meter.step_ended() == 15
    found = meter.take()
    parts = [found[name] for name in ("step", "data", "compute", "wait", "optimizer")]
    assert parts == [15, 2, 5, 3, 4]


def test_evaluation_and_saving_are_no_part_of_a_step(clock: list[float]) -> None:
    meter = Meter()
    meter.go_on()
    clock[0] += 60
    meter.go_on()
    clock[0] += 1
    assert meter.step_ended() == 1


@pytest.mark.parametrize("copies", [1, 2])
def test_losses_weighted_by_their_shares_are_the_loss(copies: int) -> None:
    """Also where two ranks train on the same rows: then each has counted all of the answer tokens."""
    ranks = [rank(loss=2.0, share=0.9), rank(loss=1.2, share=0.3 if copies == 1 else 0.9)]
    found = step_figures(ranks, world=2, waits=True)
    weighted = sum(found[f"loss_share_rank_{one}"] * found[f"loss_rank_{one}"] for one in (0, 1))
    assert weighted == pytest.approx((2.0 + 1.2) / 2)


def test_a_rank_without_answer_tokens_has_no_loss() -> None:
    found = step_figures([rank(share=1.0), rank(share=0.0, loss=0.0)], world=2, waits=True)
    assert "loss_rank_1" not in found
    assert found["loss_share_rank_1"] == 0.0


def test_parts_are_those_of_the_slowest_rank() -> None:
    found = step_figures([rank(wait=0.5, compute=0.2), rank(compute=0.7)], world=2, waits=True)
    assert found["compute_seconds"] == 0.7
    assert found["wait_seconds"] == 0.05
    assert found["other_seconds"] == pytest.approx(0.1)
    assert found["compute_seconds_rank_0"] == 0.2
    unknown = step_figures([rank(wait=0.0)], world=1, waits=False)
    assert "wait_seconds" not in unknown
    assert unknown["other_seconds"] == pytest.approx(0.25)


def test_totals_go_on_where_a_checkpoint_left_them() -> None:
    first = Totals()
    first.tokens, first.seconds = 100.0, 2.0
    first.add(10, {"step_seconds": 0.2})
    again = Totals()
    for name, value in first.state()["attributes"].items():
        setattr(again, name, value)
    again.add(10, {"step_seconds": 0.4})
    assert again.means() == {"step_seconds": pytest.approx(0.3)}
    assert first.means() == {"step_seconds": pytest.approx(0.2)}


def config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"name": "m"}, "data": {"train": "t.jsonl"}, **sections})


def looked(ranks: list[dict[str, float]], *, throttled: int = -1, **sections: Any) -> list[str]:
    """What is said over thirty equal steps."""
    watch = Bottleneck(config(**sections), waits=True)
    names = [f"gpu {number}: H100 (node 0)" for number in range(len(ranks))]
    flags = [float(number == throttled) for number in range(len(ranks))]
    said = [watch.look(ranks, flags, names) for _ in range(3 * WINDOW)]
    assert said[:WINDOW] == [None] * WINDOW
    return [one for one in said if one]


def test_a_run_that_nothing_holds_back_is_told_nothing() -> None:
    assert looked([rank(), rank()]) == []
    assert looked([rank(data=0.19, compute=0.4)]) == []


def test_a_slow_loader_is_told_once_with_the_setting() -> None:
    (said,) = looked([rank(data=0.5, compute=0.3)], train={"dataloader_num_workers": 2})
    assert "50% of each step waits for data" in said
    assert "train.dataloader_num_workers to 4 (now 2)" in said


def test_a_slow_network_is_told() -> None:
    (said,) = looked([rank(wait=0.4, compute=0.4)] * 2)
    assert "40%" in said
    assert "train.grad_accum" in said


def test_a_slow_rank_is_named_with_its_gpu_and_its_heat() -> None:
    slow = [rank(compute=0.3, wait=0.5), rank(compute=0.3, wait=0.5), rank(compute=0.8, wait=0.0)]
    (said,) = looked(slow)
    assert "rank 2 holds the run back: gpu 2: H100 (node 0) computes 2.7 times" in said
    assert "dist.gpus" in said
    (said,) = looked(slow, throttled=2)
    assert "its clock was lowered" in said


def test_a_meter_watches_ddp_alone() -> None:
    accelerator = SimpleNamespace(gather=len)
    Meter().watch(accelerator, torch.nn.Linear(1, 1), 1)
    assert accelerator.gather is len
