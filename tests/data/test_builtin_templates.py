"""The templates that come with this program: masks, system messages, refusals, and the same text as transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft_play.data.builtin import BUILT_IN, read_built_in
from sft_play.data.encode import MASKED, encode_prompt
from sft_play.data.formats import Chat, Message, Pair
from sft_play.data.mask import Renderer, RowRefused
from sft_play.data.proofs import prove
from sft_play.data.template import TextTokenizer, load_text_tokenizer
from sft_play.errors import DataError
from tests.data.test_data_masks import TEXTS, conversation, encode, learned, row_of
from tests.data.tokenizers_made import STYLES, make_tokenizer

# name of the template -> a tokenizer that has its tokens, its end of turn, what it writes before an answer
FITTING = {
    "chatml": ("chatml", "<|im_end|>", ""),
    "llama3": ("llama3", "<|eot_id|>", ""),
    "gemma": ("gemma", "<end_of_turn>", ""),
    "mistral": ("mistral", "</s>", " "),
    "alpaca": ("bare", "<|endoftext|>", ""),
    "plain": ("mistral", "</s>", " "),
}
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {}}},)


@cache
def tokenizer_with(name: str, style: str = "") -> TextTokenizer:
    return load_text_tokenizer(make_tokenizer(style or FITTING[name][0], Path(mkdtemp())), name)


def test_each_has_its_case() -> None:
    assert set(FITTING) == set(BUILT_IN)


@pytest.mark.parametrize("turns", [1, 2, 5])
@pytest.mark.parametrize("name", BUILT_IN)
def test_just_the_answers_and_their_end(name: str, turns: int) -> None:
    tokenizer, (style, end, lead) = tokenizer_with(name), FITTING[name]
    system = Chat(messages=(Message(role="system", content="Be kind."), *conversation(turns).messages))
    for chat in (conversation(turns), system):
        encoded = encode(tokenizer, chat)
        assert learned(tokenizer, encoded) == [f"{lead}Answer {turn}, in words.{end}" for turn in range(turns)]
        text = Renderer(tokenizer, "last").render_chat(chat).text
        assert text.count("Be kind.") == (chat is system)
        assert text.startswith(STYLES[style].bos or "")
        assert "{% generation %}" not in text
    for proof in prove(tokenizer, [row_of(conversation(turns)), row_of(system)], "assistant"):
        assert proof.of
        assert proof.holds == proof.of, proof


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_same_text_in_transformers_with_its_masks(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    style = FITTING[name][0]
    theirs = AutoTokenizer.from_pretrained(make_tokenizer(style, tmp_path))
    theirs.chat_template = tokenizer_with(name).need_template().source
    chat = [{"role": m.role, "content": m.content} for m in conversation(2).messages]
    assert theirs.apply_chat_template(chat, tokenize=False) == tokenizer_with(name).need_template().render(chat)
    both = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    ours = encode(tokenizer_with(name), conversation(2))
    assert both["input_ids"] == ours.input_ids
    assert both["assistant_masks"] == [int(label != -100) for label in ours.labels]


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "chatml"])
def test_tools_are_refused_by_all_but_chatml(name: str) -> None:
    called = Message(role="assistant", content="", extra={"tool_calls": [{"function": {"name": "f", "arguments": {}}}]})
    user, tool = Message(role="user", content="q"), Message(role="tool", content="r")
    for chat, words in [
        (Chat(messages=(user, Message(role="assistant", content="a")), tools=TOOLS), "no way to write tools"),
        (Chat(messages=(user, called)), "no way to write tool calls"),
        (Chat(messages=(user, tool)), "no turn for the role tool"),
    ]:
        with pytest.raises(RowRefused, match=words):
            encode(tokenizer_with(name), chat)


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_a_system_message_needs_a_question_to_stand_in(name: str) -> None:
    chat = Chat(messages=(Message(role="system", content="s"), Message(role="assistant", content="a")))
    with pytest.raises(RowRefused, match="writes a system message into the user turn after it"):
        encode(tokenizer_with(name), chat)


def test_missing_tokens_and_names() -> None:
    with pytest.raises(
        DataError, match=r"lacks special tokens that the template mistral writes: \[INST\], \[/INST\]"
    ) as caught:
        tokenizer_with("mistral", "chatml")
    assert "alpaca or plain" in caught.value.fix
    with pytest.raises(DataError, match="no built-in template 'chatm'") as caught:
        tokenizer_with("chatm", "chatml")
    assert all(name in caught.value.fix for name in BUILT_IN)
    with pytest.raises(DataError, match=r"there is no file .*mine\.jinja"):
        tokenizer_with("./mine.jinja", "chatml")


def test_bos_where_the_tokenizer_puts_one() -> None:
    assert tokenizer_with("plain", "mistral").need_template().source.startswith("{{- bos_token }}")
    assert tokenizer_with("plain", "bare").need_template().source == read_built_in("plain")


def test_pairs_go_into_a_chosen_template() -> None:
    pair = Pair(system="", user="q", plain_prompt="### Q\n", completion="a")
    tokenizer = tokenizer_with("alpaca")
    assert Renderer(tokenizer, "assistant").render(row_of(pair)).text == (
        "### Instruction:\nq\n\n### Response:\na<|endoftext|>\n\n"
    )
    assert learned(tokenizer, encode(tokenizer, pair)) == ["a<|endoftext|>"]


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=80, deadline=None)
@given(turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3))
def test_any_text_is_masked_right_and_prompted_as_at_inference(name: str, turns: list[tuple[str, str]]) -> None:
    tokenizer, (_, end, lead) = tokenizer_with(name), FITTING[name]
    messages = [Message(role=r, content=t) for pair in turns for r, t in zip(("user", "assistant"), pair, strict=True)]
    encoded = encode(tokenizer, Chat(messages=tuple(messages)))
    trims = name in ("llama3", "gemma", "mistral")
    assert learned(tokenizer, encoded) == [lead + (text.strip() if trims else text) + end for _, text in turns]
    prompt = encode_prompt(tokenizer, [{"role": "user", "content": turns[0][0]}])
    first = next(at for at, label in enumerate(encoded.labels) if label != MASKED)
    assert encoded.input_ids[:first] == prompt
