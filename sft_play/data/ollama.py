"""An Ollama Modelfile with the template that was trained.

Ollama's templates are Go's, and it takes over a model's own jinja template only where it recognises it. So a template
is written in one of the forms below, and only where that form renders sample chats exactly as the trained one does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sft_play.data.encode import closing_ids
from sft_play.data.sandbox import ChatTemplate, TemplateRefused
from sft_play.data.template import TextTokenizer
from sft_play.errors import DataError

CHATML = """{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""
LLAMA3 = """{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>

{{ .Content }}<|eot_id|>{{ end }}<|start_header_id|>assistant<|end_header_id|>

"""
FORMS = (CHATML, LLAMA3)
# A system message of its own, where a template writes one into chats without.
_UNLESS_SYSTEM = "{{- if not .System }}%s{{ end }}"
_SYSTEM, _USER, _ANSWER, _MORE = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 2?\n\nThink first."},
)
SAMPLES = ([_USER], [_SYSTEM, _USER], [_USER, _ANSWER, _MORE], [_SYSTEM, _USER, _ANSWER, _MORE])
_PIECES = (
    (r"range \.Messages", "for message in messages", "for"),
    (r"if not \.System", "if messages[0]['role'] != 'system'", "if"),
)


def modelfile(tokenizer: TextTokenizer, weights: str) -> str:
    """The text of a Modelfile.

    Args:
        weights: name of the GGUF file beside it.

    Raises:
        DataError: no form renders as the trained template does.
    """
    template = tokenizer.need_template()
    form = find_form(template, tokenizer.specials.get("bos_token", ""))
    stops = dict.fromkeys(
        tokenizer.tokenizer.id_to_token(number)
        for number in (*closing_ids(tokenizer), tokenizer.eos_id)
        if number is not None
    )
    lines = [f"FROM ./{weights}", f'TEMPLATE """{form}"""', *(f'PARAMETER stop "{stop}"' for stop in stops)]
    return "\n".join(lines) + "\n"


def find_form(template: ChatTemplate, bos: str) -> str:
    """The Go template that renders as the trained one, BOS included: the GGUF file says that none is to be added.

    Raises:
        DataError: there is none.
    """
    wanted = [_rendered(template, chat) for chat in SAMPLES]
    for form in FORMS:
        for one in (form, bos + form, *with_system_of(template, form), *with_system_of(template, form, bos)):
            if wanted == [render_go(one, chat) for chat in SAMPLES]:
                return one
    fix = "use a GGUF server that renders its jinja template, such as llama.cpp's with --jinja"
    raise DataError(
        "no form of Ollama's own (chatml, llama3) renders as the trained template", where="--ollama", fix=fix
    )


def with_system_of(template: ChatTemplate, form: str, bos: str = "") -> list[str]:
    """The form with the system message that the template writes by itself; none where it writes none."""
    text, plain = _rendered(template, [_USER]), render_go(form, [_USER])
    before = text.removesuffix(plain).removeprefix(bos)
    if not text.endswith(plain) or not before or '"""' in before or "{{" in before:
        return []
    return [bos + _UNLESS_SYSTEM % before + form]


def _rendered(template: ChatTemplate, chat: Sequence[dict[str, str]]) -> str:
    try:
        return template.render(list(chat), generation_prompt=True)
    except TemplateRefused:
        return ""


def render_go(form: str, chat: Sequence[dict[str, str]]) -> str:
    """What Ollama makes of a chat by one of the forms: their few Go pieces mean the same in jinja."""
    blocks: list[str] = []

    def piece(found: re.Match[str]) -> str:
        opening, text, closing = found.groups()
        for go, jinja, block in _PIECES:
            if re.fullmatch(go, text):
                blocks.append(block)
                return f"{{%{opening} {jinja} {closing}%}}"
        if text == "end":
            return f"{{%{opening} end{blocks.pop()} {closing}%}}"
        return f"{{{{ message['{text.removeprefix('.').lower()}'] }}}}"

    source = re.sub(r"\{\{(-?) *(.*?) *(-?)\}\}", piece, form)
    # jinja drops one newline at the end of a text and after a block; Go keeps both.
    return ChatTemplate(_newlines_kept(source), {}, "Modelfile").render(list(chat))


def _newlines_kept(source: str) -> str:
    return re.sub(
        r"%\}\n", "%}{{ '\\\\n' }}", source.removesuffix("\n") + ("{{ '\\n' }}" if source.endswith("\n") else "")
    )
