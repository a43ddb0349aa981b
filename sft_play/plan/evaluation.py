"""How a run evaluates: losses only, answers to all rows, or to as many as its share of the time allows, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from sft_play.config.eval_rules import GENERATED_METRICS, plain_metric
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.facts.data import DataFacts, SplitFacts
from sft_play.facts.hardware import GIB, Hardware
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.generation import generation_seconds
from sft_play.plan.memory import estimate
from sft_play.plan.settings import Offload, Settings
from sft_play.plan.strategy import fits_memory
from sft_play.plan.terms import Phase

Mode = Literal["none", "loss", "generate", "sample"]

# Rows that are generated for at once at most, where the plan chooses: more hardly pay, and wait for the longest.
MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is decided of a run's evaluation.

    Attributes:
        batch: rows of one batch on one GPU.
        settings: the run's, with what its evaluation adds to memory.
    """

    mode: Mode
    reason: str
    batch: int
    settings: Settings


@dataclass(frozen=True, kw_only=True)
class EvaluationInputs:
    """What it is decided from.

    Attributes:
        settings: those of the strategy taken.
        step_seconds: predicted time of a training step; None where it is unknown.
    """

    config: Config
    facts: ModelFacts
    settings: Settings
    hardware: Hardware
    data: DataFacts | None
    step_seconds: float | None

    @property
    def rows(self) -> SplitFacts | None:
        """The rows that are evaluated; None where they are not prepared yet."""
        return self.data.splits.get("validation") if self.data else None

    @property
    def row_count(self) -> int | None:
        limit = self.config.train.eval_max_rows
        return None if self.rows is None else min(self.rows.rows_kept, limit or self.rows.rows_kept)


def evaluates(config: Config) -> bool:
    """Whether the run evaluates while it trains."""
    has_rows = config.data.validation is not None or config.data.split.validation > 0
    return has_rows and config.train.eval_strategy != "no"


def decide_evaluation(inputs: EvaluationInputs) -> Evaluation:
    """The mode of evaluation, its batch and the reason.

    Raises:
        ConfigError: `train.metric_for_best_model` is a figure of answers and none will be generated.
    """
    decided = _decide(inputs)
    metric = inputs.config.train.metric_for_best_model
    if metric and plain_metric(metric) in GENERATED_METRICS and decided.mode in ("none", "loss"):
        what = f"{metric} is a figure of generated answers, and none will be generated: {decided.reason}"
        raise ConfigError(what, where="train.metric_for_best_model", fix="use eval_loss")
    return decided


def _decide(inputs: EvaluationInputs) -> Evaluation:
    train, settings = inputs.config.train, inputs.settings
    if not evaluates(inputs.config):
        why = "train.eval_strategy is no" if train.eval_strategy == "no" else "there are no validation rows"
        return Evaluation(mode="none", reason=why, batch=_first_batch(inputs), settings=settings)
    reading = replace(settings, eval_micro_batch=_first_batch(inputs), eval_seq_len=_longest(inputs))
    batch = reading.eval_micro_batch
    if not train.predict_with_generate:
        why = "losses over answer tokens; train.predict_with_generate is false"
        return Evaluation(mode="loss", reason=why, batch=batch, settings=reading)
    if why := why_no_generation(inputs):
        return Evaluation(mode="loss", reason=why, batch=batch, settings=reading)
    answering = _fitting(inputs, replace(reading, max_new_tokens=_new_tokens(inputs), num_beams=_beams(inputs)))
    if answering is None:
        return Evaluation(mode="loss", reason=_does_not_fit(inputs, reading), batch=batch, settings=reading)
    mode, why = _in_time(inputs, answering)
    return Evaluation(mode=mode, reason=why, batch=answering.eval_micro_batch, settings=answering)


def why_no_generation(inputs: EvaluationInputs) -> str:
    """Why no answers can be generated whatever the memory and the time; empty where they can."""
    settings, split = inputs.settings, inputs.rows
    if settings.offload is Offload.PARAMS:
        return "every token of an answer would read all weights from host memory"
    if inputs.config.data.task == "cpt" or (split is not None and set(split.formats) <= {"text"}):
        return "the validation rows are texts, which have no question to answer"
    return ""


