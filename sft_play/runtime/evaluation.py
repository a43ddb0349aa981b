"""Evaluation while a run trains: what the trainer's own loop measures, and the generated answers beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import GenerationMixin
from transformers.integrations import TensorBoardCallback
from trl.trainer.utils import FusedCausalLMOutput

from sft_play.config.schema import Config
from sft_play.data.template import TextTokenizer
from sft_play.record.run_record import append_event
from sft_play.runtime.answers import Answered, Engine, Generation, GenerationOutOfMemory, Prompt, prompts_of
from sft_play.runtime.dist import Ranks, from_main
from sft_play.runtime.eval_budget import BudgetCallback, Watch, choose_by_loss
from sft_play.runtime.eval_files import AnswerCache, settings_key, shown_answers, weights_digest, write_predictions
from sft_play.runtime.fallback import choose_again
from sft_play.runtime.generate import end_token_ids
from sft_play.runtime.job import Job
from sft_play.runtime.scores import answer_metrics, rouge_metric, score_answers
from sft_play.runtime.tally import Tally, token_figures
from sft_play.runtime.words import FIX, unseen_note

# Strategies whose ranks hold parts of the weights: each forward pass is a collective.
TOGETHER = ("fsdp", "hsdp", "zero3")
SAME_ROWS = "tp"


class TrainingEvaluation:
    """Everything that a run's evaluations share.

    Args:
        trainer: whose model, state and callbacks are used.
        rows: the validation rows, unfilled; None where there are none.
    """

    def __init__(self, trainer: Any, job: Job, rows: Any, text_tokenizer: TextTokenizer, ranks: Ranks) -> None:
        self.trainer = trainer
        self.job = job
        self.rows = rows
        self.ranks = ranks
        self.tally = Tally()
        self.names = source_names(job.config)
        model = trainer.accelerator.unwrap_model(trainer.model)
        ends = end_token_ids(text_tokenizer, model.generation_config)
        self.generation = generation_of(
            job.config,
            ends,
            trainer.processing_class.pad_token_id,
            autocast=job.plan.autocast,
            synced=job.plan.strategy in TOGETHER,
        )
        self.cache = AnswerCache(self.folder / "cache.jsonl", settings_key(self.generation, job.plan.eval_batch))
        self.answers = ""
        self.generates = rows is not None and job.plan.evaluation in ("generate", "sample")
        self.refused = "" if not self.generates or model.can_generate() else f"{type(model).__name__} cannot generate"
        self.missing = missing_abilities()
        if self.refused:
            self.generates = False
        elif self.generates and ranks.main:
            rouge_metric(self.generation.rouge_tokenizer)  # imports take seconds that are no evaluation's
        if self.note:
            self.say(f"warning: {self.note} -> {FIX}")

    @property
    def folder(self) -> Path:
        """Where predictions of every evaluation and the cache of answers lie."""
        return self.job.run.path / "eval"

    @property
    def budget(self) -> BudgetCallback:
        """The one that counts now: a resumed Trainer makes its callbacks anew."""
        found = [one for one in self.trainer.callback_handler.callbacks if isinstance(one, BudgetCallback)]
        return found[0]

    @cached_property
    def batches(self) -> list[list[Prompt]]:
        """The prompts of all rows, in the order in which every evaluation takes them."""
        return prompts_of(self.rows, self.trainer.processing_class, self.generation, self.job.plan.eval_batch)

    @cached_property
    def note(self) -> str:
        """What the scores of this run's answers leave out; empty where nothing, or where none are made."""
        if not self.generates:
            return ""
        references = [prompt.reference for batch in self.batches for prompt in batch]
        return unseen_note(references, self.generation.rouge_tokenizer)

    def say(self, text: str) -> None:
        if self.ranks.main:
            print(text)

    def losses(self, prefix: str) -> dict[str, float]:
        """The figures of the rows that all ranks have tallied. A collective."""
        accelerator = self.trainer.accelerator
        table = accelerator.reduce(self.tally.table(max(1, len(self.names))).to(accelerator.device))
        return token_figures(dict(enumerate(table.tolist())), self.names, prefix)

    def answered(self, prefix: str) -> dict[str, float]:
        """Scores of generated answers, as many as the budget allows; nothing where none are made. A collective."""
        budget, step = self.budget, self.trainer.state.global_step
        if not self.generates or budget.fallback_step is not None or not self.batches:
            return {}
        wanted = self.batches[: budget.batches]
        weights = weights_digest(self._model, self.ranks, sharded=self._together)
        known = from_main(self.ranks, self._known(wanted, weights) if self.ranks.main else set())
        todo = [number for number in range(len(wanted)) if number not in known]
        watch = Watch(budget)
        try:
            answers, done = self._engine().answer([wanted[number] for number in todo], watch.go_on)
        except GenerationOutOfMemory as error:
            watch.stop()
            self.fall_back(str(error))
            return {}
        scored = wanted[: todo[done] if done < len(todo) else len(wanted)]
        lines = self._lines(scored, answers, weights) if self.ranks.main else []
        if self.note and self.ranks.main and not budget.rows:  # the run's first scores
            append_event(self.job.run.metrics, step, "evaluation", self.note)
        metrics = from_main(self.ranks, answer_metrics(lines, self.names, prefix))
        seconds = watch.stop()
        self._book(len(scored), sum(map(len, scored)), made=done)
        if self.ranks.main:
            self._report(lines, metrics, seconds, step)
        return metrics

    def fall_back(self, reason: str) -> None:
        """Measure losses only from here on; the best checkpoint is then chosen by eval_loss."""
        budget, trainer = self.budget, self.trainer
        budget.fallback_step, budget.reason = trainer.state.global_step, reason
        said = f"{reason} at step {budget.fallback_step}: evaluation measures losses only from here on"
        metric = trainer.args.metric_for_best_model
        if choose_by_loss(trainer.args):
            choose_again(trainer, self.job.run, self.ranks)
            said += f"; the best checkpoint is chosen by eval_loss instead of {metric}"
        self.say(f"warning: {said}")
        if self.ranks.main:
            append_event(self.job.run.metrics, budget.fallback_step, "fallback", said)
        self._show("eval/fallback", said)

    def summary(self) -> dict[str, Any]:
        """What the record keeps of evaluation."""
        budget, plan = self.budget, self.job.plan
        given_up = bool(self.refused) or budget.fallback_step is not None
        return {
            "mode": "loss" if given_up else plan.evaluation,
            "reason": budget.reason or self.refused or plan.evaluation_reason,
            "fallback_step": budget.fallback_step,
            "note": self.note,
            "evaluations": budget.evaluations,
            "generations": budget.generations,
            "rows": budget.rows,
            "training_seconds": round(budget.training, 3),
            "loss_seconds": round(budget.losses, 3),
            "generation_seconds": round(budget.generating, 3),
        }

    def speed(self) -> str:
        """Loss-only beside generating evaluation; empty where a run did not do both."""
        budget = self.budget
        if not (budget.evaluations and budget.generations):
            return ""
        loss, answers = budget.losses / budget.evaluations, budget.generating / budget.generations
        return (
            f"evaluation: losses {loss:.2f} s, answers {answers:.2f} s more each time ({budget.rows} rows);"
            f" answers took {budget.share:.1%} of the training time"
        )

    @property
    def _model(self) -> Any:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    @property
    def _together(self) -> bool:
        return self.generation.synced or self.job.plan.strategy == SAME_ROWS

    def _engine(self) -> Engine:
        model = self._model
        if self.job.plan.strategy in ("fsdp", "hsdp"):
            # The root's own weights are gathered by its forward pass, which an adapter's `generate` goes around.
            register_fsdp_forward_method(model, "generate")
        return Engine(
            model,
            self.trainer.processing_class,
            self.generation,
            self.ranks,
            same_for_all=self.job.plan.strategy == SAME_ROWS,
            alone=not self._together,
        )

    def _known(self, wanted: Sequence[list[Prompt]], weights: str) -> set[int]:
        """Batches whose every answer is in the cache."""
        return {
            number
            for number, batch in enumerate(wanted)
            if all(self.cache.get(prompt, weights) is not None for prompt in batch)
        }

    def _lines(self, batches: Sequence[list[Prompt]], answers: list[Answered], weights: str) -> list[dict[str, Any]]:
        """Scored answers of all batches in their order, the new ones put into the cache."""
        scored = score_answers(answers, self.generation.rouge_tokenizer)
        self.cache.add([one.prompt for one in answers], weights, list(scored))
        found = (self.cache.get(prompt, weights) for batch in batches for prompt in batch)
        return [one for one in found if one is not None]

    def _book(self, batches: int, rows: int, *, made: int) -> None:
        budget = self.budget
        budget.fix(batches, self.trainer.state.global_step)
        if rows:
            budget.rows = rows
        budget.generations += bool(made)

    def _report(self, lines: list[dict[str, Any]], metrics: dict[str, float], seconds: float, step: int) -> None:
        of, budget = sum(map(len, self.batches)), self.budget
        share = f"{budget.share:.1%} of the training time so far, {budget.budget:.0%} allowed"
        if not lines:
            print(f"no answers at step {step}: not one batch fits into the budget ({share})")
            return
        rouge, exact = (next(value for key, value in metrics.items() if key.endswith(name)) for name in SHOWN_SCORES)
        if budget.budget == 0:
            share = "no limit"
        print(
            f"answers at step {step}: {len(lines)} of {of} rows in {seconds:.1f} s ({share});"
            f" rougeL {rouge:.4f}  exact match {exact:.4f}"
        )
        place = self.trainer.loaded_step or step
        write_predictions(self.folder / f"step-{place}.jsonl", sorted(lines, key=lambda one: one["row"]))
        self._show("eval/answers", shown_answers(lines))

    def _show(self, name: str, text: str) -> None:
        """Text in TensorBoard, where the run has it."""
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                callback.tb_writer.add_text(name, text, self.trainer.state.global_step)


