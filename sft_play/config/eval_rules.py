"""Rules of evaluation: when, on what, by which figure the best checkpoint is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from sft_play.config.findings import Finding, Rule, ignored, needs
from sft_play.config.keys import KEYS
from sft_play.config.origin import Resolved

LOSS_METRICS = ("loss", "perplexity", "token_accuracy")
"""Figures of every evaluation; logged as `eval_loss` and so on."""
GENERATED_METRICS = (
    "rouge1", "rouge2", "rougeL", "exact_match", "answer_tokens", "reference_tokens", "ended", "generated_rows",
)  # fmt: skip
"""Figures of generated answers."""

_EVALUATE = "set data.validation or data.split.validation, and train.eval_strategy other than no"


def plain_metric(name: str) -> str:
    """A figure's name without `eval_` and without a source: `rougeL` for `eval_rougeL/0-chat`."""
    return name.removeprefix("eval_").partition("/")[0]


def has_validation(resolved: Resolved) -> bool:
    """Whether there are rows to evaluate on."""
    data = resolved.config.data
    return bool(data.validation) or data.split.validation > 0


def evaluates(resolved: Resolved) -> bool:
    """Whether the run evaluates while it trains."""
    return resolved.config.train.eval_strategy != "no" and has_validation(resolved)


def evaluation_has_rows(resolved: Resolved) -> Iterator[Finding]:
    train = resolved.config.train
    if train.eval_strategy in ("steps", "epoch") and not has_validation(resolved):
        fix = "set data.validation, or data.split.validation: 0.05"
        yield needs(resolved, "train.eval_strategy", "validation rows", "data.validation", fix=fix)
    if train.eval_on_start and not evaluates(resolved):
        yield needs(
            resolved, "train.eval_on_start", "evaluation", "train.eval_strategy", "data.validation", fix=_EVALUATE
        )


def evaluation_steps(resolved: Resolved) -> Iterator[Finding]:
    train = resolved.config.train
    if train.eval_strategy == "steps" and train.eval_steps is None:
        fix = "set train.eval_steps: 100"
        yield needs(resolved, "train.eval_strategy", "train.eval_steps", "train.eval_steps", fix=fix)
    if train.eval_strategy != "steps":
        yield from ignored(
            resolved, ["train.eval_steps"], by="train.eval_strategy", fix="set train.eval_strategy: steps or remove it"
        )


def evaluation_settings_used(resolved: Resolved) -> Iterator[Finding]:
    if resolved.config.train.eval_strategy == "no":
        keys = ["eval_max_rows", "eval_accumulation_steps", "eval_time_budget", "predict_with_generate"]
        keys = [f"train.{key}" for key in keys]
        yield from ignored(resolved, keys, by="train.eval_strategy", fix="set train.eval_strategy: epoch or remove it")
    elif resolved.config.train.predict_with_generate and not has_validation(resolved):
        yield needs(resolved, "train.predict_with_generate", "validation rows", "data.validation", fix=_EVALUATE)


def generation_settings_used(resolved: Resolved) -> Iterator[Finding]:
    train = resolved.config.train
    if not train.predict_with_generate:
        keys = ["train.eval_rouge_tokenizer", *(key for key in KEYS if key.startswith("train.generation_"))]
        fix = "set train.predict_with_generate: true or remove it"
        yield from ignored(resolved, keys, by="train.predict_with_generate", fix=fix)
    elif not train.generation_do_sample:
        keys = ["train.generation_temperature", "train.generation_top_p"]
        fix = "set train.generation_do_sample: true or remove it"
        yield from ignored(resolved, keys, by="train.generation_do_sample", fix=fix)


def best_model(resolved: Resolved) -> Iterator[Finding]:
    train = resolved.config.train
    for key in ("train.load_best_model_at_end", "train.metric_for_best_model"):
        if resolved.value(key) and not evaluates(resolved):
            yield needs(resolved, key, "evaluation", "train.eval_strategy", "data.validation", fix=_EVALUATE)
    if train.metric_for_best_model is None:
        fix = "set train.metric_for_best_model or remove it"
        yield from ignored(resolved, ["train.greater_is_better"], by="train.metric_for_best_model", fix=fix)


def best_model_is_saved(resolved: Resolved) -> Iterator[Finding]:
    """The best evaluation can only be gone back to where a checkpoint was written at that step."""
    train = resolved.config.train
    if not train.load_best_model_at_end or not evaluates(resolved):
        return
    evaluated = "epoch" if train.eval_strategy == "auto" else train.eval_strategy
    fits = train.save_strategy == evaluated and not (
        evaluated == "steps" and train.eval_steps and train.save_steps % train.eval_steps
    )
    if not fits:
        every = {"epoch": "epoch", "steps": f"{train.eval_steps} steps"}[evaluated]
        saved = {"no": "never", "epoch": "every epoch", "steps": f"every {train.save_steps} steps"}[train.save_strategy]
        what = f"train.load_best_model_at_end evaluates every {every} and saves {saved}, so the best may not be saved"
        fix = "set train.save_strategy: epoch" if evaluated == "epoch" else "set train.save_steps to that of eval_steps"
        keys = ("train.load_best_model_at_end", "train.save_strategy", "train.save_steps", "train.eval_steps")
        yield Finding(keys=keys, what=what, fix=f"{fix}{'' if evaluated == 'epoch' else ', save_strategy: steps'}")


def early_stopping(resolved: Resolved) -> Iterator[Finding]:
    train, key = resolved.config.train, "train.early_stopping_patience"
    if train.early_stopping_patience is None:
        fix = "set train.early_stopping_patience or remove it"
        yield from ignored(resolved, ["train.early_stopping_threshold"], by=key, fix=fix)
        return
    if train.metric_for_best_model is None:
        fix = "set train.metric_for_best_model: eval_loss"
        yield needs(resolved, key, "a metric", "train.metric_for_best_model", fix=fix)
    if not evaluates(resolved):
        yield needs(resolved, key, "evaluation", "train.eval_strategy", "data.validation", fix=_EVALUATE)


def known_metric(resolved: Resolved) -> Iterator[Finding]:
    """A figure that no evaluation of this run can have would only be missed after the first one."""
    key, name = "train.metric_for_best_model", resolved.config.train.metric_for_best_model
    if name is None:
        return
    known = (*LOSS_METRICS, *GENERATED_METRICS)
    if plain_metric(name) not in known:
        near = get_close_matches(plain_metric(name), known, 1)
        fix = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        yield Finding(keys=(key,), what=f"no evaluation gives {name!r}", fix=fix)
    elif plain_metric(name) in GENERATED_METRICS and not resolved.config.train.predict_with_generate:
        fix = "set train.predict_with_generate: true, or use eval_loss"
        yield needs(resolved, key, "generated answers", "train.predict_with_generate", fix=fix)


EVAL_RULES: tuple[Rule, ...] = (
    evaluation_has_rows, evaluation_steps, evaluation_settings_used, generation_settings_used, best_model,
    best_model_is_saved, early_stopping, known_metric,
)  # fmt: skip
