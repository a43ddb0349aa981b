"""What watches a run: each callback has one concern."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_play.config.schema import Config
from sft_play.errors import Interrupted, Preempted, SftPlayError
from sft_play.plan.build import Plan
from sft_play.record.live import clock
from sft_play.record.run_dir import RunDir
from sft_play.record.run_record import append_metrics
from sft_play.runtime.beat import BeatCallback
from sft_play.runtime.dist import Ranks, highest
from sft_play.runtime.eval_budget import BudgetCallback
from sft_play.runtime.status import StatusCallback, asked, log_line, used_bytes_of
from sft_play.runtime.trackers import callbacks_of_trackers
from sft_play.runtime.watching import WatchCallback

# Seconds between two signs of life of a long evaluation.
TELL_SECONDS = 5.0


def build_callbacks(
    config: Config, plan: Plan, run: RunDir, stop: StopCallback, ranks: Ranks, first_step: int
) -> list[TrainerCallback]:
    """The callbacks that the config asks for, in the order in which they are called. Only rank 0 writes.

    Args:
        first_step: the first step that this attempt will train, from 1.
    """
    early_stopping = config.train.early_stopping_patience is not None
    stop.ranks = ranks
    budget = BudgetCallback(config.train.eval_time_budget)
    # First of all: it measures, and what it adds to a logged step the others print and write.
    watching: list[TrainerCallback] = [WatchCallback(config, plan, run, ranks), stop, ProgressCallback(), budget]
    if config.train.save_minutes is not None:
        watching.append(SaveMinutesCallback(config.train.save_minutes, ranks))
    watching.append(LogMarksCallback())  # after all that save or stop
    if ranks.world_size > 1:
        watching.append(BeatCallback(run.launch, ranks.rank))
    if ranks.main:
        watching.append(MetricsCallback(run.metrics))
    if config.train.metric_for_best_model or config.train.load_best_model_at_end or early_stopping:
        watching.append(SaveBestCallback())
    if early_stopping:
        train = config.train
        watching.append(EarlyStoppingCallback(train.early_stopping_patience, train.early_stopping_threshold))
    if asked():
        planned = int(plan.predicted.get("device_bytes", 0))
        watching.append(StatusCallback(used_bytes_of(plan.device), planned))
    if "tensorboard" in config.run.report_to and ranks.main:
        from torch.utils.tensorboard import SummaryWriter

        from sft_play.runtime.board import BoardCallback, write_board

        # What a crashed attempt wrote beyond the checkpoint is taken back.
        writer = SummaryWriter(str(run.tensorboard), purge_step=first_step)
        write_board(writer, config, plan)
        watching.append(BoardCallback(writer))
    if ranks.main:
        watching += callbacks_of_trackers(config, run, first_step)
    return watching


class ProgressCallback(TrainerCallback):
    """One line a logged step and one an evaluation, with tokens/s over training time alone."""

    def __init__(self) -> None:
        self.mark = self.first = 0.0
        self.seconds = self.seconds_all = 0.0
        self.tokens = self.tokens_all = 0.0
        self.steps = self.evaluated = 0
        self.told = time.monotonic()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.mark = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        now = time.monotonic()
        self.seconds += now - self.mark
        self.mark = now
        self.steps += 1

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "loss" not in logs:
            return
        # trl counts tokens from its own start; a resumed run begins at zero again.
        own = round((logs["num_tokens"] - self.tokens) / max(self.seconds, 1e-9), 1)
        logs.setdefault("tokens_per_second", own)  # rank 0 has been told that of all ranks
        self.tokens_all += logs["num_tokens"] - self.tokens
        self.seconds_all += self.seconds
        self.tokens, self.seconds = logs["num_tokens"], 0.0
        left = (state.max_steps - state.global_step) * self.seconds_all / max(self.steps, 1)
        log_line(
            f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"
            f"  loss {logs['loss']:.4f}  lr {logs['learning_rate']:.2e}  grad {float(logs['grad_norm']):.2f}"
            f"  tok/s {logs['tokens_per_second']:,.0f}  eta {clock(left)}"
        )

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: dict[str, Any], **_: Any
    ) -> None:
        self.mark, self.evaluated = time.monotonic(), 0
        print(f"evaluated at step {state.global_step}: held-out loss {metrics['eval_loss']:.4f}")

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, eval_dataloader: Any, **_: Any
    ) -> None:
        self.evaluated += 1
        if time.monotonic() - self.told > TELL_SECONDS:
            self.told = time.monotonic()
            log_line(f"evaluating: batch {self.evaluated} of {len(eval_dataloader)}")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.mark = time.monotonic()
        print(f"saved checkpoints/step-{state.global_step}")

    @property
    def tokens_per_second(self) -> float:
        """Real tokens (no padding) over the training time, evaluation and saving left out."""
        return self.tokens_all / self.seconds_all if self.seconds_all else 0.0


class MetricsCallback(TrainerCallback):
    """Every logged value into metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        kind = "train" if "loss" in logs else "eval" if "eval_loss" in logs else "summary"
        append_metrics(self.path, kind, {"step": state.global_step, **{k: _plain(v) for k, v in logs.items()}})


