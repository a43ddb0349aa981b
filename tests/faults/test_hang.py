"""Ranks that stand still: the silent one is named, the others say where they wait, and all are ended in time."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from sft_play.launch.watch import innermost, read_beats
from tests.faults.test_stop_and_resume import finish, wait_for
from tests.tiny import Workplace

TIMEOUT = 8


@pytest.mark.fault
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_a_rank_that_is_stopped_is_named_and_all_are_ended(workplace: Workplace, strategy: str) -> None:
    workplace.config["tuning"] = {"mode": "full"}
    workplace.config["train"] |= {"max_steps": 100_000, "batch_size": 2, "save_steps": 5, "eval_strategy": "no"}
    workplace.write()
    variables = {"NUM_GPUS": "2", "DIST_STRATEGY": strategy, "NCCL_TIMEOUT": str(TIMEOUT)}
    process = workplace.start("train-distributed", CONFIG="tiny.yaml", **variables)
    wait_for(process, "saved checkpoints/step-5")
    launch = workplace.path / "runs/tiny/launch"
    (victim,) = [beat for beat in read_beats(launch) if beat.rank == 1]
    os.kill(victim.pid, signal.SIGSTOP)
    started = time.monotonic()
    done = finish(process)
    assert done.code == 6, done.err
    assert time.monotonic() - started < TIMEOUT + 25
    silent, stacks = done.error_lines
    assert re.search(rf"rank 1 \(process {victim.pid}, stopped\) does not answer; nothing has moved for 8 s", silent)
    assert "rank 0 at " in stacks
    assert "most recent call first" in (launch / "stacks-0.txt").read_text()
    stat = Path(f"/proc/{victim.pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_main_threads_own_frame_is_told() -> None:
    stacks = (
        'Thread 0x1 (most recent call first):\n  File "/a/x/threading.py", line 3 in wait\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/l/torch/distributed/c10d.py", line 9 in all_reduce\n'
        '  File "/p/sft_play/runtime/trainer.py", line 42 in training_step\n'
    )
    assert innermost(stacks) == "trainer.py:42 training_step"
    assert innermost("") == "an unknown place"
