"""Chat rows: every writing of a turn (OpenAI's, sharegpt's) as one `Message`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft_play.data.bad_row import RowProblem, shown_name, shown_names, type_name
from sft_play.data.bodies import Chat, Message
from sft_play.data.fields import note_unused, optional_text, parsed, read_text
from sft_play.data.json_rows import parse_json
from sft_play.data.tools import read_call, read_calls, read_tools, spoken_calls

TURN_FIELDS = ("messages", "conversations", "conversation")
CHAT_FIELDS = (*TURN_FIELDS, "system", "tools")
_PLAIN_ROLES = {role: role for role in ("system", "user", "assistant")}
_PLAIN_SPEAKERS = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")} | {"function": "tool"}
_SPEAKERS = {
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_READ_FIELDS = {"train", "weight", "tool_calls", "function_call", "tool_call_id", "name", *_REASONING}
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA = ("image", "audio", "video", "file")


def speaks_sharegpt(turns: object) -> bool:
    """Whether a list of turns names its speakers with `from`."""
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        try:
            turns = parse_json(turns.strip())
        except (ValueError, RecursionError):
            return False
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "from" in turns[0]


def read_chat(fields: Mapping[str, Any], unused: set[str], *, sharegpt: bool) -> Chat:
    """A row's turns in order, with the row's own `system` text before them and its `tools`.

    Args:
        unused: gets the names of the fields of turns that are not read.
        sharegpt: whether turns are `{"from", "value"}`, else `{"role", "content"}`.

    Raises:
        RowProblem: the first fault.
    """
    key = next((name for name in TURN_FIELDS if fields.get(name) is not None), None)
    if key is None:
        key = next((name for name in TURN_FIELDS if name in fields), TURN_FIELDS[0])
    messages = read_turns(fields, key, unused, sharegpt=sharegpt)
    tools = None
    if len(fields) > 1:
        messages = with_system(messages, fields, f"{key}[0]")
        unused.update(name for name in TURN_FIELDS if name != key and name in fields)
        tools = read_tools(fields.get("tools"))
    return Chat(messages=tuple(messages), tools=tools)


def read_turns(fields: Mapping[str, Any], key: str, unused: set[str], *, sharegpt: bool = False) -> list[Message]:
    """The turns of one field.

    Raises:
        RowProblem: it is no list of turns, or they stand in an order that no template takes.
    """
    if key not in fields:
        raise RowProblem(key, f"missing; the row has {shown_names(fields)}")
    turns = parsed(fields[key], key)
    if not isinstance(turns, list):
        raise RowProblem(key, f"a list of messages expected, found {type_name(turns)}")
    messages: list[Message] = []
    special, plain = False, _PLAIN_SPEAKERS if sharegpt else _PLAIN_ROLES
    role_key, content_key = ("from", "value") if sharegpt else ("role", "content")
    for number, turn in enumerate(turns):
        if type(turn) is dict and len(turn) == 2:
            speaker, content = turn.get(role_key), turn.get(content_key)
            if type(speaker) is str and speaker in plain and type(content) is str and content.isascii():
                special = special or speaker == "system"
                messages.append(Message(role=plain[speaker], content=content))
                continue
        special = True
        messages.append(_message(f"{key}[{number}]", turn, unused, sharegpt))
    if special:
        check_order(key, messages)
        if any(isinstance(turn, dict) and turn.get("weight") is not None for turn in turns):
            return [flagged(message, True) for message in messages]
    return messages


def flagged(message: Message, learned: bool) -> Message:
    """An assistant turn that has no loss flag of its own, with one."""
    return replace(message, train=learned) if message.role == "assistant" and message.train is None else message


def with_system(messages: list[Message], fields: Mapping[str, Any], where: str) -> list[Message]:
    """The turns with the row's own `system` text before them.

    Raises:
        RowProblem: they have a system message already.
    """
    system = optional_text(fields, "system")
    if system and messages and messages[0].role == "system":
        raise RowProblem(where, "a system message, and the row has a field system too")
    return [Message(role="system", content=system), *messages] if system else messages


def check_order(key: str, messages: list[Message]) -> None:
    """System and developer messages stand first, one of each; a tool's result answers a call that was made.

    Raises:
        RowProblem: at the first message that stands wrong.
    """
    seen: set[str] = set()
    calls: set[object] = set()
    for number, message in enumerate(messages):
        role = message.role
        if role in ("system", "developer"):
            if role in seen:
                raise RowProblem(f"{key}[{number}]", f"a second {role} message")
            if seen - {"system", "developer"}:
                raise RowProblem(f"{key}[{number}]", f"a {role} message after the first turn")
        elif role == "tool":
            if "assistant" not in seen:
                raise RowProblem(f"{key}[{number}]", "a tool's result before any assistant turn")
            answers = (message.extra or {}).get("tool_call_id")
            if answers is not None and answers not in calls and None not in calls:
                raise RowProblem(f"{key}[{number}].tool_call_id", f"no call before has the id {shown_name(answers)}")
        seen.add(role)
        calls.update(call.get("id") for call in (message.extra or {}).get("tool_calls", ()))


def _message(where: str, turn: object, unused: set[str], sharegpt: bool) -> Message:
    """A turn as a message, with all that may stand beside role and content."""
    role_key, content_key = ("from", "value") if sharegpt else ("role", "content")
    if not isinstance(turn, dict):
        what = f"an object with {role_key} and {content_key} expected"
        raise RowProblem(where, f"{what}, found {type_name(turn)}")
    if role_key not in turn and ("from" in turn or "role" in turn):
        other = "messages: role, content" if sharegpt else "sharegpt: from, value"
        raise RowProblem(f"{where}.{role_key}", f"missing; found {shown_names(turn)}, as in the format {other}")
    speaker = read_text(turn, role_key, f"{where}.{role_key}")
    roles = _SPEAKERS if sharegpt else _ROLES
    if speaker not in roles:
        raise RowProblem(f"{where}.{role_key}", f"unknown role {_shown_role(speaker)}; known are {', '.join(roles)}")
    role = roles[speaker]
    note_unused(unused, turn, {role_key, content_key} | _READ_FIELDS)
    if sharegpt and speaker == "function_call":
        calls = spoken_calls(turn, f"{where}.value")
        return Message(role=role, content="", train=_flag(turn, where), extra={"tool_calls": calls})
    extra = _extra(turn, role, where) if len(turn) > 2 or content_key not in turn else None
    content = _content(turn, content_key, where, extra, unused)
    return Message(role=role, content=content, train=_flag(turn, where), extra=extra)


def _content(turn: Mapping[str, Any], key: str, where: str, extra: Mapping[str, Any] | None, unused: set[str]) -> str:
    content = turn.get(key)
    if isinstance(content, list):
        return "".join(_part(f"{where}.{key}[{n}]", part, unused) for n, part in enumerate(content))
    if content is None and extra and ("tool_calls" in extra or "reasoning_content" in extra):
        return ""
    return read_text(turn, key, f"{where}.{key}")


def _part(where: str, part: object, unused: set[str]) -> str:
    if not isinstance(part, dict):
        raise RowProblem(where, f"an object with type and text expected, found {type_name(part)}")
    kind = read_text(part, "type", f"{where}.type")
    if kind in _TEXT_PARTS:
        note_unused(unused, part, {"type", "text"}, "message.content.")
        return read_text(part, "text", f"{where}.text")
    if medium := next((one for one in _MEDIA if one in kind), ""):
        raise RowProblem(where, f"a part of type {shown_name(kind)}: {medium} content cannot be learned, only text")
    raise RowProblem(where, f"a part of type {shown_name(kind)} is not known; parts of type text are")


def _flag(turn: Mapping[str, Any], where: str) -> bool | None:
    """`train`, or OpenAI's `weight` of 0 or 1."""
    flag, weight = turn.get("train"), turn.get("weight")
    if flag is not None and not isinstance(flag, bool):
        raise RowProblem(f"{where}.train", f"true or false expected, found {type_name(flag)}")
    if weight is None:
        return flag
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight not in (0, 1):
        found = shown_name(weight) if type(weight) in (int, float) else type_name(weight)
        raise RowProblem(f"{where}.weight", f"0 or 1 expected, found {found}")
    if flag is not None and flag != bool(weight):
        raise RowProblem(f"{where}.weight", "says the opposite of train")
    return bool(weight)


