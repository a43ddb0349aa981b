"""Masks of rows with tools, reasoning and unusual orders, and of templates that are hard to mask."""

from __future__ import annotations

from typing import Any

import pytest

from sft_play.data.encode import closing_ids, encode_prompt
from sft_play.data.formats import Chat, Message
from sft_play.data.mask import Renderer, RowRefused, as_turns
from sft_play.errors import DataError
from tests.data.templates_made import DATED, OPENS_THOUGHTS, THINKING
from tests.data.test_data_masks import CHATML, GEMMA, encode, learned, row_of, tokenizer_of
from tests.data.tokenizers_made import CHATML_GENERATION, LLAMA3

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def calls(**arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]}


def said(role: str, content: str = "", **extra: Any) -> Message:
    return Message(role=role, content=content, extra=extra or None)


WEATHER = Chat(
    messages=(
        said("user", "Weather in Zürich?"),
        said("assistant", "", **calls(city='Zürich "centre"', days=2)),
        said("tool", '{"sky": "clear"}', name="weather"),
        said("assistant", "Clear.\n"),
        said("user", "Thanks"),
        said("assistant", "You are welcome."),
    ),
    tools=(TOOL,),
)


def dropped(style: str, template: str | None, chat: Chat) -> dict[str, int]:
    renderer = Renderer(tokenizer_of(style, template), "assistant")
    renderer.render(row_of(chat))
    return dict(renderer.dropped_fields)


def built_in(name: str) -> str:
    from sft_play.data.builtin import read_built_in

    return read_built_in(name)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich \\"centre\\"", "days": 2}}\n</tool_call>'


@pytest.mark.parametrize("template", ["chatml", "thinking"])
def test_calls_of_tools_are_learned_and_results_are_not(template: str) -> None:
    tokenizer = tokenizer_of("chatml", THINKING if template == "thinking" else built_in("chatml"))
    encoded = encode(tokenizer, WEATHER)
    last = "<think>\n\n</think>\n\n" if template == "thinking" else ""
    expected = [f"{CALL}<|im_end|>", "Clear.\n<|im_end|>", f"{last}You are welcome.<|im_end|>"]
    assert learned(tokenizer, encoded) == expected
    first = next(at for at, label in enumerate(encoded.labels) if label != -100)
    assert encode_prompt(tokenizer, as_turns(WEATHER.messages[:1]), WEATHER.tools) == encoded.input_ids[:first]


def test_a_call_may_close_with_its_own_token_and_the_date_stands_still() -> None:
    tokenizer = tokenizer_of("llama3", DATED)
    texts = learned(tokenizer, encode(tokenizer, WEATHER))
    call = '{"name": "weather", "parameters": {"city": "Zürich \\"centre\\"", "days": 2}}<|end_of_text|>'
    assert texts == [call, "Clear.<|eot_id|>", "You are welcome.<|eot_id|>"]
    ends = {tokenizer.tokenizer.token_to_id(end) for end in ("<|eot_id|>", "<|end_of_text|>")}
    assert set(closing_ids(tokenizer)) == ends


def test_arguments_as_json_text_are_given_as_the_object() -> None:
    text = '{"city": "Bern"}'
    chat = Chat(messages=(said("user", "q"), said("assistant", "Look:", **calls(city="Bern"))))
    written = [{"type": "function", "function": {"name": "weather", "arguments": text}}]
    same = Chat(messages=(chat.messages[0], said("assistant", "Look:", tool_calls=written)))
    tokenizer = tokenizer_of("chatml", THINKING)
    assert encode(tokenizer, chat).input_ids == encode(tokenizer, same).input_ids


def test_what_a_template_leaves_out_is_counted_or_refused() -> None:
    plain = Chat(messages=(said("user", "q"), said("assistant", "a", reasoning_content="thoughts")), tools=(TOOL,))
    assert dropped("chatml", CHATML, plain) == {"tools": 1, "reasoning_content": 1}
    assert dropped("chatml", THINKING, WEATHER) == {"name": 1}
    assert dropped("chatml", THINKING, plain) == {}
    with pytest.raises(RowRefused, match="does not write calls of tools"):
        encode(tokenizer_of("chatml", CHATML), WEATHER)
    without_result = CHATML.replace(
        "{{ '<|im_start|>'", "{% if message.role == 'tool' %}{% continue %}{% endif %}{{ '<|im_start|>'", 1
    )
    result = Chat(messages=(said("user", "q"), said("assistant", "a"), said("tool", "r"), said("assistant", "b")))
    with pytest.raises(RowRefused, match="does not write this tool turn"):
        encode(tokenizer_of("chatml", without_result), result)
    with pytest.raises(RowRefused, match="has no way to write tools"):
        encode(tokenizer_of("llama3", built_in("llama3")), WEATHER)
    named_only = built_in("chatml").replace("function['arguments'] | tojson", "'{}'")
    with pytest.raises(RowRefused, match="does not write 'city' as it is"):
        encode(tokenizer_of("chatml", named_only), WEATHER)


