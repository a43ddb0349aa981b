"""Templates and tokenizers: the same text and tokens as transformers, and no way out of the sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.data import bounded
from sft_play.data.encode import encode_prompt
from sft_play.data.template import TemplateRefused, load_text_tokenizer
from sft_play.errors import DataError, ModelError
from tests.data.tokenizers_made import STYLES, make_tokenizer

CHAT_STYLES = [name for name, style in STYLES.items() if style.template]
CHATS = [
    [{"role": "user", "content": "Hello  <b>&\n"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": " a "}, {"role": "user", "content": "é👩‍👩‍👧"}],
]
# Everything that templates in the wild lean on: loop controls, namespaces, tojson, blocks on lines of their own.
BUSY = """{%- set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
<|im_start|>{{ message['role'] }}
{% generation %}{% set inner = ns.count %}{{ message['content'] | tojson }}{% endgeneration %}{{ inner }}
{{ {'b': 1, 'ä': [1, 2], 'a': '<>'} | tojson }} {{ dict(x=1) | tojson(indent=2) }} {{ tools is none }}
{{ strftime_now('%Y') | length }} {{ eos_token }}{{ bos_token is defined }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("generation_prompt", [False, True])
@pytest.mark.parametrize("style", [*CHAT_STYLES, "busy"])
def test_text_and_tokens_equal_transformers(tmp_path: Path, style: str, generation_prompt: bool) -> None:
    from transformers import AutoTokenizer

    folder = make_tokenizer("chatml", tmp_path, template=BUSY) if style == "busy" else make_tokenizer(style, tmp_path)
    ours, theirs = load_text_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.eos_id == theirs.eos_token_id
    for chat in CHATS:
        text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation_prompt)
        assert ours.need_template().render(chat, generation_prompt=generation_prompt) == text
        ids = theirs.apply_chat_template(chat, add_generation_prompt=generation_prompt)["input_ids"]
        assert ours.tokenizer.encode(text, add_special_tokens=False).ids == ids
        if generation_prompt:
            assert encode_prompt(ours, chat) == ids
    assert ours.tokenizer.encode("running text").ids == theirs("running text")["input_ids"]


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    folder = make_tokenizer("bare", tmp_path)
    assert load_text_tokenizer(folder).template is None
    with pytest.raises(DataError, match="no chat template") as caught:
        load_text_tokenizer(folder).need_template()
    assert "model.chat_template" in caught.value.fix

    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "named"}]
    for value, expected in [("in the config", "in the config"), (named, "named")]:
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": value}))
        assert load_text_tokenizer(folder).need_template().source == expected
    (folder / "chat_template.jinja").write_text("beside it")
    assert load_text_tokenizer(folder).need_template().source == "beside it"
    (tmp_path / "mine.jinja").write_text("my own")
    assert load_text_tokenizer(folder, str(tmp_path / "mine.jinja")).need_template().source == "my own"
    with pytest.raises(DataError, match="lacks special tokens that the template chatml writes"):
        load_text_tokenizer(folder, "chatml")


ESCAPES = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ cycler.__init__.__globals__.os.popen('touch PWNED').read() }}",
    "{{ lipsum.__globals__['os'].system('touch PWNED') }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "{{ messages.append({'role': 'user'}) }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ (messages | attr('__class__')).__mro__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_the_sandbox_holds(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    template = load_text_tokenizer(make_tokenizer("chatml", tmp_path, template=source)).need_template()
    with pytest.raises(DataError) as caught:
        template.render(CHATS[0])
    assert caught.value.where.endswith("chat_template.jinja")
    assert "\n" not in caught.value.line()
    assert not list(tmp_path.rglob("PWNED"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "not valid jinja"),
        ("{{ undefined_name.x }}", "the chat template failed: UndefinedError"),
        ("{{ 1 / 0 }}", "the chat template failed: ZeroDivisionError"),
        ("{% include 'other' %}", "the chat template failed: TypeError"),
    ],
)
def test_broken_templates_are_one_line(tmp_path: Path, source: str, words: str) -> None:
    folder = make_tokenizer("chatml", tmp_path, template=source)
    with pytest.raises(DataError, match=words):
        load_text_tokenizer(folder).need_template().render(CHATS[0])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1,000,000 steps"),
        ("{% for i in range(99999) %}{% for j in range(99999)|map('string') %}x{% endfor %}{% endfor %}", "steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}", "steps"),
        ("{% for x in [[]] recursive %}{{ loop([[], []]) if loop.depth < 90 }}{% endfor %}", "steps"),
        ("{{ 'x' * 10 ** 9 }}", "repeats a text 1,000,000,000 times"),
        ("{{ 10 ** (10 ** 10) }}", "a power that no memory holds"),
        ("{% set ns = namespace(s='x') %}{% for i in range(22) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
         "writes 4,194,304 characters"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)  # fmt: skip
def test_templates_without_end_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    monkeypatch.setattr(bounded, "STEPS", 1_000_000)
    monkeypatch.setattr(bounded, "CHARACTERS", 1 << 20)
    folder = make_tokenizer("chatml", tmp_path, template=source)
    with pytest.raises(DataError, match=words) as caught:
        load_text_tokenizer(folder).need_template().render(CHATS[0])
    assert len(caught.value.lines()) == 1


def test_counting_changes_no_loop(tmp_path: Path) -> None:
    source = (
        "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }};{% endfor %}"
        "{% for m in messages|map(attribute='role') %}{{ m }}{{ loop.last }}{% else %}none{% endfor %}"
        "{% for m in nothing %}x{% else %}none{% endfor %}"
        "{% for k, v in {'a': 2 * 3}.items() %}{{ k }}{{ v }}{% endfor %}"
    )
    chat = [{"role": role, "content": "c"} for role in ("system", "user", "assistant")]
    template = load_text_tokenizer(make_tokenizer("chatml", tmp_path, template=source)).need_template()
    assert template.render(chat) == "1/2False;2/2True;systemFalseuserFalseassistantTruenonea6"
    for _ in range(3):
        assert template.render(chat * 1000)


def test_a_template_may_refuse(tmp_path: Path) -> None:
    template = load_text_tokenizer(make_tokenizer("gemma", tmp_path)).need_template()
    with pytest.raises(TemplateRefused, match="System role not supported"):
        template.render([{"role": "system", "content": "s"}])
    with pytest.raises(DataError, match="refuses the messages: System role not supported"):
        encode_prompt(load_text_tokenizer(make_tokenizer("gemma", tmp_path)), [{"role": "system", "content": "s"}])


def test_tokens_that_only_the_config_names(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_tokenizer("chatml", tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_text_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.eos_id == theirs.eos_token_id
    assert ours.tokenizer.encode("a<|end|>b").ids == theirs("a<|end|>b")["input_ids"]


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        load_text_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer"):
        load_text_tokenizer(tmp_path)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, sft_play.data.prepare, sft_play.data.encode\n"
        "print(*{'torch', 'transformers', 'datasets', 'numpy.testing'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
