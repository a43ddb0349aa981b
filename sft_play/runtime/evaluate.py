"""Held-out rows through a model: losses over answer tokens and, where asked for, generated answers and their scores.

`evaluate_rows` does all of it for a model that stands by itself (`make eval`); while a run trains, the trainer's own
loop measures the losses and `runtime/evaluation.py` does the rest, with the same functions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.utils import add_fused_lm_head

from sft_play.runtime.answers import Engine, Generation, Prompt, autocast, prompts_of
from sft_play.runtime.collate import IGNORED
from sft_play.runtime.dist import Ranks, from_main
from sft_play.runtime.job import SOURCE
from sft_play.runtime.scores import answer_metrics, score_answers
from sft_play.runtime.tally import Tally, token_figures

FUSED = ("log_probs", "is_top1")


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """How rows are evaluated.

    Attributes:
        batch: rows of one batch on one device.
        autocast: of the losses: `bf16`, `fp16` or `fp32` (none).
        generation: how answers are made; None measures losses only.
        sample: answers at most, in whole batches of a fixed order; None for all rows.
        sources: names of the rows' sources by number; figures of each where there are several.
    """

    batch: int
    autocast: str = "fp32"
    generation: Generation | None = None
    sample: int | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """What an evaluation found.

    Attributes:
        metrics: `eval_loss`, `eval_perplexity` and so on, and those of each source as `eval_loss/<source>`.
        predictions: the answers with their scores, as in eval/step-N.jsonl; empty without generation and beyond rank 0.
        seconds: taken for `loss` and for `generation`.
    """

    metrics: dict[str, float]
    predictions: tuple[dict[str, Any], ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


def evaluate_rows(
    model: Any, tokenizer: Any, rows: Any, settings: EvalSettings, ranks: Ranks | None = None
) -> EvalResult:
    """Losses and answers of prepared rows (input_ids, labels, source) under one process's whole model.

    Args:
        rows: a `datasets.Dataset`.
        ranks: alone where it is None; else every rank measures all losses and makes its share of the answers.
    """
    ranks, training, tally, started = ranks or Ranks(), model.training, Tally(), time.monotonic()
    model.eval()
    with_fused_head(model)
    with torch.no_grad(), autocast(model, settings.autocast):
        for batch in loss_batches(rows, settings.batch):
            tally.add(*row_sums(model, to_device(batch, model.device)))
    model.train(training)
    metrics = token_figures(tally.totals(), settings.sources)
    loss_seconds = time.monotonic() - started
    predictions: tuple[dict[str, Any], ...] = ()
    if settings.generation:
        engine = Engine(model, tokenizer, settings.generation, ranks)
        batches = prompts_of(rows, tokenizer, settings.generation, settings.batch)
        answers, _ = engine.answer(first_batches(batches, settings.sample))
        predictions = tuple(score_answers(answers, settings.generation.rouge_tokenizer))
        metrics |= from_main(ranks, answer_metrics(predictions, settings.sources))
    seconds = {"loss": loss_seconds, "generation": time.monotonic() - started - loss_seconds}
    return EvalResult(metrics=metrics, predictions=predictions, seconds=seconds)


def first_batches(batches: list[list[Prompt]], rows: int | None) -> list[list[Prompt]]:
    """Whole batches up to so many rows, at least one; all without a limit."""
    if rows is None:
        return batches
    kept: list[list[Prompt]] = []
    for batch in batches:
        if kept and sum(map(len, kept)) + len(batch) > rows:
            break
        kept.append(batch)
    return kept


def row_sums(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: [negative log likelihood, answer tokens, tokens that were likeliest], and the row's source.

    Logits are never held whole: trl's fused head hands out the figures of each token.
    """
    sources = batch.pop(SOURCE)
    found = model(**batch, use_cache=False, fused_lm_head=True)
    sums = [-found.log_probs.double().sum(1), found.label_mask.double().sum(1), found.is_top1.double().sum(1)]
    return torch.stack(sums, dim=1).cpu(), sources.cpu()


def with_fused_head(model: Any) -> None:
    """Give the model trl's fused head where it has none yet."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not getattr(base, "_has_fused_head", False):
        add_fused_lm_head(base, outputs=FUSED)
        base._has_fused_head = True


def loss_batches(rows: Any, batch: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of rows in order, filled on the right."""
    for start in range(0, len(rows), batch):
        some = rows[start : start + batch]
        ids, labels = ([torch.tensor(one) for one in some[name]] for name in ("input_ids", "labels"))
        yield {
            "input_ids": pad_sequence(ids, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
            SOURCE: torch.tensor(some.get(SOURCE) or [0] * len(ids)),
        }


def to_device(batch: dict[str, torch.Tensor], device: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}