def _extra(turn: Mapping[str, Any], role: str, where: str) -> dict[str, Any] | None:
    """What the template sees beside role and content."""
    extra: dict[str, Any] = {}
    given = turn.get("tool_calls")
    if calls := read_calls(given, f"{where}.tool_calls") if given is not None else None:
        extra["tool_calls"] = calls
    if (legacy := turn.get("function_call")) is not None:
        if calls:
            raise RowProblem(f"{where}.function_call", "the turn has tool_calls too")
        extra["tool_calls"] = [read_call(f"{where}.function_call", legacy)]
    if role != "assistant" and "tool_calls" in extra:
        raise RowProblem(f"{where}.tool_calls", f"a {role} turn cannot call tools")
    for field in ("tool_call_id", "name"):
        if text := optional_text(turn, field, f"{where}.{field}"):
            extra[field] = text
    thoughts = {name: text for name in _REASONING if (text := optional_text(turn, name, f"{where}.{name}"))}
    if len(set(thoughts.values())) > 1:
        raise RowProblem(f"{where}.{list(thoughts)[1]}", f"says something else than {next(iter(thoughts))}")
    if thoughts:
        name, text = next(iter(thoughts.items()))
        if role != "assistant":
            raise RowProblem(f"{where}.{name}", f"a {role} turn cannot have reasoning")
        extra["reasoning_content"] = text
    return extra or None


def _shown_role(role: str) -> str:
    """A role in quotes, cut where it is long."""
    return repr(role if len(role) <= 40 else role[:40] + "...")
