"""`make smoke` with the real program: a healthy config passes, and what cannot learn is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_play.cli.smoke import Heard, end_verdict, reload_verdict
from sft_play.record.run_dir import RunDir
from tests.faults.hooks import hooked
from tests.tiny import Workplace

NO_END = """\
{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}\
{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
"""
# Weights that take part and get no gradient, as behind a detached layer.
ZERO_GRADIENTS = """
def patch(module):
    upstream = module.add_adapter
    def add_adapter(model, config):
        made = upstream(model, config)
        for weight in made.parameters():
            if weight.requires_grad:
                weight.register_hook(lambda gradient: gradient * 0)
        return made
    module.add_adapter = add_adapter
"""
FROZEN = """
def patch(module):
    upstream = module.add_adapter
    def add_adapter(model, config):
        return upstream(model, config).requires_grad_(False)
    module.add_adapter = add_adapter
"""


def left_behind(workplace: Workplace) -> list[str]:
    return [path.name for path in (workplace.path / "runs/.cache").glob("smoke-*")]


def failing(out: str) -> list[str]:
    return [line[:15].strip() for line in out.splitlines() if " FAIL " in line]


def test_a_healthy_config_passes(workplace: Workplace) -> None:
    """Whole models learn so well at this rate that the answers end; warm-up would hide it, and is left out."""
    workplace.config["tuning"] = {"mode": "full"}
    workplace.write(train={"warmup": 100, "scheduler": "cosine"})
    done = workplace.run("smoke", CONFIG="tiny.yaml")
    assert done.code == 0, done.out + done.err
    assert not failing(done.out)
    for words in (
        "on one batch of 4 rows",
        "(-9",
        "21 of 21 trained tensors moved",
        "4 rows have learned tokens",
        "3 of 3 answers end by themselves",
        "step-30 loaded again has loss 0.",
        "the result answers alike",
        "GiB measured",
        "everything learns",
    ):
        assert words in done.out, done.out
    assert not left_behind(workplace)


def test_a_long_one_tells_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a line at the file's end, as a writer may leave it, is waited for."""
    metrics = tmp_path / "metrics.jsonl"
    heard = Heard(metrics, 30)
    for step in range(31):
        heard.say()
        with metrics.open("a") as stream:
            stream.write(json.dumps({"event": "train", "step": step + 1, "loss": 4.0 - step / 10}) + "\n")
    with metrics.open("a") as stream:
        stream.write('{"event": "tr')
    heard.say()
    assert capsys.readouterr().out.splitlines() == [
        f"  step {step} of 30: loss {4.1 - step / 10:.4f}" for step in (5, 10, 15, 20, 25, 30)
    ]


def test_a_template_without_an_end_token(workplace: Workplace) -> None:
    (workplace.path / "chat.jinja").write_text(NO_END)
    done = workplace.run("smoke", CONFIG="tiny.yaml", MODEL_CHAT_TEMPLATE="chat.jinja")
    assert done.code == 2
    assert failing(done.out) == ["end of turn"]
    (line,) = done.error_lines
    assert "chat.jinja: " in line
    assert "writes no end-of-turn token after the assistant's words -> " in line
    assert not left_behind(workplace)


def test_rows_of_which_nothing_is_learned(workplace: Workplace) -> None:
    done = workplace.run("smoke", CONFIG="tiny.yaml", DATA_LOSS_ON="flags")
    assert done.code == 2
    assert failing(done.out) == ["labels"]
    (line,) = done.error_lines
    assert "data.train: no row is left to learn from" in line


@pytest.mark.slow
def test_a_learning_rate_of_zero(workplace: Workplace) -> None:
    done = workplace.run("smoke", CONFIG="tiny.yaml", TRAIN_LEARNING_RATE="0")
    assert done.code == 2
    assert failing(done.out) == ["loss", "weights"]
    loss, weights = done.error_lines
    assert "train.learning_rate: the loss does not fall: 5.8953 -> 5.8953" in loss
    assert "train.learning_rate: is 0, so none of 14 trained tensors moved" in weights


@pytest.mark.slow
def test_gradients_that_are_zero(workplace: Workplace, tmp_path: Path) -> None:
    hook = hooked(tmp_path / "hook", "sft_play.runtime.adapters", ZERO_GRADIENTS)
    done = workplace.run("smoke", CONFIG="tiny.yaml", **hook)
    assert done.code == 2
    assert failing(done.out) == ["loss", "gradients", "weights"]
    assert all("error: tuning: " in line for line in done.error_lines)
    assert "lora_B.weight: the model is frozen -> " in done.error_lines[-1]


@pytest.mark.slow
def test_a_frozen_model(workplace: Workplace, tmp_path: Path) -> None:
    """Refused before the first step, by what compares the model with its plan."""
    hook = hooked(tmp_path / "hook", "sft_play.runtime.adapters", FROZEN)
    done = workplace.run("smoke", "--keep", CONFIG="tiny.yaml", **hook)
    assert done.code == 4
    assert failing(done.out) == ["training"]
    assert "adapter weights: planned {torch.float32}, applied set()" in done.error_lines[0]
    assert len(left_behind(workplace)) == 1


def test_what_was_saved_is_judged(tmp_path: Path) -> None:
    """A checkpoint that computes what the model began with, a result that answers otherwise, answers without an end."""
    run = RunDir(tmp_path)
    events = [{"event": "train", "step": step, "loss": loss} for step, loss in ((1, 5.9), (2, 1.0), (3, 0.5))]
    run.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    good = {"checkpoint": "step-3", "loss": 0.4, "same_answers": True}
    assert reload_verdict(good, run).ok
    assert not reload_verdict({**good, "loss": 5.9}, run).ok
    assert "the result answers otherwise" in reload_verdict({**good, "same_answers": False}, run).words
    assert not reload_verdict({**good, "same_answers": False}, run).ok
    learned = {"with_end": 4, "answers": ["a", "b"], "ended": 0, "chance_of_end": 0.6}
    assert end_verdict(learned).ok
    assert end_verdict({**learned, "chance_of_end": 0.0, "ended": 1}).ok
    assert not end_verdict({**learned, "chance_of_end": 0.4}).ok
    assert "answers would never stop" in end_verdict({**learned, "with_end": 0}).words
