"""Chat rows with tools, reasoning, flags and parts: what the template gets to see."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sft_play.data.formats import Body, Chat, Message, Pair, Row, is_blank, read_rows
from sft_play.data.raw import BadRow
from sft_play.data.sources import resolve_sources

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASKED = {"role": "user", "content": "Rome?"}
MADE = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


def read(path: Path, unused: set[str] | None = None) -> list[Row | BadRow]:
    (source,) = resolve_sources(str(path), key="data.train", default_format="auto")
    return list(read_rows(source.files[0], {}, set() if unused is None else unused))


def body_of(folder: Path, row: dict[str, Any], unused: set[str] | None = None) -> Body:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row))
    (found,) = read(path, unused)
    assert isinstance(found, Row), found
    return found.body


def messages_of(folder: Path, *turns: dict[str, Any]) -> tuple[Message, ...]:
    body = body_of(folder, {"messages": list(turns)})
    assert isinstance(body, Chat)
    return body.messages


def calling(*calls: object, **more: object) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


@pytest.mark.parametrize(
    "turn",
    [
        calling({"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}),
        calling({"function": {"name": "weather", "arguments": {"city": "Rome"}}}),
        calling({"name": "weather", "arguments": {"city": "Rome"}}),
        calling({"name": "weather", "parameters": {"city": "Rome"}}) | {"content": ""},
        {"role": "assistant", "tool_calls": json.dumps([MADE])},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}},
    ],
)
def test_every_writing_of_a_call_is_one(tmp_path: Path, turn: dict[str, Any]) -> None:
    (_, called) = messages_of(tmp_path, ASKED, turn)
    assert called == Message(role="assistant", content="", extra={"tool_calls": [MADE]})


def test_a_conversation_with_tools(tmp_path: Path) -> None:
    call = {"id": "c1", **MADE}
    result = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "Sunny"}
    turns = [{"role": "developer", "content": "Be brief."}, ASKED, calling(call, reasoning="Ask."), result]
    for tools in ([TOOL], json.dumps([TOOL])):
        body = body_of(tmp_path, {"messages": turns, "tools": tools})
        assert isinstance(body, Chat)
        assert body.tools == (TOOL,)
        developer, _, called, told = body.messages
        assert developer.role == "developer"
        assert called.extra == {"tool_calls": [call], "reasoning_content": "Ask."}
        assert told == Message(role="tool", content="Sunny", extra={"tool_call_id": "c1", "name": "weather"})
    none = body_of(tmp_path, {"messages": [ASKED], "tools": []})
    assert isinstance(none, Chat)
    assert none.tools is None


@pytest.mark.parametrize(
    ("given", "arguments"),
    [("", {}), (None, {}), ("{}", {}), ('{"a": [1]}', {"a": [1]}), ("[1]", "[1]"), ("{'a'}", "{'a'}"), ("x", "x")],
)
def test_arguments_are_an_object_where_they_are_one(tmp_path: Path, given: object, arguments: object) -> None:
    (_, called) = messages_of(tmp_path, ASKED, calling({"name": "f", "arguments": given}))
    assert called.extra is not None
    assert called.extra["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(tmp_path: Path, name: str) -> None:
    (_, answer) = messages_of(tmp_path, ASKED, {"role": "assistant", "content": "Yes.", name: "Hm."})
    assert answer == Message(role="assistant", content="Yes.", extra={"reasoning_content": "Hm."})
    (_, answer) = messages_of(tmp_path, ASKED, {"role": "assistant", "content": "Yes.", name: None})
    assert answer.extra is None


def test_parts_are_joined_and_flags_read(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"}]
    unused: set[str] = set()
    turns = [
        {"role": "user", "content": [*parts, {"type": "text", "text": "d", "cache_control": {}}], "weight": 0},
        {"role": "assistant", "content": "e", "weight": 1, "refusal": None, "id": 7},
        {"role": "assistant", "content": "f", "train": False},
    ]
    body = body_of(tmp_path, {"messages": turns}, unused)
    assert isinstance(body, Chat)
    assert [(one.content, one.train) for one in body.messages] == [("abcd", False), ("e", True), ("f", False)]
    assert unused == {"message.id", "message.content.cache_control"}


def test_a_weight_in_a_row_makes_one_the_default(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "a"}
    flags = [one.train for one in messages_of(tmp_path, ASKED, answer | {"weight": 0}, ASKED, answer)]
    assert flags == [None, False, None, True]
    assert [one.train for one in messages_of(tmp_path, ASKED, answer)] == [None, None]


def test_sharegpt_roles(tmp_path: Path) -> None:
    roles = {
        "developer": "developer",
        **dict.fromkeys(("human", "user"), "user"),
        **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
        **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    }
    turns = [{"from": speaker, "value": "x"} for speaker in roles]
    body = body_of(tmp_path, {"conversations": turns, "system": "s", "tools": json.dumps([TOOL])})
    assert isinstance(body, Chat)
    assert body.tools == (TOOL,)
    assert [message.role for message in body.messages] == ["system", *roles.values()]


@pytest.mark.parametrize("value", [json.dumps(MADE["function"]), json.dumps([MADE["function"]])])
def test_sharegpt_calls(tmp_path: Path, value: str) -> None:
    turns = [("human", "Rome?"), ("function_call", value), ("observation", "Sunny"), ("gpt", "Sunny.")]
    body = body_of(tmp_path, {"conversations": [{"from": who, "value": said} for who, said in turns]})
    assert isinstance(body, Chat)
    _, called, told, _ = body.messages
    assert called == Message(role="assistant", content="", extra={"tool_calls": [MADE]})
    assert told == Message(role="tool", content="Sunny")


def test_prompt_and_completion_as_turns(tmp_path: Path) -> None:
    shot = [ASKED, {"role": "assistant", "content": "Sunny."}]
    completion = [{"role": "assistant", "content": "Rain."}]
    body = body_of(tmp_path, {"prompt": [*shot, ASKED], "completion": completion, "tools": [TOOL], "system": "s"})
    assert isinstance(body, Chat)
    assert body.tools == (TOOL,)
    assert [(one.role, one.content, one.train) for one in body.messages] == [
        ("system", "s", None),
        ("user", "Rome?", None),
        ("assistant", "Sunny.", False),
        ("user", "Rome?", None),
        ("assistant", "Rain.", True),
    ]


@pytest.mark.parametrize(
    ("row", "format_name", "pair"),
    [
        (
            {"system": "s", "user": "u", "assistant": "a"},
            "user_assistant",
            Pair(system="s", user="u", plain_prompt="s\n\nu", completion="a"),
        ),
        (
            {"user": "u", "assistant": "a"},
            "user_assistant",
            Pair(system="", user="u", plain_prompt="u", completion="a"),
        ),
        (
            {"system": "s", "prompt": "p", "completion": "c"},
            "prompt_completion",
            Pair(system="s", user="p", plain_prompt="s\n\np", completion="c"),
        ),
        (
            {"input": "i", "target": "t"},
            "input_target",
            Pair(system="", user="i", plain_prompt="i", completion="t"),
        ),
    ],
)
def test_pairs_by_other_names(tmp_path: Path, row: dict[str, Any], format_name: str, pair: Pair) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    (found,) = read(path)
    assert isinstance(found, Row), found
    assert (found.format, found.body) == (format_name, pair)


def test_parquet_fills_up_with_nulls_and_they_are_not_learned(tmp_path: Path) -> None:
    """A struct column gives each tool and each call the fields of all the others."""
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"city": {"type": "string"}}}},
        {"type": "function", "function": {"name": "g", "parameters": {"days": {"type": "integer"}}}},
    ]
    calls = [{"name": "f", "arguments": {"city": "Rome"}}, {"name": "g", "arguments": {"days": 2}}]
    turns = [{"role": "user", "content": "q", "tool_calls": None}, calling(*calls)]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": turns, "tools": tools}]), path)
    (row,) = read(path)
    assert isinstance(row, Row), row
    assert isinstance(row.body, Chat)
    assert row.body.tools == tuple(tools)
    assert row.body.messages[0].extra is None
    assert row.body.messages[1].extra == {"tool_calls": [{"type": "function", "function": call} for call in calls]}


def test_values_that_json_does_not_have_are_refused_in_tools(tmp_path: Path) -> None:
    for value, said in ((b"x", "of type bytes"), (math.nan, "not finite"), (datetime(2026, 1, 1), "of type datetime")):
        path = tmp_path / "rows.parquet"
        tools = [{"name": "f", "default": value}]
        pq.write_table(pa.Table.from_pylist([{"messages": [ASKED], "tools": tools}]), path)
        (row,) = read(path)
        assert isinstance(row, BadRow)
        assert row.field == "tools[0]"
        assert said in row.reason


def test_a_row_of_calls_is_not_blank(tmp_path: Path) -> None:
    assert not is_blank(body_of(tmp_path, {"messages": [ASKED | {"content": ""}, calling(MADE)]}))
    assert is_blank(body_of(tmp_path, {"messages": [ASKED | {"content": " "}]}))
    assert is_blank(body_of(tmp_path, {"messages": []}))
