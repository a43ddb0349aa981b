"""Ollama's Go templates: written only where they render as the trained template does."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.data.ollama import CHATML, LLAMA3, SAMPLES, modelfile, render_go
from sft_play.data.template import load_text_tokenizer
from sft_play.errors import DataError
from tests.data.tokenizers_made import CHATML as CHATML_JINJA
from tests.data.tokenizers_made import make_tokenizer

DEFAULT = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"


@pytest.mark.parametrize(("style", "form"), [("chatml", CHATML), ("generation", CHATML), ("llama3", LLAMA3)])
def test_a_known_form_is_written(style: str, form: str, tmp_path: Path) -> None:
    tokenizer = load_text_tokenizer(make_tokenizer(style, tmp_path))
    text = modelfile(tokenizer, "model.gguf")
    bos = tokenizer.specials.get("bos_token", "")
    assert text.startswith(f'FROM ./model.gguf\nTEMPLATE """{bos}{form}"""\n')
    assert 'PARAMETER stop "' in text
    for chat in SAMPLES:
        assert render_go(bos + form, chat) == tokenizer.need_template().render(chat, generation_prompt=True)


def test_what_ollama_makes_of_a_chat_letter_by_letter() -> None:
    assert render_go(CHATML, SAMPLES[1]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_with_a_system_message_of_its_own(tmp_path: Path) -> None:
    tokenizer = load_text_tokenizer(make_tokenizer("chatml", tmp_path, template=DEFAULT + CHATML_JINJA))
    text = modelfile(tokenizer, "model.gguf")
    assert "{{- if not .System }}<|im_start|>system\nBe kind.<|im_end|>\n{{ end }}{{- range .Messages }}" in text


@pytest.mark.parametrize(
    "change", [("<|im_end|>' + '\n'", "<|im_end|>'"), ("message['role'] + '\n'", "message['role'] + ' '")]
)
def test_a_template_that_is_almost_a_known_one_is_refused(change: tuple[str, str], tmp_path: Path) -> None:
    other = CHATML_JINJA.replace(*change)
    assert other != CHATML_JINJA
    with pytest.raises(DataError, match="no form of Ollama's own"):
        modelfile(load_text_tokenizer(make_tokenizer("chatml", tmp_path, template=other)), "model.gguf")