class LogMarksCallback(TrainerCallback):
    """Log each step that is evaluated, saved or the last, whatever `logging_steps` says.

    The loss is the mean since the line before, and a checkpoint does not hold what was not logged: only so do the
    lines after a checkpoint average over the same steps in a run that goes on from there.
    """

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if control.should_evaluate or control.should_save or control.should_training_stop:
            control.should_log = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.on_step_end(args, state, control)


class SaveBestCallback(TrainerCallback):
    """Write a checkpoint whenever the chosen metric improves, so that the best one always exists."""

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: dict[str, Any], **_: Any
    ) -> None:
        value = metrics.get(full_name(args.metric_for_best_model or "loss"))
        if value is None:  # answers did not fit into the budget
            return
        if state.global_step and (
            state.best_metric is None
            or (value > state.best_metric if args.greater_is_better else value < state.best_metric)
        ):
            control.should_save = True


class SaveMinutesCallback(TrainerCallback):
    """Write a checkpoint once so many minutes have passed since the last one, or since training began.

    Rank 0's clock decides for all: a save is a collective, and clocks differ.
    """

    def __init__(self, minutes: float, ranks: Ranks) -> None:
        self.seconds, self.ranks, self.saved = 60 * minutes, ranks, time.monotonic()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.saved = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        due = self.ranks.main and time.monotonic() - self.saved >= self.seconds
        if highest(self.ranks, int(due)):
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.saved = time.monotonic()


class StopCallback(TrainerCallback):
    """SIGTERM and Ctrl-C: save at the next step boundary and leave with the code that says so.

    An evaluation that is due at that step is made before: a run that goes on from there would never make it, and might
    choose another best model.
    """

    def __init__(self) -> None:
        self.reason: type[SftPlayError] | None = None
        self.ranks = Ranks()
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or (Preempted if number == signal.SIGTERM else Interrupted)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.reason = agreed_reason(self.ranks, self.reason)
        if self.reason:
            control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.reason:  # most epochs only end because of the stop: then nothing is due
            ended = state.epoch is not None and abs(state.epoch - round(state.epoch)) < 1e-6
            control.should_evaluate = control.should_save = control.should_evaluate and ended

    def raise_if_asked(self, step: int) -> None:
        """Leave, once the state is saved.

        Raises:
            Preempted: after SIGTERM.
            Interrupted: after Ctrl-C.
        """
        if self.reason:
            raise self.reason(f"stopped at step {step}" if step else "stopped before the first step")


def full_name(metric: str) -> str:
    """A metric's name as evaluations report it: `rougeL` is eval_rougeL."""
    return metric if metric.startswith("eval_") else f"eval_{metric}"


REASONS: tuple[type[SftPlayError] | None, ...] = (None, Interrupted, Preempted)


def agreed_reason(ranks: Ranks, mine: type[SftPlayError] | None) -> type[SftPlayError] | None:
    """Why to stop after this step, if any rank was asked to: a signal reaches each at another moment."""
    return REASONS[highest(ranks, REASONS.index(mine))]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
