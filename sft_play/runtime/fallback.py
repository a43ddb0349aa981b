"""The best checkpoint and the patience, worked out again by eval_loss after answers could not be scored any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback

from sft_play.record.checkpoints import PREFIX
from sft_play.record.run_dir import RunDir
from sft_play.runtime.dist import Ranks, from_main


class LossesOnlyCallback(TrainerCallback):
    """Falls back at once, in a run that was started again because answers did not fit."""

    def __init__(self, fall_back: Callable[[str], None], reason: str) -> None:
        self.fall_back, self.reason = fall_back, reason

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.fall_back(self.reason)


def choose_again(trainer: Any, run: RunDir, ranks: Ranks) -> None:
    """Put into the trainer's state what it would hold had eval_loss been the metric from the start. A collective.

    The best is one whose checkpoint is still there; without one the next evaluation is the best so far.
    """
    state = trainer.state
    history = [(one["step"], one["eval_loss"]) for one in state.log_history if "eval_loss" in one and one["step"]]
    there = from_main(ranks, [step for step, _ in history if (run.checkpoints / f"{PREFIX}{step}").is_dir()])
    kept = [(loss, step) for step, loss in history if step in there]
    state.best_metric, state.best_global_step = min(kept, default=(None, None))
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            losses = [loss for _, loss in history]
            callback.early_stopping_patience_counter = waited(losses, callback.early_stopping_threshold)


def waited(losses: list[float], threshold: float) -> int:
    """Evaluations without improvement at the end of a series of losses."""
    best, counter = float("inf"), 0
    for loss in losses:
        counter = 0 if best - loss > threshold else counter + 1
        best = min(best, loss)
    return counter
