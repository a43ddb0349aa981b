"""What watching a run costs: a tiny model trained with everything on and with everything off, in turns.

    python -m benchmarks.watching [--steps 200] [--rows 16]

On: the figures of every rank, sensors, metrics.jsonl and TensorBoard, at every step. Off: none of these. One run of
twice the steps goes on for ten steps with and ten without in turn, so that whatever else the machine does meets both.
The figure is the ratio of the processor time of all threads; wall time is printed beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_play.config.schema import Config
from sft_play.record.run_dir import RunDir
from sft_play.runtime.arguments import build_arguments
from sft_play.runtime.board import BoardCallback
from sft_play.runtime.callbacks import MetricsCallback, StopCallback, build_callbacks
from sft_play.runtime.dist import Ranks
from sft_play.runtime.job import read_job
from sft_play.runtime.meter import Meter
from sft_play.runtime.model import load_model, load_tokenizer
from sft_play.runtime.trainer import SftPlayTrainer, build_trainer
from sft_play.runtime.watching import WatchCallback

BOUND = 1.03
BLOCK = 10
WATCHING = (WatchCallback, MetricsCallback, BoardCallback)


class NoMeter(Meter):
    """Measures nothing."""

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        yield

    def add(self, *_: Any) -> None:
        pass


class Turns(TrainerCallback):
    """Takes what watches a run out for every second block of steps, and times the blocks.

    Attributes:
        blocks: (whether watched, processor seconds, wall seconds).
    """

    def __init__(self) -> None:
        self.trainer: SftPlayTrainer
        self.blocks: list[tuple[bool, float, float]] = []
        self.watched, self.mark = True, (0.0, 0.0)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step % BLOCK:
            return
        now = time.process_time(), time.perf_counter()
        if state.global_step:
            self.blocks.append((self.watched, now[0] - self.mark[0], now[1] - self.mark[1]))
        else:
            self.every, self.meter = list(self.trainer.callback_handler.callbacks), self.trainer.meter
        self.watched = not self.watched
        silent = [one for one in self.every if not isinstance(one, WATCHING)]
        self.trainer.callback_handler.callbacks = self.every if self.watched else silent
        self.trainer.meter = self.meter if self.watched else NoMeter()
        self.meter.begin()
        self.meter.go_on()
        self.mark = time.process_time(), time.perf_counter()


def prepare(folder: Path, rows: int) -> Path:
    """Make a tiny model and train it for one step, so that its rows are prepared; returns its run.json.

    Args:
        rows: of a step.
    """
    from tests.tiny import make_model, make_workplace

    workplace = make_workplace(folder, make_model(folder))
    once = {"TRAIN_MAX_STEPS": "1", "TRAIN_EVAL_STRATEGY": "no", "TRAIN_SAVE_STRATEGY": "no"}
    done = workplace.train(TRAIN_BATCH_SIZE=str(rows), **once)
    if done.code:
        sys.exit(done.out + done.err)
    return folder / "runs/tiny/run.json"


def train(run_json: Path, folder: Path, steps: int) -> Turns:
    """Train the run's job in this process, every second block of steps watched."""
    job, ranks, turns = read_job(run_json), Ranks(), Turns()
    values = job.config.model_dump()
    values["train"]["max_steps"] = steps
    splits = {name: run_json.parents[2] / path for name, path in job.splits.items()}
    job = replace(job, run=RunDir(folder), config=Config.model_validate(values), splits=splits)
    job.run.data.mkdir(parents=True)
    arguments = build_arguments(job.config, job.plan, job.run, has_validation=False)
    model = load_model(job.config, job.plan, job.model_path, ranks)
    tokenizer = load_tokenizer(job.model_path, job.config.model.chat_template, trust_remote_code=False)
    callbacks = build_callbacks(job.config, job.plan, job.run, StopCallback(), ranks, first_step=1)
    turns.trainer = build_trainer(job, arguments, model, tokenizer, [*callbacks, turns], ranks)
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        turns.trainer.train()
    return turns


def ratio(blocks: Sequence[tuple[bool, float, float]], clock: int) -> float:
    """Seconds of a watched block over those of the block before it: the median over the pairs."""
    pairs = zip(blocks[::2], blocks[1::2], strict=False)
    return median(on[clock] / off[clock] for off, on in pairs)


def main(argv: Sequence[str]) -> int:
    """Measure and print the ratio; 1 where it is above the bound."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=200, help="of each kind")
    options.add_argument("--rows", type=int, default=16, help="of a step")
    options.add_argument("--bound", type=float, default=BOUND)
    chosen = options.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        turns = train(prepare(Path(place), chosen.rows), Path(place) / "run", 2 * chosen.steps + 3 * BLOCK)
    blocks = turns.blocks[2:]  # the first two warm up
    for watched in (False, True):
        held = [block for block in blocks if block[0] == watched]
        times = [1000 * sum(block[clock] for block in held) / len(held) / BLOCK for clock in (1, 2)]
        print(f"{'on ' if watched else 'off'}  {times[0]:.3f} ms of processor time a step, {times[1]:.3f} ms")
    found = ratio(blocks, 1)
    print(f"ratio {found:.4f} of processor time (bound {chosen.bound}), {ratio(blocks, 2):.4f} of wall time")
    return int(found > chosen.bound)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
