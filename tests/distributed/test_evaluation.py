"""Generated answers do not depend on how a run lies over ranks, and generation that fails on a rank fails on none."""

from __future__ import annotations

import pytest

from tests.distributed.runs import CASES, SINGLE, Case, Outcome, run_case
from tests.runtime.evaluated import ANSWER, GENERATE, broken_generation, evaluations, fixed_rows, predictions
from tests.tiny import Done, Workplace

STEPS = 40
# The time taken and what is derived from it.
TIMES = ("time", "event", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def run_fixed(workplace: Workplace, case: Case, rows: int, name: str, **variables: str) -> Done:
    """Train a model to give one answer, evaluated half learned and learned."""
    fixed_rows(workplace.path / "train.jsonl", 32)
    fixed_rows(workplace.path / "validation.jsonl", rows, first=100)
    workplace.config["train"] = {**GENERATE, "eval_steps": STEPS // 2, "scheduler": "constant"}
    settings = {"TRAIN_MAX_STEPS": str(STEPS), "TRAIN_LEARNING_RATE": "0.01", "TRAIN_EVAL_STRATEGY": "steps"}
    return run_case(workplace, "full", case, name, **settings, **variables)


def answers_of(workplace: Workplace, case: Case, rows: int) -> tuple[list, list]:
    name = f"{case.name}-{rows}"
    done = run_fixed(workplace, case, rows, name)
    assert done.code == 0, done.out[-2000:] + done.err
    run = workplace.path / "runs" / name
    figures = [{key: value for key, value in one.items() if key not in TIMES} for one in evaluations(run)]
    return [predictions(run, step) for step in (STEPS // 2, STEPS)], figures


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_model) -> dict[int, tuple[list, list]]:
    """Predictions and figures of one rank, by the number of rows."""
    from tests.tiny import make_workplace

    workplace = make_workplace(tmp_path_factory.mktemp("alone"), tiny_model)
    return {rows: answers_of(workplace, SINGLE, rows) for rows in (7, 8)}


def test_a_model_that_learned_one_answer_scores_one(alone: dict[int, tuple[list, list]]) -> None:
    for rows in (7, 8):
        (_, learned), figures = alone[rows]
        assert [one["row"] for one in learned] == list(range(rows))
        assert {one["prediction"] for one in learned} == {ANSWER}
        assert figures[-1]["eval_rougeL"] == figures[-1]["eval_exact_match"] == figures[-1]["eval_ended"] == 1.0
        assert figures[-1]["eval_generated_rows"] == rows
        assert figures[-1]["eval_token_accuracy"] == 1.0
        for one in learned:
            assert "What comes after" in one["prompt"]
            assert ANSWER not in one["prompt"]
            assert "What" not in one["prediction"]


@pytest.mark.parametrize(
    ("name", "rows"),
    [("ddp", 7), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("fsdp", 8), ("zero2", 7), ("zero3", 7)))],
)
def test_two_ranks_give_the_answers_and_scores_of_one(
    workplace: Workplace, alone: dict[int, tuple[list, list]], name: str, rows: int
) -> None:
    made, figures = answers_of(workplace, CASES[name], rows)
    wanted, own = alone[rows]
    assert made == wanted
    for ours, theirs in zip(figures, own, strict=True):
        assert set(ours) == set(theirs)
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_rank_that_runs_out_of_memory_in_generation_ends_generation_alone(workplace: Workplace) -> None:
    code = 'if rank == 1 and len(calls) == 3: raise __import__("torch").OutOfMemoryError("CUDA out of memory")'
    broken = broken_generation(workplace, code)
    chosen = {"TRAIN_METRIC_FOR_BEST_MODEL": "rougeL", "TRAIN_LOAD_BEST_MODEL_AT_END": "true"}
    saved = {"TRAIN_SAVE_STRATEGY": "steps", "TRAIN_SAVE_STEPS": str(STEPS // 2), "TRAIN_SAVE_TOTAL_LIMIT": "4"}
    done = run_fixed(workplace, CASES["ddp"], 7, "oom", **broken, **chosen, **saved)
    assert done.code == 0, done.out[-2000:] + done.err
    assert "generation ran out of memory at step 40: evaluation measures losses only from here on" in done.out
    outcome = Outcome(workplace.path / "runs/oom")
    kept = outcome.record["evaluation"]
    assert (kept["mode"], kept["fallback_step"], kept["reason"]) == ("loss", 40, "generation ran out of memory")
    (told,) = [one for one in outcome.events("event") if one["kind"] == "fallback"]
    assert told["step"] == 40
    assert told["text"].startswith("generation ran out of memory at step 40")
    first, last = evaluations(outcome.path)
    assert "eval_rougeL" in first
    assert "eval_rougeL" not in last
    assert outcome.record["best_step"] == (40 if last["eval_loss"] < first["eval_loss"] else 20)


@pytest.mark.slow
def test_where_ranks_hold_parts_of_the_model_the_run_starts_again_without_answers(workplace: Workplace) -> None:
    code = 'if rank == 1 and len(calls) == 3: raise __import__("torch").OutOfMemoryError("CUDA out of memory")'
    broken = broken_generation(workplace, code)
    saving = {
        "TRAIN_SAVE_STRATEGY": "steps",
        "TRAIN_SAVE_STEPS": str(STEPS // 2),
        "TRAIN_METRIC_FOR_BEST_MODEL": "rougeL",
    }
    done = run_fixed(workplace, CASES["fsdp"], 7, "oom", **broken, **saving)
    assert done.code == 0, done.out[-2000:] + done.err
    assert "generation ran out of memory; going on from the last checkpoint" in done.out
    assert "the best checkpoint is chosen by eval_loss instead of rougeL" in done.out
    outcome = Outcome(workplace.path / "runs/oom")
    assert outcome.record["evaluation"]["mode"] == "loss"
    assert outcome.record["evaluation"]["reason"] == "generation ran out of memory"
    assert "eval_rougeL" not in evaluations(outcome.path)[-1]