SHOWN_SCORES = ("_rougeL", "_exact_match")


def generation_of(
    config: Config, end_ids: Sequence[int], pad_id: int, *, autocast: str, synced: bool = False
) -> Generation:
    """How the config wants answers made.

    Args:
        synced: whether each forward pass is a collective.
    """
    train = config.train
    return Generation(
        end_ids=tuple(end_ids),
        pad_id=pad_id,
        max_new_tokens=train.generation_max_new_tokens,
        num_beams=train.generation_num_beams,
        do_sample=train.generation_do_sample,
        temperature=train.generation_temperature,
        top_p=train.generation_top_p,
        seed=train.seed,
        autocast=autocast,
        synced=synced,
        keep_steps=train.eval_accumulation_steps,
        concat=train.eval_do_concat_batches,
        rouge_tokenizer=train.eval_rouge_tokenizer,
    )


def source_names(config: Config, split: str = "validation") -> tuple[str, ...]:
    """`<n>-<stem>` of each source that a split's rows may come from: its own, or those it was carved from."""
    listed = getattr(config.data, split) or config.data.train
    paths = [one if isinstance(one, str) else one.path for one in ([listed] if isinstance(listed, str) else listed)]
    return tuple(f"{number}-{Path(path).stem}" for number, path in enumerate(paths))


def missing_abilities() -> str:
    """What the installed transformers and trl lack of what evaluation uses, in one line; empty where nothing."""
    lacking = []
    if "is_top1" not in FusedCausalLMOutput.__dataclass_fields__:
        lacking.append("trl counts no likeliest tokens: no eval_token_accuracy")
    if "synced_gpus" not in signature(GenerationMixin.generate).parameters:
        lacking.append("transformers cannot generate over sharded weights")
    return "; ".join(lacking)


def timed_losses(budget: BudgetCallback, started: float) -> None:
    """Book the seconds that an evaluation's losses took."""
    budget.losses += time.monotonic() - started
    budget.evaluations += 1


__all__ = ["TrainingEvaluation", "generation_of", "missing_abilities", "source_names", "timed_losses"]
