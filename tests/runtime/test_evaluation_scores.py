"""Scores, prompts and the choice of the best, without a run."""

from __future__ import annotations

import random

import pytest
import torch
from datasets import Dataset
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer
from transformers import AutoTokenizer, TrainerState, TrainingArguments

from sft_play.runtime.answers import Answered, Generation, Prompt, last_turn, prompts_of, until_end
from sft_play.runtime.eval_budget import BudgetCallback, Watch, choose_by_loss
from sft_play.runtime.fallback import waited
from sft_play.runtime.scores import ROUGE, answer_metrics, is_answer_metric, score_answers
from sft_play.runtime.tally import Tally, token_figures
from sft_play.runtime.words import UnicodeWords, unseen_note

WORDS = ["the", "a", "cat", "dog", "sat", "under", "mat", "Running", "runs", "quickly,", "42", "don't", "über", "猫"]


def answered(row: int, given: str, wanted: str, source: int = 0) -> Answered:
    prompt = Prompt(row, source, (1, 2), wanted, len(wanted.split()))
    return Answered(prompt, "question", given, len(given.split()), True)


def pairs(count: int) -> list[tuple[str, str]]:
    draw = random.Random(0)
    return [tuple(" ".join(draw.choices(WORDS, k=draw.randint(0, 12))) for _ in range(2)) for _ in range(count)]


def test_rouge_is_rouge_scores_own_on_200_pairs() -> None:
    some = pairs(200)
    scored = list(score_answers([answered(row, *pair) for row, pair in enumerate(some)]))
    scorer = RougeScorer(list(ROUGE), use_stemmer=False)
    own = [scorer.score(wanted, given) for given, wanted in some]
    for name in ROUGE:
        assert [one[name] for one in scored] == [one[name].fmeasure for one in own]
        mean = sum(one[name].fmeasure for one in own) / len(own)
        assert answer_metrics(scored, ())[f"eval_{name}"] == pytest.approx(mean, rel=1e-12)


def test_words_of_every_script_are_rouge_scores_own_in_ascii() -> None:
    draw, characters = random.Random(1), [chr(code) for code in range(128)]
    for _ in range(500):
        text = "".join(draw.choices(characters, k=draw.randint(0, 60)))
        assert UnicodeWords().tokenize(text) == DefaultTokenizer().tokenize(text), text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Über Straßen, öl", ["über", "straßen", "öl"]),
        ("Шла Маша.", ["шла", "маша"]),
        ("使用Python③。", ["使", "用", "python3"]),
        ("プロと", ["プ", "ロ", "と"]),
        ("한국어 말", ["한국어", "말"]),
        ("हिन्दी ॥", ["हिन्दी"]),
        ("ที่", ["ที่"]),
        ("العربية!", ["العربية"]),
        ("(...)", []),
    ],
)  # fmt: skip
def test_words_of_other_scripts(text: str, words: list[str]) -> None:
    assert UnicodeWords().tokenize(text) == words


def test_answers_in_another_script_are_scored_where_asked_for_and_told_of_where_not() -> None:
    wanted = "да, кот спит"
    one = answered(0, "кот спит", wanted)
    (own,), (every,) = score_answers([one]), score_answers([one], "unicode")
    assert (own["rouge1"], every["rouge1"], every["rougeL"]) == (0, 0.8, 0.8)
    references = [wanted, "the cat sleeps", "Größe über alles", "", "!", wanted + " abc"]
    assert "of 2 of 6 references" in unseen_note(references, "rouge_score")
    assert unseen_note(references, "unicode") == unseen_note(references[1:5], "rouge_score") == ""


def test_an_empty_prediction_counts_as_zero() -> None:
    scored = list(score_answers([answered(0, "a cat sat", "a cat sat"), answered(1, "", "a cat sat")]))
    metrics = answer_metrics(scored, ())
    assert metrics["eval_rougeL"] == metrics["eval_rouge1"] == metrics["eval_exact_match"] == 0.5
    assert metrics["eval_generated_rows"] == 2


