"""Signals while a model loads, a run evaluates or saves: saved and gone on with to the bit, or ended at once."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from sft_play.launch.processes import descendants, ranks_below
from tests.distributed.runs import Outcome
from tests.faults.hooks import hooked
from tests.faults.test_stop_and_resume import finish, wait_for
from tests.tiny import Workplace, make_rows

TRAIN = {"max_steps": 6, "save_steps": 2, "warmup": 4, "eval_strategy": "steps", "eval_steps": 2}
# Where a signal comes -> the line that is printed there.
MOMENTS = {
    "load": "loading",
    "warm-up": "step 1/6",
    "evaluation": "evaluated at step 2",
    "save": "saved checkpoints/step-2",
}
CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}


def call(workplace: Workplace, ranks: int) -> dict[str, str]:
    workplace.write(train={**workplace.config["train"], **TRAIN})
    return {"CONFIG": "tiny.yaml", "NUM_GPUS": str(ranks), "TRAIN_BATCH_SIZE": str(4 // ranks)}


@pytest.mark.parametrize(
    ("moment", "number", "ranks"),
    [
        pytest.param("load", signal.SIGTERM, 2, marks=pytest.mark.slow),
        pytest.param("warm-up", signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param("evaluation", signal.SIGINT, 2, marks=pytest.mark.fault),
        pytest.param("save", signal.SIGTERM, 2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_a_second_sigterm_harms_nothing(
    workplace: Workplace, moment: str, number: signal.Signals, ranks: int
) -> None:
    given = call(workplace, ranks)
    assert workplace.run("train-distributed", RUN_NAME="straight", **given).code == 0
    process = workplace.start("train-distributed", **given)
    wait_for(process, MOMENTS[moment])
    process.send_signal(number)
    if number == signal.SIGTERM:
        process.send_signal(number)
    stopped = finish(process)
    assert stopped.code == CODES[number], stopped.out + stopped.err
    assert len(stopped.error_lines) == 1
    done = workplace.run("train-distributed", **given)
    assert done.code == 0, done.err
    straight, resumed = (Outcome(workplace.path / "runs" / name) for name in ("straight", "tiny"))
    assert resumed.series("loss") == straight.series("loss")
    assert all(bool((resumed.weights[name] == weight).all()) for name, weight in straight.weights.items())


IN_STEP_4 = """
import os, signal

def patch(module):
    upstream = module.SFTTrainer.training_step

    def training_step(self, *items, **named):
        if self.state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return upstream(self, *items, **named)

    module.SFTTrainer.training_step = training_step
"""


@pytest.mark.parametrize(
    "due",
    [
        pytest.param({"eval_strategy": "steps", "eval_steps": 4}, marks=pytest.mark.slow),
        pytest.param({"eval_strategy": "epoch"}, marks=pytest.mark.slow),
    ],
    ids=["steps", "epoch"],
)
def test_an_evaluation_that_is_due_where_a_signal_stops_is_made(workplace: Workplace, due: dict[str, object]) -> None:
    """A run that goes on from step 4 begins with step 5: nothing would look at step 4 again."""
    make_rows(workplace.path / "train.jsonl", 16)  # an epoch of four steps
    workplace.write(train={**workplace.config["train"], "max_steps": 6, "save_steps": 6, **due})
    assert workplace.train(RUN_NAME="straight").code == 0
    stopped = workplace.train(**hooked(workplace.path / "hook", "sft_play.runtime.trainer", IN_STEP_4))
    assert stopped.code == 75, stopped.err
    assert workplace.train().code == 0
    straight, resumed = (Outcome(workplace.path / "runs" / name) for name in ("straight", "tiny"))
    evaluated = [[(one["step"], one["eval_loss"]) for one in outcome.events("eval")] for outcome in (straight, resumed)]
    assert evaluated[0][0][0] == 4
    assert evaluated[1] == evaluated[0]
    assert resumed.series("loss") == straight.series("loss")


@pytest.mark.fault
def test_a_killed_rank_is_named_and_leaves_nothing(workplace: Workplace) -> None:
    given = {**call(workplace, 2), "TRAIN_MAX_STEPS": "100000", "TRAIN_EVAL_STRATEGY": "no"}
    process = workplace.start("train-distributed", **given)
    wait_for(process, "saved checkpoints/step-2")
    below = descendants(process.pid)
    victim = ranks_below(process.pid)[1]
    started = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    done = finish(process)
    assert time.monotonic() - started < 30
    assert done.code == 6, done.out[-2000:] + done.err
    assert re.search(r"rank \d", done.error_lines[0])
    assert not set(below) & set(descendants(1))
