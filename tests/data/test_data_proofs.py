"""Proofs on a user's rows: each claim holds for what is right, and is seen to fail for what is not."""

from __future__ import annotations

import time

import pytest

from sft_play.data.encode import MASKED, encode_prompt
from sft_play.data.formats import Chat, Message, Pair, Text
from sft_play.data.proofs import END_LEARNED, ONE_BOS, PREFIX_STABLE, PROMPTS_AGREE, PROVED_ROWS, prove
from sft_play.facts.data import Proof
from tests.data.templates_made import OPENS_THOUGHTS, TEXT_END, THINKING
from tests.data.test_data_masks import (
    CHAT_STYLES,
    CHATML,
    conversation,
    encode,
    learned,
    row_of,
    tokenizer_of,
)
from tests.data.tokenizers_made import STYLES


def proofs(
    style: str, template: str | None, *bodies: Chat | Pair | Text, loss_on: str = "assistant"
) -> dict[str, Proof]:
    return {p.name: p for p in prove(tokenizer_of(style, template), [row_of(body) for body in bodies], loss_on)}


@pytest.mark.parametrize("style", CHAT_STYLES)
def test_all_hold_for_the_families(style: str) -> None:
    found = proofs(style, None, conversation(1), conversation(5), Text(text="words"))
    assert {name: (proof.holds, proof.of, proof.words) for name, proof in found.items()} == {
        PREFIX_STABLE: (2, 2, ""),
        PROMPTS_AGREE: (6, 6, ""),
        ONE_BOS: (3, 3, ""),
        END_LEARNED: (7, 7, ""),
    }


def test_each_is_seen_to_fail() -> None:
    thinking = proofs("chatml", THINKING, conversation(1), conversation(2))
    assert (thinking[PREFIX_STABLE].holds, thinking[PREFIX_STABLE].of) == (1, 2)
    assert "otherwise once another turn follows" in thinking[PREFIX_STABLE].words
    opens = proofs("chatml", OPENS_THOUGHTS, conversation(2))
    assert (opens[PROMPTS_AGREE].holds, opens[PROMPTS_AGREE].of) == (0, 2)
    twice = proofs("mistral", "{{ bos_token }}" + str(STYLES["mistral"].template), conversation(1))
    assert twice[ONE_BOS].holds == 0
    no_token = proofs("chatml", TEXT_END, conversation(2))
    assert (no_token[END_LEARNED].holds, no_token[END_LEARNED].of) == (0, 2)


def test_huge_rows_are_not_proved_on_where_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft_play.data.proofs._LONG", 1000)
    huge = Text(text="words " * 1000)
    assert proofs("chatml", None, conversation(1), huge)[ONE_BOS].of == 1
    assert proofs("chatml", None, huge)[ONE_BOS].of == 1


@pytest.mark.parametrize("answer", ["\nAnswer", "Answer", "\n\n\n", " Answer"])
def test_prompt_and_answer_are_parted_where_inference_parts_them(answer: str) -> None:
    chat = Chat(messages=(Message(role="user", content="q"), Message(role="assistant", content=answer)))
    pair = Pair(system="", user="q", plain_prompt="Q: q\nA: \n", completion=answer)
    two_lines = CHATML.replace("['role'] + '\n'", "['role'] + '\n\n'").replace("assistant\n", "assistant\n\n")
    for style, template, body in [("chatml", None, chat), ("chatml", two_lines, chat), ("bare", None, pair)]:
        tokenizer = tokenizer_of(style, template)
        encoded = encode(tokenizer, body)
        content = "q" if body is chat else "Q: q\nA: \n"
        prompt = encode_prompt(tokenizer, [{"role": "user", "content": content}])
        assert encoded.input_ids[: len(prompt)] == prompt
        assert encoded.labels[: len(prompt)] == [MASKED] * len(prompt)
        assert learned(tokenizer, encoded) == [answer + ("<|im_end|>" if body is chat else "<|endoftext|>")]
        assert proofs(style, template, body)[PROMPTS_AGREE].holds == 1


def test_greetings_and_refused_rows_are_let_by() -> None:
    greeting = Chat(messages=(Message(role="assistant", content="Hello."), *conversation(1).messages))
    found = proofs("chatml", None, greeting)
    assert (found[PROMPTS_AGREE].holds, found[PROMPTS_AGREE].of) == (1, 1)
    assert [proof.of for proof in proofs("gemma", None, greeting).values()] == [0, 0, 0, 0]
    assert [proof.of for proof in prove(tokenizer_of("chatml"), [], "assistant")] == [0, 0, 0, 0]


def test_a_sample_is_enough_and_quick() -> None:
    rows = [row_of(conversation(1)) for _ in range(PROVED_ROWS * 5 + 1)]
    tokenizer = tokenizer_of("chatml")
    taken = []
    for _ in range(3):
        before = time.process_time()
        found = prove(tokenizer, rows, "assistant")
        taken.append(time.process_time() - before)
    assert PROVED_ROWS // 2 < found[0].of <= PROVED_ROWS
    assert min(taken) < 0.5