def test_figures_of_each_source_where_several_have_rows() -> None:
    scored = list(score_answers([answered(0, "cat", "cat"), answered(1, "cat", "dog", source=1)]))
    metrics = answer_metrics(scored, ("0-one", "1-two"))
    assert (metrics["eval_rougeL/0-one"], metrics["eval_rougeL/1-two"], metrics["eval_rougeL"]) == (1, 0, 0.5)
    tally = Tally()
    tally.add(torch.tensor([[2.0, 4, 1], [6.0, 2, 2], [1.0, 1, 0]], dtype=torch.float64), torch.tensor([0, 1, 0]))
    figures = token_figures(tally.totals(), ("0-one", "1-two"))
    assert figures["eval_loss"] == pytest.approx(9 / 7)
    assert figures["eval_loss/0-one"] == pytest.approx(3 / 5)
    assert figures["eval_token_accuracy/1-two"] == 1
    assert not [name for name in token_figures({0: [1.0, 1.0, 0.0]}, ()) if "/" in name]


def test_the_prompt_ends_where_the_last_learned_turn_begins() -> None:
    assert last_turn([-100, -100, 5, 6, -100, 7, 8, -100]) == (5, 7)
    assert last_turn([5, 6, 7]) is None  # a text
    assert last_turn([-100, 6, 7]) is None  # a text behind its first token
    assert last_turn([-100, -100]) is None
    assert until_end([4, 5, 2, 9], (2, 3)) == ([4, 5], True)
    assert until_end([4, 5], (2, 3)) == ([4, 5], False)


def test_batches_of_prompts_depend_on_rows_batch_and_seed_alone(tiny_model: object) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = Dataset.from_list(
        [
            {"input_ids": [5] * (2 + number % 7) + [6, 7], "labels": [-100] * (2 + number % 7) + [6, 7]}
            for number in range(23)
        ]
    )
    generation = Generation(end_ids=(2,), pad_id=2)
    batches = prompts_of(rows, tokenizer, generation, 4)
    assert batches == prompts_of(rows, tokenizer, generation, 4)
    assert sorted(prompt.row for batch in batches for prompt in batch) == list(range(23))
    lengths = [[len(prompt.ids) for prompt in batch] for batch in batches]
    assert max(max(some) - min(some) for some in lengths) <= 2
    assert lengths != sorted(lengths)
    assert all(6 not in prompt.ids for batch in batches for prompt in batch)


def test_the_budget_stops_before_a_round_that_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    budget = BudgetCallback(0.1)
    budget.training = 100.0
    watch, rounds = Watch(budget), 0
    while watch.go_on(rounds):
        now[0] += 3.0
        rounds += 1
    assert (rounds, watch.stop(), budget.generating) == (3, 9.0, 9.0)
    assert not Watch(budget).go_on(0)  # one second is left
    budget.budget = 0.0
    assert Watch(budget).go_on(0)
    assert Watch(BudgetCallback(0.1)).go_on(0)  # nothing was measured yet: one round may be tried


def test_the_rows_of_an_evaluation_only_fall_and_come_back_from_a_checkpoint() -> None:
    budget = BudgetCallback(0.1)
    for batches, step in ((1, 0), (8, 2), (9, 4), (0, 6), (5, 8)):
        budget.fix(batches, step)
        assert budget.batches == (None if step == 0 else 5 if step == 8 else 8)
    again = BudgetCallback.from_state(budget.state())
    assert again.state() == budget.state()


def test_after_a_fallback_eval_loss_chooses_and_patience_is_counted_anew(tmp_path: object) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), metric_for_best_model="rougeL", use_cpu=True, report_to="none")
    assert args.greater_is_better
    budget = BudgetCallback(0.1)
    budget.fallback_step = 2
    budget.on_train_begin(args, TrainerState(), None)  # type: ignore[arg-type]
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_loss", False)
    assert not choose_by_loss(args)
    assert is_answer_metric("eval_rougeL/0-chat")
    assert not is_answer_metric("eval_token_accuracy")
    assert [waited([3.0, 2.0, 2.5, 2.4], 0.0), waited([3.0, 2.99], 0.1), waited([], 0.0)] == [2, 1, 0]
