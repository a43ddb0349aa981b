"""From a file's rows to learned words: every format with every family's tokenizer, one, two and five turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_play.data.encode import MASKED, encode_rows
from sft_play.data.formats import Row, read_rows
from sft_play.data.mask import Renderer, RowRefused
from sft_play.data.sources import resolve_sources
from tests.data.test_data_masks import as_read, learned, tokenizer_of
from tests.data.tokenizers_made import STYLES

FAMILIES = ("bare", "chatml", "llama3", "gemma", "mistral", "metaspace")


def turns(count: int) -> Iterator[tuple[str, str]]:
    return ((f"question {n}?", f"Answer {n}, in words.") for n in range(count))


def rows(count: int) -> dict[str, dict[str, Any]]:
    """One row a format; those that hold one question only stand under one turn."""
    chat = [message for pair in turns(count) for message in zip(("user", "assistant"), pair, strict=True)]
    several = {
        "messages": {"messages": [{"role": role, "content": text} for role, text in chat]},
        "sharegpt": {
            "conversations": [
                {"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in chat
            ]
        },
    }
    if count > 1:
        return several
    question, answer = next(turns(1))
    return several | {
        "alpaca": {"instruction": question, "input": "", "output": answer},
        "prompt_completion": {"prompt": question, "completion": answer},
        "roles": {"system": "", "user": question, "assistant": answer},
        "input_target": {"input": question, "target": answer},
        "text": {"text": answer},
    }


CASES = [(style, count, name) for style in FAMILIES for count in (1, 2, 5) for name in rows(count)]


@pytest.mark.parametrize(("style", "count", "name"), CASES)
def test_just_the_answers_and_their_end(tmp_path: Path, style: str, count: int, name: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(rows(count)[name]) + "\n")
    (source,) = resolve_sources(str(file), key="data.train", default_format="auto")
    (row,) = read_rows(source.files[0], {}, set())
    assert isinstance(row, Row), row
    tokenizer = tokenizer_of(style)
    if style == "bare" and name in ("messages", "sharegpt"):
        tokenizer = tokenizer_of("bare", str(STYLES["chatml"].template).replace("<|im_end|>", "<|endoftext|>"))
    renderer = Renderer(tokenizer, "assistant")
    (encoded,) = encode_rows(tokenizer, [renderer.render(row)])
    assert not isinstance(encoded, RowRefused)
    plain = name == "text" or tokenizer.template is None
    end = STYLES[style].eos if plain or style == "bare" else STYLES[style].end_of_turn
    expected = [as_read(style, answer + end) for _, answer in turns(count)]
    words = [text.removeprefix(STYLES[style].bos or "").strip() for text in learned(tokenizer, encoded)]
    assert words == expected
    assert encoded.closes
    eos = [at for at, token in enumerate(encoded.input_ids) if token == tokenizer.eos_id]
    assert all(encoded.labels[at] != MASKED for at in eos if at in encoded.closings)
