"""Scores of generated answers: ROUGE by rouge-score's own figures, exact match and lengths. All offline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from sft_play.runtime.answers import Answered
from sft_play.runtime.tally import name_of
from sft_play.runtime.words import UnicodeWords

ROUGE = ("rouge1", "rouge2", "rougeL")
MEANS = (*ROUGE, "exact_match", "answer_tokens", "reference_tokens", "ended")
"""Scores of a row whose means are metrics. All but the token counts lie between 0 and 1."""


@cache
def rouge_metric(tokenizer: str = "rouge_score") -> Any:
    """An `evaluate.Metric` whose code is here: F-measures of rouge-score, without stemming, one a row.

    Args:
        tokenizer: `rouge_score` for its own words, `unicode` for those of every script.
    """
    import datasets
    import evaluate
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE), use_stemmer=False, tokenizer=UnicodeWords() if tokenizer == "unicode" else None)

    class Rouge(evaluate.Metric):
        """A row without a word in it, predicted or wanted, scores zero and is counted."""

        def _info(self) -> Any:
            texts = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
            return evaluate.MetricInfo(description="ROUGE", citation="", inputs_description="texts", features=texts)

        def _compute(self, *, predictions: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
            found = [scorer.score(wanted, given) for given, wanted in zip(predictions, references, strict=True)]
            return {name: [float(one[name].fmeasure) for one in found] for name in ROUGE}

    return Rouge(keep_in_memory=True)


def score_answers(answered: Sequence[Answered], tokenizer: str = "rouge_score") -> Iterator[dict[str, Any]]:
    """One line of the predictions file for each answer: row, source, texts and scores.

    Args:
        tokenizer: as `rouge_metric`.
    """
    if not answered:
        return
    rouge = rouge_metric(tokenizer).compute(
        predictions=[one.text for one in answered], references=[one.prompt.reference for one in answered]
    )
    for number, one in enumerate(answered):
        yield {
            "row": one.prompt.row,
            "source": one.prompt.source,
            "prompt": one.prompt_text,
            "reference": one.prompt.reference,
            "prediction": one.text,
            **{name: rouge[name][number] for name in ROUGE},
            "exact_match": float(one.text == one.prompt.reference),
            "answer_tokens": one.tokens,
            "reference_tokens": one.prompt.reference_tokens,
            "ended": float(one.ended),
        }


def answer_metrics(scored: Sequence[Mapping[str, Any]], names: Sequence[str], prefix: str = "eval") -> dict[str, float]:
    """The means of all scored rows and of each source where several have rows; nothing without rows."""
    if not scored:
        return {}
    metrics = _means(scored, prefix, "")
    by_source: dict[int, list[Mapping[str, Any]]] = {}
    for one in scored:
        by_source.setdefault(one["source"], []).append(one)
    if len(by_source) > 1:
        for source, rows in sorted(by_source.items()):
            metrics |= _means(rows, prefix, f"/{name_of(names, source)}")
    return metrics


def _means(scored: Sequence[Mapping[str, Any]], prefix: str, suffix: str) -> dict[str, float]:
    means = {f"{prefix}_{name}{suffix}": sum(one[name] for one in scored) / len(scored) for name in MEANS}
    return {**means, f"{prefix}_generated_rows{suffix}": float(len(scored))}


def is_answer_metric(name: str) -> bool:
    """Whether a metric, with or without `eval_` and a source, exists only where answers are generated."""
    bare = name.removeprefix("eval_").partition("/")[0]
    return bare in MEANS or bare == "generated_rows"
