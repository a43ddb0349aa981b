"""Rows and templates nothing can be learned from: refused before the model loads, or counted, in the real program."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.faults.test_refusals import refused
from tests.tiny import Workplace, make_rows


def chat(*turns: tuple[str, str]) -> str:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})


def write(workplace: Workplace, *lines: str) -> str:
    (workplace.path / "fault.jsonl").write_text("\n".join(lines) + "\n")
    return "fault.jsonl"


GOOD = [chat(("user", f"What comes after {n}?"), ("assistant", f"After {n} comes {n + 1}.")) for n in range(8)]
# Without its answer's last tokens a row is still worth something; with a question this long it has no answer left.
LONG = [chat(("user", f"{n} " + "x" * 400), ("assistant", "y" * 50)) for n in range(8)]
QUESTIONS = [chat(("system", "Be kind."), ("user", str(n))) for n in range(8)]


@pytest.mark.parametrize(
    ("lines", "settings", "parts"),
    [
        ([*GOOD, "{broken"], {}, ["fault.jsonl:9", "-> docs/data.md shows the formats"]),
        ([""], {}, ["fault.jsonl: 0 rows"]),
        ([" ", "", "\t"], {}, ["fault.jsonl: 0 rows"]),
        (["{broken", "null"], {"DATA_ON_BAD_ROW": "skip"}, ["no row is left to learn from, of 2 read: 2 bad"]),
        (LONG, {"DATA_ON_OVERLONG": "truncate"}, ["no row is left to learn from, of 8 read: 8 overlong"]),
        (LONG, {"DATA_ON_OVERLONG": "drop"}, ["no row is left to learn from, of 8 read: 8 overlong"]),
        ([*GOOD, LONG[0]], {"DATA_ON_OVERLONG": "error"}, ["fault.jsonl:9", "128"]),
        (QUESTIONS, {}, ["no row is left to learn from, of 8 read: 8 nothing to learn", "assistant turns"]),
    ],
)
def test_what_cannot_be_learned_from_is_refused(
    workplace: Workplace, lines: list[str], settings: dict[str, str], parts: list[str]
) -> None:
    done = workplace.train(DATA_TRAIN=write(workplace, *lines), **settings)
    assert done.code == 2, done.out + done.err
    assert "Traceback" not in done.out + done.err
    assert "loading" not in done.out
    for part in parts:
        assert part in done.error_lines[0]


def test_bad_and_overlong_rows_are_counted_and_kept_for_reading(workplace: Workplace) -> None:
    lines = [*GOOD, "{broken", *LONG[:2]]
    settings = {
        "DATA_ON_BAD_ROW": "skip",
        "DATA_ON_OVERLONG": "drop",
        "TRAIN_MAX_STEPS": "1",
        "DATA_VALIDATION": "none",
    }
    done = workplace.train(DATA_TRAIN=write(workplace, *lines), **settings)
    assert done.code == 0, done.err
    assert "8 rows" in done.out
    assert "1 dropped (bad), 2 dropped (overlong)" in done.out
    (told,) = [line for line in done.out.splitlines() if "the bad rows stand in" in line]
    assert "{broken" in (workplace.path / told.rpartition(" ")[2]).read_text()


TEMPLATES = {
    "none": (None, ["no chat template"]),
    "one that raises": ("{{ raise_exception('only Klingon') }}", ["only Klingon"]),
    "one that leaves its sandbox": (
        "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{% if c.__name__ == 'Popen' %}"
        "{{ c('touch escaped', shell=True) }}{% endif %}{% endfor %}",
        [],
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_cannot_be_used(workplace: Workplace, tmp_path: Path, name: str) -> None:
    text, parts = TEMPLATES[name]
    model = shutil.copytree(workplace.model, tmp_path / "copy")
    (model / "chat_template.jinja").unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    if text is not None:
        (model / "chat_template.jinja").write_text(text)
    refused(workplace, 2, *parts, MODEL_NAME=str(model))
    assert not (workplace.path / "escaped").exists()
    assert not (Path.cwd() / "escaped").exists()


def test_the_control_rows_train(workplace: Workplace) -> None:
    """Else the refusals above could have any cause."""
    make_rows(workplace.path / "fault.jsonl", 8)
    done = workplace.train(DATA_TRAIN="fault.jsonl", TRAIN_MAX_STEPS="1")
    assert done.code == 0, done.err
