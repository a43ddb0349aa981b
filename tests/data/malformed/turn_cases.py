"""Chat rows with a fault in a turn, or with something odd that is accepted."""

from __future__ import annotations

from sft_play.data.formats import Message
from tests.data.malformed.made import ANSWER, CALL, USER, Case, case, chat, row, turns

_KNOWN = "known are system, developer, user, assistant, tool, function"
_SYSTEM = {"role": "system", "content": "s"}
_CALLED = Message(
    role="assistant",
    content="",
    extra={"tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}]},
)
_CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
_IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def _bad(said: str, content: bytes, complaint: str) -> Case:
    return case(said, "r.jsonl", content, f"r.jsonl:1: {complaint}")


TURNS: list[Case] = [
    case("no turn at all", "r.jsonl", turns(), chat()),
    case(
        "empty texts",
        "r.jsonl",
        turns(USER | {"content": ""}, ANSWER | {"content": ""}),
        chat(("user", ""), ("assistant", "")),
    ),
    case(
        "ending on a user turn",
        "r.jsonl",
        turns(USER, ANSWER, USER),
        chat(("user", "x"), ("assistant", "y"), ("user", "x")),
    ),
    case("the user twice", "r.jsonl", turns(USER, USER), chat(("user", "x"), ("user", "x"))),
    case("beginning with an answer", "r.jsonl", turns(ANSWER), chat(("assistant", "y"))),
    _bad("turns that are an object", b'{"messages": {}}', "messages: a list of messages expected, found an object"),
    _bad("turns that are text", b'{"messages": "hi"}', "messages: a list of messages expected, found text"),
    _bad(
        "turns that are null",
        b'{"messages": null}',
        "messages: a list of messages expected, found null",
    ),
    _bad(
        "turns written as bad JSON",
        b'{"messages": "[{\'role\'}]"}',
        "messages: not JSON: expecting property name enclosed in double quotes at column 3",
    ),
    _bad("a text as a turn", turns("hi"), "messages[0]: an object with role and content expected, found text"),
    _bad(
        "lists of turns in lists", turns([USER]), "messages[0]: an object with role and content expected, found a list"
    ),
    _bad("null as a turn", turns(USER, None), "messages[1]: an object with role and content expected, found null"),
    _bad("no content", turns({"role": "user"}), "messages[0].content: missing; found role"),
    _bad("no role", turns({"content": "x"}), "messages[0].role: missing; found content"),
    _bad("content null", turns(USER | {"content": None}), "messages[0].content: text expected, found null"),
    _bad(
        "an answer of null", turns(USER, ANSWER | {"content": None}), "messages[1].content: text expected, found null"
    ),
    _bad("content a number", turns(USER | {"content": 3}), "messages[0].content: text expected, found a number"),
    _bad("content an object", turns(USER | {"content": {}}), "messages[0].content: text expected, found an object"),
    _bad("half a letter", turns(USER | {"content": "é\ud800"}), "messages[0].content: not UTF-8 text at character 2"),
    _bad("role a number", turns(USER | {"role": 1}), "messages[0].role: text expected, found a number"),
    _bad("role a list", turns(USER | {"role": []}), "messages[0].role: text expected, found a list"),
    _bad("an unknown role", turns(USER, USER | {"role": "bot"}), f"messages[1].role: unknown role 'bot'; {_KNOWN}"),
    _bad("a role in capitals", turns(USER | {"role": "User"}), f"messages[0].role: unknown role 'User'; {_KNOWN}"),
    _bad(
        "a role of 1,000 letters",
        turns(USER | {"role": "x" * 1000}),
        f"messages[0].role: unknown role '{'x' * 40}...'; {_KNOWN}",
    ),
    _bad(
        "a role with an escape",
        turns(USER | {"role": "\x1b[2J"}),
        f"messages[0].role: unknown role '\\x1b[2J'; {_KNOWN}",
    ),
    _bad("two system turns", turns(_SYSTEM, _SYSTEM, USER), "messages[1]: a second system message"),
    _bad("system later", turns(USER, _SYSTEM), "messages[1]: a system message after the first turn"),
    _bad(
        "developer later",
        turns(USER, USER | {"role": "developer"}),
        "messages[1]: a developer message after the first turn",
    ),
    _bad(
        "a system field and a system turn",
        row(system="a", messages=[_SYSTEM, USER]),
        "messages[0]: a system message, and the row has a field system too",
    ),
    _bad("train as a number", turns(USER | {"train": 1}), "messages[0].train: true or false expected, found a number"),
    _bad("weight one half", turns(USER, ANSWER | {"weight": 0.5}), "messages[1].weight: 0 or 1 expected, found 0.5"),
    _bad(
        "weight as true",
        turns(USER, ANSWER | {"weight": True}),
        "messages[1].weight: 0 or 1 expected, found true or false",
    ),
    _bad(
        "weight against train",
        turns(USER, ANSWER | {"weight": 0, "train": True}),
        "messages[1].weight: says the opposite of train",
    ),
    _bad(
        "a picture",
        turns(USER | {"content": [{"type": "text", "text": "a"}, _IMAGE]}),
        "messages[0].content[1]: a part of type image_url: image content cannot be learned, only text",
    ),
    _bad(
        "sound",
        turns(USER | {"content": [{"type": "input_audio"}]}),
        "messages[0].content[0]: a part of type input_audio: audio content cannot be learned, only text",
    ),
    _bad(
        "a part of no known kind",
        turns(USER | {"content": [{"type": "tool_use"}]}),
        "messages[0].content[0]: a part of type tool_use is not known; parts of type text are",
    ),
    _bad(
        "a part without kind",
        turns(USER | {"content": [{"text": "a"}]}),
        "messages[0].content[0].type: missing; found text",
    ),
    _bad(
        "a part of null",
        turns(USER | {"content": [None]}),
        "messages[0].content[0]: an object with type and text expected, found null",
    ),
    _bad(
        "a part with a number",
        turns(USER | {"content": [{"type": "text", "text": 1}]}),
        "messages[0].content[0].text: text expected, found a number",
    ),
    case("no parts", "r.jsonl", turns(USER | {"content": []}), chat(("user", ""))),
    _bad(
        "reasoning of the user",
        turns(USER | {"thinking": "hm"}),
        "messages[0].thinking: a user turn cannot have reasoning",
    ),
    _bad(
        "two reasonings",
        turns(USER, ANSWER | {"thinking": "a", "reasoning": "b"}),
        "messages[1].thinking: says something else than reasoning",
    ),
    _bad(
        "reasoning as a list",
        turns(USER, ANSWER | {"reasoning": ["a"]}),
        "messages[1].reasoning: text expected, found a list",
    ),
]

TOOLS: list[Case] = [
    _bad(
        "a result without any call",
        turns(USER, {"role": "tool", "content": "1"}),
        "messages[1]: a tool's result before any assistant turn",
    ),
    _bad(
        "a result of another call",
        turns(USER, _CALLING, {"role": "tool", "content": "1", "tool_call_id": "c2"}),
        "messages[2].tool_call_id: no call before has the id c2",
    ),
    case(
        "a result without an id",
        "r.jsonl",
        turns(USER, _CALLING, {"role": "tool", "content": "1"}),
        chat(("user", "x"), _CALLED, ("tool", "1")),
    ),
    _bad(
        "a call of the user",
        turns(USER | {"tool_calls": [CALL]}),
        "messages[0].tool_calls: a user turn cannot call tools",
    ),
    _bad(
        "a call as a number",
        turns(USER, ANSWER | {"tool_calls": [1]}),
        "messages[1].tool_calls[0]: a call as an object expected, found a number",
    ),
    _bad(
        "calls as an object",
        turns(USER, ANSWER | {"tool_calls": {"a": 1}}),
        "messages[1].tool_calls: a list of calls expected, found an object",
    ),
    _bad(
        "calls as text",
        turns(USER, ANSWER | {"tool_calls": "f()"}),
        "messages[1].tool_calls: a list of calls expected, found text",
    ),
    _bad(
        "a call without name",
        turns(USER, ANSWER | {"tool_calls": [{"function": {}}]}),
        "messages[1].tool_calls[0].function.name: missing; found none",
    ),
    _bad(
        "a call with an empty name",
        turns(USER, ANSWER | {"tool_calls": [{"name": ""}]}),
        "messages[1].tool_calls[0].name: is empty",
    ),
    _bad(
        "arguments as a list",
        turns(USER, ANSWER | {"tool_calls": [{"name": "f", "arguments": [1]}]}),
        "messages[1].tool_calls[0].arguments: an object or its JSON text expected, found a list",
    ),
    _bad(
        "half a letter in arguments",
        turns(USER, ANSWER | {"tool_calls": [{"name": "f", "arguments": {"a": "\udc00"}}]}),
        "messages[1].tool_calls[0].arguments: holds text that is not UTF-8",
    ),
    _bad(
        "old and new calls",
        turns(USER, _CALLING | {"function_call": {"name": "g"}}),
        "messages[1].function_call: the turn has tool_calls too",
    ),
    _bad("tools as an object", row(messages=[USER], tools={}), "tools: a list of tools expected, found an object"),
    _bad("tools as text", row(messages=[USER], tools="none"), "tools: a list of tools expected, found text"),
    _bad(
        "a tool as text",
        row(messages=[USER], tools=["f"]),
        "tools[0]: an object that describes a tool expected, found text",
    ),
    _bad("a tool without name", row(messages=[USER], tools=[{"type": "function"}]), "tools[0]: the tool has no name"),
    _bad(
        "a tool call id as a number",
        turns(USER, _CALLING, {"role": "tool", "content": "1", "tool_call_id": 1}),
        "messages[2].tool_call_id: text expected, found a number",
    ),
]
