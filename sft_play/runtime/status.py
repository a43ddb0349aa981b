"""What rank 0 is doing now, for a parent that shows a live line."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_play.record.live import ASKED, line_of
from sft_play.runtime.sensors import resident_bytes

EVERY_SECONDS = 0.2


def asked() -> bool:
    """Whether the parent shows a live line."""
    return ASKED in os.environ


def tell(**values: Any) -> None:
    """Hand values to the live line."""
    if asked():
        print(line_of(values) + "\n", end="", flush=True)  # one write: it goes out, or is dropped, whole


def log_line(text: str) -> None:
    """A line for run.log, and for the terminal where no live line says the same."""
    if asked():
        tell(log=text)
    else:
        print(text)


class StatusCallback(TrainerCallback):
    """Steps, evaluation batches, loss, speed and memory; at most five times a second.

    Args:
        used_bytes: the device's memory in use now.
        planned_bytes: what the plan expects of it; 0 where it says nothing.
    """

    def __init__(self, used_bytes: Callable[[], int], planned_bytes: int) -> None:
        self.used_bytes, self.planned_bytes = used_bytes, planned_bytes
        self.began = self.told = 0.0
        self.first = self.batch = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.began, self.first = time.monotonic(), state.global_step
        self._tell(state, phase="training")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._due():
            self._tell(state, phase="saving" if control.should_save else "training")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "loss" in logs:
            self._tell(state, loss=logs["loss"], tokens_per_second=logs.get("tokens_per_second"))

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, eval_dataloader: Any, **_: Any
    ) -> None:
        self.batch += 1
        if self._due():
            self._tell(state, phase="evaluating", done=self.batch, of=len(eval_dataloader))

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: dict[str, Any], **_: Any
    ) -> None:
        self.batch = 0
        self._tell(state, phase="training", held_out=metrics.get("eval_loss"))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._tell(state, phase="training")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        tell(phase="writing the result")

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self.told < EVERY_SECONDS:
            return False
        self.told = now
        return True

    def _tell(self, state: TrainerState, **values: Any) -> None:
        steps = state.global_step - self.first
        left = state.max_steps - state.global_step
        tell(
            step=state.global_step,
            steps=state.max_steps,
            eta_seconds=left * (time.monotonic() - self.began) / steps if steps else None,
            used_bytes=self.used_bytes(),
            planned_bytes=self.planned_bytes,
            **values,
        )


class Bar:
    """A progress bar of the stack that draws nothing and hands its count on.

    Args:
        what: the phase.
        rows: what is gone through; None where it is counted by `update`.
    """

    def __init__(self, what: str, rows: Any = None, total: int | None = None) -> None:
        self.what, self.rows = what, rows
        self.total = total if total is not None else len(rows) if hasattr(rows, "__len__") else None
        self.done, self.told = 0, 0.0

    def __iter__(self) -> Iterator[Any]:
        for one in self.rows or ():
            yield one
            self.update()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, by: int = 1) -> None:
        """So much more is done."""
        self.done += by
        now = time.monotonic()
        if now - self.told >= EVERY_SECONDS or self.done == self.total:
            self.told = now
            tell(phase=self.what, done=self.done, of=self.total)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None  # set_description, close and their like change nothing that is shown


def show_loading() -> None:
    """Let the stack's bars (weights being loaded) tell how far they are."""
    if asked():
        transformers.logging.set_tqdm_hook(lambda _, rows, named: bar_of(*rows, **named))


def bar_of(iterable: Any = None, desc: str = "loading", total: int | None = None, **_: Any) -> Bar:
    """What stands for one of tqdm's bars."""
    return Bar(desc.lower(), iterable, total)


def used_bytes_of(device: str) -> Callable[[], int]:
    """What reads the memory in use: on the GPU, or the resident set of this process, in bytes."""

    def on_gpu() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    return on_gpu if device == "cuda" else resident_bytes
