"""`infer` on a finished tiny run and on plain model folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import Workplace, make_workplace


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Workplace:
    """A model that has learned one answer by heart."""
    workplace = make_workplace(tmp_path_factory.mktemp("infer"), tiny_model)
    chat = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "Hello world."}]
    (workplace.path / "train.jsonl").write_text("\n".join([json.dumps({"messages": chat})] * 32))
    workplace.config["tuning"] = {"mode": "full"}
    workplace.write(train={**workplace.config["train"], "max_steps": 150, "save_strategy": "no"})
    done = workplace.train()
    assert done.code == 0, done.err
    return workplace


def test_one_prompt_gets_the_learned_answer_and_stops(trained: Workplace) -> None:
    done = trained.run("infer", "--prompt", "Say it.", RUN="runs/tiny")
    assert (done.code, done.out) == (0, "Hello world.\n"), done.err


def test_a_file_of_prompts_in_both_forms(trained: Workplace) -> None:
    chat = {"messages": [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "ignored"}]}
    lines = ["Say it.", json.dumps({"prompt": "Say it."}), json.dumps(chat)]
    (trained.path / "prompts.txt").write_text("\n".join(lines))
    done = trained.run("infer", "--file", "prompts.txt", "--json", RUN="runs/tiny")
    assert done.code == 0, done.err
    assert [json.loads(line)["answer"] for line in done.out.splitlines()] == ["Hello world."] * 3


def test_a_chat_through_a_pipe(trained: Workplace) -> None:
    done = trained.run("infer", stdin="Say it.\n\n/new\nSay it.\n/quit\nnever read\n", RUN="runs/tiny")
    assert (done.code, done.out) == (0, "Hello world.\nHello world.\n"), done.err


def test_the_result_is_a_model_folder_for_itself(trained: Workplace) -> None:
    done = trained.run("infer", MODEL="runs/tiny/model", ARGS='--prompt "Say it."')
    assert done.code == 0, done.err
    assert done.out


def test_a_whole_model_has_no_before_to_compare_with(trained: Workplace) -> None:
    done = trained.run("infer", "--prompt", "Say it.", "--compare", RUN="runs/tiny")
    assert done.code == 2
    assert "whole model" in done.error_lines[0]


def test_an_adapter_over_its_base_and_beside_it(workplace: Workplace) -> None:
    assert workplace.train(TRAIN_MAX_STEPS="30", TRAIN_LEARNING_RATE="0.05").code == 0
    words = ("infer", "--prompt", "What comes after 3?", "--max-new-tokens", "8", "--compare", "--json")
    from_run = workplace.run(*words, RUN="runs/tiny")
    assert from_run.code == 0, from_run.err
    beside = workplace.run(*words, MODEL=str(workplace.model), ADAPTER="runs/tiny/adapter")
    assert beside.code == 0, beside.err
    assert json.loads(beside.out) == json.loads(from_run.out)
    answers = json.loads(from_run.out)
    assert answers["base"] != answers["answer"]


@pytest.mark.parametrize(
    ("words", "variables", "code", "said"),
    [
        ([], {}, 2, "name either RUN or MODEL"),
        ([], {"RUN": "runs/tiny", "MODEL": "x"}, 2, "name either RUN or MODEL"),
        ([], {"RUN": "runs/none"}, 2, "there is no run.json"),
        ([], {"MODEL": "./none"}, 2, "no folder ./none"),
        (["--prompt", " "], {"RUN": "runs/tiny"}, 2, "the prompt is empty"),
        (["--file", "none.txt"], {"RUN": "runs/tiny"}, 2, "none.txt"),
        (["--promt", "x"], {"RUN": "runs/tiny"}, 2, "unrecognized arguments"),
        (["--max-new-tokens", "0"], {"RUN": "runs/tiny"}, 2, "no whole number from 1 on"),
    ],
)
def test_mistakes_are_one_line(
    trained: Workplace, words: list[str], variables: dict[str, str], code: int, said: str
) -> None:
    done = trained.run("infer", *words, **variables)
    assert done.code == code
    assert len(done.error_lines) == 1
    assert said in done.error_lines[0]
    assert "Traceback" not in done.err