def test_reasoning_is_learned_where_the_template_writes_it() -> None:
    tokenizer = tokenizer_of("chatml", THINKING)
    first, second = said("user", "one"), said("user", "two")
    chat = Chat(
        messages=(
            first,
            said("assistant", "a", reasoning_content="t1"),
            second,
            said("assistant", "b", reasoning_content="t2"),
        )
    )
    thoughts = [said("assistant", f"<think>\nt{n}\n</think>\n\n{answer}") for n, answer in ((1, "a"), (2, "b"))]
    inline = Chat(messages=(first, thoughts[0], second, thoughts[1]))
    expected = ["a<|im_end|>", "<think>\nt2\n</think>\n\nb<|im_end|>"]
    for one in (chat, inline):
        assert learned(tokenizer, encode(tokenizer, one)) == expected
        assert dropped("chatml", THINKING, one) == {"reasoning_content": 1}
    # ChatML keeps what a content holds.
    assert (
        learned(tokenizer_of("chatml"), encode(tokenizer_of("chatml"), inline))[0]
        == "<think>\nt1\n</think>\n\na<|im_end|>"
    )


@pytest.mark.parametrize("answer", ["", " ", "\n\n", "<think>", "</think>", "<|im_end|>", "<think>\n\n</think>\n\n"])
def test_empty_answers_and_answers_like_the_templates_own_words(answer: str) -> None:
    for template in (THINKING, CHATML, CHATML_GENERATION):
        tokenizer = tokenizer_of("chatml", template)
        chat = Chat(
            messages=(said("user", "q"), said("assistant", answer), said("user", "r"), said("assistant", answer))
        )
        texts = learned(tokenizer, encode(tokenizer, chat))
        assert len(texts) == 2
        assert all(text.endswith("<|im_end|>") for text in texts)
        if template is THINKING and "</think>" in answer:  # taken for thoughts, which an earlier turn does not keep
            assert texts == ["<|im_end|>", "<think>\n\n</think>\n\n<|im_end|>"]
        else:
            assert texts[0] == answer + "<|im_end|>"


def test_unusual_orders() -> None:
    tokenizer = tokenizer_of("chatml")
    greeting = Chat(
        messages=(said("assistant", "Hello."), said("user", "q"), said("assistant", "a"), said("assistant", "b"))
    )
    assert learned(tokenizer, encode(tokenizer, greeting)) == ["Hello.<|im_end|>", "a<|im_end|>", "b<|im_end|>"]
    # A template that begins by itself with a system turn, or looks at the first message.
    opens = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
    assert learned(tokenizer, encode(tokenizer_of("chatml", opens), greeting))[0] == "Hello.<|im_end|>"
    developer = Chat(messages=(said("developer", "Be brief."), said("user", "q"), said("assistant", "a")))
    assert "developer\nBe brief." in Renderer(tokenizer, "last").render_chat(developer).text
    thinking = tokenizer_of("chatml", THINKING)
    assert "system\nBe brief." in Renderer(thinking, "last").render_chat(developer).text
    prompt = thinking.tokenizer.decode(
        encode_prompt(thinking, as_turns(developer.messages[:2])), skip_special_tokens=False
    )
    assert "system\nBe brief." in prompt
    with pytest.raises(RowRefused, match="alternate"):
        encode(tokenizer_of("gemma", GEMMA), greeting)


def test_generation_marks_are_the_way_out_where_a_prompt_is_no_beginning() -> None:
    chat = Chat(messages=(said("user", "q"), said("assistant", "a"), said("user", "r"), said("assistant", "b")))
    tokenizer = tokenizer_of("chatml", OPENS_THOUGHTS)
    assert learned(tokenizer, encode(tokenizer, chat)) == ["a<|im_end|>", "b<|im_end|>"]
    unmarked = (
        OPENS_THOUGHTS.replace("{%- generation %}", "")
        .replace("{%- endgeneration %}", "")
        .replace("{% endgeneration %}", "")
    )
    with pytest.raises(DataError, match="not prefix-stable"):
        encode(tokenizer_of("chatml", unmarked), chat)


def test_a_template_may_change_the_words_of_others() -> None:
    loud = LLAMA3.replace(
        "message['content'] | trim",
        "(message['content'] | upper if message['role'] == 'user' else message['content'] | trim)",
    )
    tokenizer = tokenizer_of("llama3", loud)
    chat = Chat(messages=(said("user", "is it?"), said("assistant", "Yes.")))
    assert learned(tokenizer, encode(tokenizer, chat)) == ["Yes.<|eot_id|>"]
    assert "IS IT?" in Renderer(tokenizer, "last").render_chat(chat).text