def _first_batch(inputs: EvaluationInputs) -> int:
    """As configured; else the rows that a training micro-batch holds, of packs those that its tokens are worth."""
    asked, settings = inputs.config.train.eval_batch_size, inputs.settings
    if asked != "auto":
        return asked
    if not settings.packed:
        return settings.micro_batch
    return max(1, min(MOST_ROWS, settings.tokens // max(1, _longest(inputs) or settings.seq_len)))


def _longest(inputs: EvaluationInputs) -> int:
    """Tokens of the longest validation row; 0 where it is unknown."""
    return min(inputs.rows.longest, inputs.config.model.max_seq_len) if inputs.rows else 0


def _new_tokens(inputs: EvaluationInputs) -> int:
    return inputs.config.train.generation_max_new_tokens


def _beams(inputs: EvaluationInputs) -> int:
    return inputs.config.train.generation_num_beams


def _fitting(inputs: EvaluationInputs, settings: Settings) -> Settings | None:
    """The settings with a batch whose answers fit; None where not even the smallest does.

    Where the config leaves it open, on a GPU: as many rows as stay within the memory that training takes anyway, for
    a token costs the same time for one row as for many; fewer than that where they would not fit.
    """
    if not fits_memory(estimate(inputs.facts, settings), inputs.hardware):
        rows = settings.eval_micro_batch
        smaller = inputs.config.train.eval_batch_size == "auto" and rows > 1
        return _fitting(inputs, replace(settings, eval_micro_batch=rows // 2)) if smaller else None
    if inputs.config.train.eval_batch_size != "auto" or not inputs.hardware.gpus:
        return settings
    training = estimate(inputs.facts, inputs.settings)
    most = min(MOST_ROWS, inputs.row_count or MOST_ROWS)
    while settings.eval_micro_batch < most:
        larger = replace(settings, eval_micro_batch=min(most, 2 * settings.eval_micro_batch))
        if _reading_bytes(inputs.facts, larger) > training.allocated_bytes:
            break
        settings = larger
    return settings


def _reading_bytes(facts: ModelFacts, settings: Settings) -> int:
    memory = estimate(facts, settings)
    return max(memory.phase_bytes(Phase.EVALUATION), memory.phase_bytes(Phase.GENERATION))


def _does_not_fit(inputs: EvaluationInputs, reading: Settings) -> str:
    rows = reading.eval_micro_batch if inputs.config.train.eval_batch_size != "auto" else 1
    one = replace(reading, eval_micro_batch=rows, max_new_tokens=_new_tokens(inputs), num_beams=_beams(inputs))
    memory = estimate(inputs.facts, one)
    there = inputs.hardware.smallest_gpu_bytes or inputs.hardware.ram_bytes
    needed = memory.needed_bytes if inputs.hardware.gpus else memory.allocated_bytes
    many = f"{rows} rows at once" if rows > 1 else "one row"
    return f"generating for {many} would need {needed / GIB:.1f} GiB and {there / GIB:.1f} are there"


def _in_time(inputs: EvaluationInputs, settings: Settings) -> tuple[Mode, str]:
    """All rows or a sample, by the predicted seconds beside the share of training time that may be spent."""
    share, rows = inputs.config.train.eval_time_budget, inputs.row_count
    if not share:
        return "generate", f"answers to {_count(rows)}, however long they take (train.eval_time_budget is 0)"
    within = f"within {share:.0%} of the training time"
    if rows is None or inputs.rows is None:
        return "sample", f"answers to as many rows as are made {within}; the rows are not prepared yet"
    prompt = (inputs.rows.tokens - inputs.rows.loss_tokens) / max(1, inputs.rows.rows_kept)
    some = f"answers to as many of {_count(rows)} as are made {within}"
    seconds = generation_seconds(inputs.facts, settings, inputs.hardware, rows=rows, prompt=prompt)
    between = training_seconds_between(inputs)
    if seconds is None or between is None:
        return "sample", f"{some}; this device's speed is not known"
    if inputs.config.train.eval_on_start:
        return "sample", f"{some}; before the first step there is none"
    took = f"all take about {_seconds(seconds)}, and {share:.0%} of the training between two evaluations is"
    if seconds <= share * between:
        return "generate", f"answers to {_count(rows)}: {took} {_seconds(share * between)}"
    made = max(1, math.floor(rows * share * between / seconds))
    return "sample", f"answers to about {made:,} of {_count(rows)}: {took} {_seconds(share * between)}"


def training_seconds_between(inputs: EvaluationInputs) -> float | None:
    """Predicted training time between two evaluations; None where a step's is unknown."""
    train = inputs.config.train
    if inputs.step_seconds is None or inputs.data is None:
        return None
    epoch = math.ceil(inputs.data.splits["train"].sequences / inputs.settings.global_batch)
    steps = train.eval_steps if train.eval_strategy == "steps" and train.eval_steps else epoch
    if inputs.data.splits["train"].streamed and train.eval_strategy != "steps":
        steps = train.max_steps or steps
    return inputs.step_seconds * min(steps, train.max_steps or steps)


def _count(rows: int | None) -> str:
    return "all rows" if rows is None else f"{rows:,} rows"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
