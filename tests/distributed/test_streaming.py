"""Streamed training: the same curve from one rank or two, and from a run that was stopped in the middle."""

from __future__ import annotations

import shutil

import pytest

from tests.distributed.runs import Outcome
from tests.tiny import Workplace, make_rows

TRAIN = {
    "max_steps": 6,
    "grad_accum": "auto",
    "global_batch_size": 8,
    "batch_size": 4,
    "bf16": False,
    "eval_strategy": "no",
    "save_steps": 2,
}


def run(workplace: Workplace, name: str, *, packing: bool = False, **variables: str) -> Outcome:
    make_rows(workplace.path / "stream.jsonl", 60)
    workplace.config["tuning"] = {}
    workplace.write(
        f"{name}.yaml",
        model={"max_seq_len": 128, "dtype": "fp32"},
        tuning={"mode": "full"},
        data={"train": "stream.jsonl", "streaming": True, "packing": packing},
        train={**TRAIN, "save_strategy": "steps"},
        run={"name": name, "report_to": []},
    )
    done = workplace.run("train-distributed", CONFIG=f"{name}.yaml", **{"NUM_GPUS": "1", **variables})
    assert done.code == 0, done.out + done.err
    return Outcome(workplace.path / "runs" / name)


@pytest.mark.parametrize("packing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_stopped_and_gone_on_with_is_the_straight_run(workplace: Workplace, packing: bool) -> None:
    straight = run(workplace, "run", packing=packing)
    losses, weights = straight.series("loss"), straight.weights
    for checkpoint in ("step-6", "step-4"):  # as if it had been killed after step 3
        shutil.rmtree(straight.path / "checkpoints" / checkpoint)
    (straight.path / "record.json").unlink()
    again = run(workplace, "run", packing=packing)
    assert again.series("loss") == losses
    assert all((again.weights[name] == tensor).all() for name, tensor in weights.items())


@pytest.mark.slow
def test_two_ranks_see_the_rows_of_one(workplace: Workplace) -> None:
    one = run(workplace, "one")
    two = run(workplace, "two", NUM_GPUS="2", DIST_STRATEGY="ddp")
    assert two.series("loss") == pytest.approx(one.series("loss"), abs=5e-6)


def test_a_bad_row_met_while_training_is_one_line(workplace: Workplace) -> None:
    make_rows(workplace.path / "bad.jsonl", 5000)
    with (workplace.path / "bad.jsonl").open("a") as stream:
        stream.write("{broken\n")
    workplace.write(
        "bad.yaml",
        data={"train": "bad.jsonl", "streaming": True},
        train={**TRAIN, "max_steps": 700},
    )
    done = workplace.run("train", CONFIG="bad.yaml")
    assert done.code == 2
    (line,) = done.error_lines
    assert line.startswith("error: bad.jsonl:5001: not JSON")
