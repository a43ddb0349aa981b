"""`train.group_by_length`: an order of the rows with little padding, the same however the run is cut or resumed."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from sft_play.plan.lengths import expected_longest, expected_longest_by_length, sorted_steps
from sft_play.runtime.by_length import ByLength, order_by_length
from tests.distributed.runs import Outcome
from tests.faults.test_resume_equality import assert_equal_ends
from tests.plan.test_lengths import split_of
from tests.tiny import Workplace

ROWS, STEP = 1003, 8


@pytest.fixture
def lengths() -> list[int]:
    """As chats are: many short, few long."""
    return [1 + round(random.Random(number).lognormvariate(4, 1)) for number in range(ROWS)]


def padded(order: list[int], lengths: list[int], micro_batch: int) -> int:
    """Tokens of all micro-batches with their padding."""
    cut = [[lengths[row] for row in order[at : at + micro_batch]] for at in range(0, len(order), micro_batch)]
    return sum(len(rows) * max(rows) for rows in cut)


def test_the_order_is_a_permutation_with_the_longest_row_first(lengths: list[int]) -> None:
    order = order_by_length(lengths, STEP, torch.Generator().manual_seed(0))
    assert sorted(order) == list(range(ROWS))
    assert max(lengths) == lengths[order[0]]


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 100])
def test_few_rows_are_a_permutation_too(lengths: list[int], rows: int) -> None:
    assert sorted(order_by_length(lengths[:rows], STEP, torch.Generator().manual_seed(0))) == list(range(rows))


def test_little_of_a_step_is_padding(lengths: list[int]) -> None:
    shuffled = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)).tolist()
    ordered = order_by_length(lengths, STEP, torch.Generator().manual_seed(0))
    real = sum(lengths)
    assert real / padded(shuffled, lengths, STEP) < 0.5
    assert real / padded(ordered, lengths, STEP) > 0.75
    assert real / padded(ordered, lengths, 2) > 0.9


def test_epochs_differ_and_each_is_the_same_again(lengths: list[int]) -> None:
    sampler, again = ByLength(lengths, STEP, 42), ByLength(lengths, STEP, 42)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    again.set_epoch(1)
    assert list(again) == list(sampler)
    assert list(ByLength(lengths, STEP, 43)) != first
    assert len(sampler) == ROWS


def test_steps_of_all_lengths_are_mixed(lengths: list[int]) -> None:
    """Not from long to short: the mean of each half of the epoch is alike."""
    order = order_by_length(lengths, STEP, torch.Generator().manual_seed(0))
    halves = [sum(lengths[row] for row in part) for part in (order[: ROWS // 2], order[ROWS // 2 :])]
    assert 0.7 < halves[0] / halves[1] < 1.4


@pytest.mark.parametrize("micro_batch", [2, 4, 8])
def test_the_plan_knows_how_long_the_batches_will_be(lengths: list[int], micro_batch: int) -> None:
    order = order_by_length(lengths, STEP, torch.Generator().manual_seed(0))
    measured, split = padded(order, lengths, micro_batch) / ROWS, split_of(lengths)
    assert expected_longest_by_length(split, micro_batch, STEP) == pytest.approx(measured, rel=0.25)
    assert expected_longest(split, micro_batch) > 1.5 * measured
    assert sorted_steps(ROWS, STEP) == 31


def tokens_after_steps(workplace: Workplace, name: str) -> list[float]:
    """Of all ranks, added up."""
    return [event["num_tokens"] for event in events(workplace.path / "runs" / name) if event["event"] == "train"]


def events(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def configured(workplace: Workplace) -> None:
    workplace.write(
        train={
            **workplace.config["train"],
            "group_by_length": True,
            "batch_size": 4,
            "global_batch_size": 8,
            "grad_accum": "auto",
            "max_steps": 6,  # an epoch has four steps
            "save_steps": 2,
            "save_total_limit": 6,
            "eval_strategy": "no",
            "scheduler": "cosine",
        },
        tuning={"mode": "lora", "lora": {"r": 4, "alpha": 8, "dropout": 0.1}},
        run={"name": "run", "report_to": []},
    )


def test_a_resumed_run_sees_the_same_steps_to_the_bit(workplace: Workplace) -> None:
    configured(workplace)
    done = workplace.train()
    assert done.code == 0, done.err + done.out
    assert "rows of like length in each step" in done.out
    resumed = Outcome(workplace.path / "runs/run")
    straight = Outcome(shutil.copytree(resumed.path, workplace.path / "straight"))
    for left in ("adapter", "checkpoints/step-4", "checkpoints/step-6"):
        shutil.rmtree(resumed.path / left)
    (resumed.path / "record.json").unlink()
    assert "resuming from runs/run/checkpoints/step-2" in workplace.train().out
    assert_equal_ends(resumed, straight)


@pytest.mark.slow
def test_two_ranks_see_the_steps_of_one_process(workplace: Workplace) -> None:
    workplace.write(
        "tiny.yaml",
        train={
            **workplace.config["train"],
            "group_by_length": True,
            "batch_size": "auto",
            "grad_accum": "auto",
            "global_batch_size": 8,
            "max_steps": 6,
            "eval_strategy": "no",
        },
        run={"name": "run", "report_to": []},
    )
    assert workplace.train(RUN_NAME="one").code == 0
    done = workplace.run("train-distributed", CONFIG="tiny.yaml", RUN_NAME="two", NUM_GPUS="2")
    assert done.code == 0, done.err + done.out
    assert tokens_after_steps(workplace, "two") == tokens_after_steps(workplace, "one")
    assert workplace.losses("two") == pytest.approx(workplace.losses("one"), abs=5e-5)


@pytest.mark.parametrize("data", ["DATA_PACKING", "DATA_STREAMING"])
def test_where_it_has_no_effect_it_is_refused(workplace: Workplace, data: str) -> None:
    workplace.write(
        train={**workplace.config["train"], "group_by_length": True}, data={data.split("_")[1].lower(): True}
    )
    done = workplace.train()
    assert done.code == 2
    assert "train.group_by_length has no effect with data." in done.error_lines[0]
