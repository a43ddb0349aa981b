"""`make eval` on a finished tiny run, on plain folders, and on tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sft_play.cli import evaluate, lm_eval
from sft_play.errors import SftPlayError, UsageError, exit_code_of
from tests.tiny import Workplace, make_rows, make_workplace

ANSWERS = {"eval_rouge1", "eval_rougeL", "eval_exact_match", "eval_answer_tokens", "eval_ended", "eval_generated_rows"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Workplace:
    """An adapter of four steps, evaluated at its end, with test rows held back."""
    workplace = make_workplace(tmp_path_factory.mktemp("eval"), tiny_model)
    make_rows(workplace.path / "test.jsonl", 5, first=300)
    workplace.write(data={"test": "test.jsonl"}, train={"save_strategy": "no"})
    done = workplace.train()
    assert done.code == 0, done.err
    return workplace


@pytest.fixture
def run(trained: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process and gives its JSON."""
    monkeypatch.chdir(trained.path)

    def call(*words: str, **variables: str) -> dict[str, Any]:
        assert evaluate.main([*words, "--json"], trained.environ(**variables)) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return call


def test_the_loss_is_that_of_training(trained: Workplace, run: Any) -> None:
    found = run(RUN="runs/tiny")
    assert (found["split"], found["rows"]) == ("validation", 6)
    figures = found["figures"]["tuned"]
    assert figures["eval_loss"] == pytest.approx(trained.record()["eval_loss"], abs=1e-6)
    assert set(figures) == {"eval_loss", "eval_perplexity", "eval_token_accuracy"}
    assert json.loads((trained.path / "runs/tiny/eval/validation.json").read_text()) == found


def test_the_loss_is_that_of_plain_transformers(trained: Workplace, run: Any) -> None:
    import torch
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from sft_play.runtime.job import read_job

    job = read_job(trained.path / "runs/tiny/run.json")
    plain = AutoModelForCausalLM.from_pretrained(trained.model, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, str(trained.path / "runs/tiny/adapter")).eval()
    total, tokens = 0.0, 0
    for row in Dataset.from_file(str(job.splits["validation"])):
        ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum"))
        tokens += int((labels[0, 1:] != -100).sum())
    assert run(RUN="runs/tiny")["figures"]["tuned"]["eval_loss"] == pytest.approx(total / tokens, abs=1e-5)


def test_other_splits_and_other_rows(trained: Workplace, run: Any) -> None:
    held = run(RUN="runs/tiny", SPLIT="test")
    assert (held["split"], held["rows"]) == ("test", 5)
    assert run(RUN="runs/tiny", SPLIT="train")["rows"] == 32
    same = run(RUN="runs/tiny", DATA="test.jsonl")
    assert same["rows"] == 5
    assert same["figures"]["tuned"]["eval_loss"] == pytest.approx(held["figures"]["tuned"]["eval_loss"], abs=1e-6)
    folders = run(MODEL=str(trained.model), ADAPTER="runs/tiny/adapter", DATA="test.jsonl")
    assert folders["figures"]["tuned"] == pytest.approx(same["figures"]["tuned"], rel=1e-6)
    assert run("--max-rows", "2", RUN="runs/tiny")["rows"] == 2


