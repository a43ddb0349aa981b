"""Signs of life: each rank touches a file with every batch, and writes its stacks when it is asked to."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

EVERY_SECONDS = 0.2


class BeatCallback(TrainerCallback):
    """Tells the parent that this rank moves on, from its first batch to its last.

    Args:
        folder: the launch folder.
        rank: of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / f"beat-{rank}"
        self._last = 0.0
        self._over = False
        # Written by the handler itself, in C: a rank that waits inside a collective answers too.
        self._stacks = (folder / f"stacks-{rank}.txt").open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)

    def beat(self, step: int) -> None:
        """Leave a sign of life, at most five a second."""
        now = time.monotonic()
        if self._over or now - self._last < EVERY_SECONDS:
            return
        self._last = now
        staging = self._file.with_name(f".{self._file.name}")
        staging.write_text(f"{os.getpid()} {step}")
        staging.replace(self._file)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.beat(state.global_step)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.beat(state.global_step)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.beat(state.global_step)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.beat(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.beat(state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """What follows, gathering and writing the result, has no batches to count."""
        self._over = True
        self._file.unlink(missing_ok=True)
