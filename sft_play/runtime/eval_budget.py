"""The time that generating evaluation may take: a share of the training time so far, kept across resume."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

# The slowest of so many last rounds is what the next one is expected to take.
RECENT = 8


class BudgetCallback(TrainerCallback, ExportableState):
    """Measures training and evaluation, and says whether another round of generation fits. Rank 0's clock counts.

    The Trainer saves it with every checkpoint and makes it anew from there.

    Attributes:
        budget: share of the training time; 0 sets no limit.
        training, losses, generating: seconds so far; evaluation and saving are no training.
        evaluations, generations: how often losses were measured, and answers generated.
        batches: batches of prompts that an evaluation goes through; None before the first; it only falls.
        rows: answers scored last.
        fallback_step: where generation was given up for the rest of the run, and `reason` why.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.training = self.losses = self.generating = 0.0
        self.evaluations = self.generations = self.rows = 0
        self.recent: list[float] = []
        self.batches: int | None = None
        self.fallback_step: int | None = None
        self.reason = ""
        self.mark = 0.0

    def state(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name not in ("budget", "mark")}
        return {"args": {"budget": self.budget}, "attributes": {**kept, "recent": list(self.recent)}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.mark = time.monotonic()
        if self.fallback_step is not None:
            choose_by_loss(args)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        now = time.monotonic()
        self.training += now - self.mark
        self.mark = now

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.mark = time.monotonic()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.mark = time.monotonic()

    @property
    def share(self) -> float:
        """Generation's share of the training time so far."""
        return self.generating / self.training if self.training else 0.0

    def fix(self, batches: int, step: int) -> None:
        """Let later evaluations go through no more batches than this one: figures stay comparable.

        Before the first step there is no training time to take a share of, so nothing is fixed there.
        """
        if step and batches:
            self.batches = min(batches, self.batches or batches)


class Watch:
    """One evaluation's generation against the budget."""

    def __init__(self, budget: BudgetCallback) -> None:
        self.budget = budget
        self.allowed = budget.budget * budget.training - budget.generating
        self.started = self.last = time.monotonic()

    def go_on(self, rounds: int) -> bool:
        """Whether another round fits; before one was ever measured, one may be tried."""
        now = time.monotonic()
        recent = self.budget.recent
        if rounds:
            recent.append(now - self.last)
            del recent[:-RECENT]
        self.last = now
        if not self.budget.budget or not recent:
            return True
        return now - self.started + max(recent) <= self.allowed

    def stop(self) -> float:
        """End it and book its seconds, which it returns."""
        seconds = time.monotonic() - self.started
        self.budget.generating += seconds
        return seconds


def choose_by_loss(args: TrainingArguments) -> bool:
    """Pick the best checkpoint by eval_loss where a score of answers was to pick it; whether that was so."""
    from sft_play.runtime.scores import is_answer_metric

    if not is_answer_metric(args.metric_for_best_model or ""):
        return False
    args.metric_for_best_model, args.greater_is_better = "eval_loss", False
    return True