def test_answers_that_rouge_cannot_see_are_told_of(trained: Workplace, run: Any) -> None:
    row = {"prompt": "你好", "completion": "你好。"}
    (trained.path / "chinese.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    words = ("--generate", "--max-new-tokens", "2")
    given = {"RUN": "runs/tiny", "DATA": "chinese.jsonl"}
    note = "ROUGE counts a-z and 0-9 only: less than half of the letters of 2 of 2 references"
    assert run(*words, **given)["note"] == note
    assert "note" not in run(*words, "--rouge-tokenizer", "unicode", **given)


def test_packed_rows_are_evaluated_one_by_one(trained: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset

    from sft_play.cli.eval_rows import rows_of_run
    from sft_play.runtime.job import read_job

    monkeypatch.chdir(trained.path)
    job = read_job(Path("runs/tiny/run.json"))
    data = job.config.data.model_copy(update={"packing": True})
    packed = replace(job, config=job.config.model_copy(update={"data": data}))
    rows = Dataset.from_file(str(rows_of_run(packed, "train", lambda text: None).file))
    assert len(rows) == 32
    assert "lengths" not in rows.column_names


def test_the_base_stands_beside_the_tuned(trained: Workplace, run: Any) -> None:
    both = run("--compare", "--generate", "--max-new-tokens", "4", RUN="runs/tiny")["figures"]
    assert list(both) == ["base", "tuned"]
    assert both["tuned"]["eval_loss"] < both["base"]["eval_loss"]
    assert set(both["base"]) > ANSWERS
    alone = run(MODEL=str(trained.model), DATA="validation.jsonl")["figures"]["model"]
    assert alone["eval_loss"] == pytest.approx(both["base"]["eval_loss"], abs=1e-6)
    for name in ("validation.jsonl", "validation-base.jsonl"):
        lines = (trained.path / "runs/tiny/eval" / name).read_text().splitlines()
        assert sorted(json.loads(line)["row"] for line in lines) == list(range(6))


def test_columns_for_people(trained: Workplace) -> None:
    done = trained.run("eval", "--compare", RUN="runs/tiny")
    assert done.code == 0, done.err
    head, columns, first = done.out.splitlines()[:3]
    assert head == "runs/tiny: validation, 6 rows"
    assert columns.split() == ["base", "tuned", "change"]
    assert first.split()[0] == "eval_loss"
    assert float(first.split()[3]) < 0
    assert done.err == ""


def test_a_whole_model_beside_what_it_was(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workplace.config["tuning"] = {"mode": "full"}
    workplace.write(train={"save_strategy": "no"})
    done = workplace.train()
    assert done.code == 0, done.err
    monkeypatch.chdir(workplace.path)
    assert evaluate.main(["--compare", "--json"], workplace.environ(RUN="runs/tiny")) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert list(figures) == ["base", "tuned"]
    assert figures["tuned"]["eval_loss"] == pytest.approx(workplace.record()["eval_loss"], abs=1e-6)
    assert figures["tuned"]["eval_loss"] < figures["base"]["eval_loss"]


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        ([], {}, "name either RUN or MODEL"),
        ([], {"RUN": "runs/tiny", "MODEL": "x"}, "name either RUN or MODEL"),
        ([], {"RUN": "runs/none"}, "there is no run.json"),
        ([], {"RUN": "runs/tiny", "SPLIT": "dev"}, "no split 'dev'"),
        ([], {"RUN": "runs/tiny", "ADAPTER": "x"}, "ADAPTER goes with MODEL"),
        ([], {"RUN": "runs/tiny", "SPLIT": "test", "DATA": "test.jsonl"}, "DATA and SPLIT exclude each other"),
        ([], {"RUN": "runs/tiny", "DATA": "none.jsonl"}, "none.jsonl"),
        ([], {"MODEL": "./none", "DATA": "test.jsonl"}, "no folder ./none"),
        ([], {"MODEL": "model"}, "MODEL needs DATA or TASKS"),
        ([], {"MODEL": "model", "DATA": "test.jsonl", "SPLIT": "test"}, "exclude each other"),
        ([], {"MODEL": "model", "ADAPTER": "runs", "DATA": "test.jsonl"}, "runs"),
        (["--compare"], {"MODEL": "model", "DATA": "test.jsonl"}, "--compare needs what the model was before"),
        (["--max-rows", "0"], {"RUN": "runs/tiny"}, "no whole number from 1 on"),
        (["--generate", "--loss-only"], {"RUN": "runs/tiny"}, "not allowed with"),
        (["--num-beams", "2"], {"RUN": "runs/tiny"}, "--num-beams is about answers, and this evaluation gives none"),
        (["--loss-only", "--rouge-tokenizer", "unicode"], {"RUN": "runs/tiny"}, "--rouge-tokenizer is about answers"),
    ],
)
def test_mistakes_are_one_line(
    trained: Workplace,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    variables: dict[str, str],
    said: str,
) -> None:
    monkeypatch.chdir(trained.path)
    if variables.get("MODEL") == "model":
        variables = {**variables, "MODEL": str(trained.model)}
    with pytest.raises(SftPlayError) as caught:
        evaluate.main(words, trained.environ(**variables))
    (line,) = caught.value.lines()
    assert said in line
    assert exit_code_of(caught.value) == 2


def test_a_run_without_held_out_rows(trained: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    from sft_play.cli.eval_rows import rows_of_run
    from sft_play.runtime.job import read_job

    monkeypatch.chdir(trained.path)
    job = read_job(Path("runs/tiny/run.json"))
    job = replace(job, splits={"train": job.splits["train"]})
    with pytest.raises(SftPlayError, match="held no rows back"):
        rows_of_run(job, None, print)
    with pytest.raises(SftPlayError, match="no prepared test rows"):
        rows_of_run(job, "test", print)


def test_tasks_need_their_package(trained: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained.path)
    monkeypatch.setattr(lm_eval, "find_spec", lambda name: None)
    with pytest.raises(SftPlayError) as caught:
        evaluate.main([], trained.environ(RUN="runs/tiny", TASKS="hellaswag"))
    assert exit_code_of(caught.value) == 4
    assert "constraints-eval.txt" in caught.value.line()


TASK = """\
task: after
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    questions = [{"question": f"What comes after {n}?", "choices": [str(n + 1), "cat"], "answer": 0} for n in range(3)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, questions)) + "\n")
    (folder / "after.yaml").write_text(TASK.format(rows=folder / "rows.jsonl"))
    return folder


def test_tasks_by_name_file_and_folder(task: Path) -> None:
    assert lm_eval.split_tasks(f"hellaswag, {task},{task / 'after.yaml'}") == (
        ["hellaswag", "after", "after"],
        [task, task],
    )
    for wrong, said in ((str(task / "none.yaml"), "cannot be read"), (" , ", "no task"), (str(task / ".."), "no task")):
        with pytest.raises(UsageError, match=said):
            lm_eval.split_tasks(wrong)


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval, the extra `eval`, is not installed")
def test_a_local_task_runs_offline(run: Any, task: Path) -> None:
    figures = run("--compare", RUN="runs/tiny", TASKS=str(task))["figures"]
    assert list(figures) == ["base", "tuned"]
    assert 0 <= figures["tuned"]["after/acc"] <= 1
