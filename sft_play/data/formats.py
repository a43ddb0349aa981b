"""Row formats: which one a file has, and every row as one of three frozen values.

messages, sharegpt          -> Chat(messages)
alpaca, prompt_completion   -> Pair(system, user, plain_prompt, completion)
text                        -> Text(text)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sft_play.data.raw import BadRow, beginning_of, read_raw, type_name
from sft_play.data.sources import DataFile
from sft_play.errors import DataError

ROLES = ("system", "user", "assistant")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
_LATER_ROLES = ("tool", "function", "function_call", "function_response", "observation", "developer")
_LATER_FIELDS = ("tool_calls", "reasoning_content", "thinking", "reasoning", "function_call")
_FIELDS = {
    "messages": ("messages", "conversations", "conversation"),
    "sharegpt": ("conversations", "system"),
    "alpaca": ("instruction", "input", "output", "system"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn.

    Attributes:
        train: its own loss flag, None where the row gives none.
        extra: what else the template sees of the turn: `tool_calls`, `tool_call_id`, `name`, `reasoning_content`.
    """

    role: str
    content: str
    train: bool | None = None
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Turns in order, and the tools that the template is told of (JSON schemas, as OpenAI writes them)."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A question and its answer: `system` and `user` for a chat template, `plain_prompt` where there is none."""

    system: str
    user: str
    plain_prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Running text, all of it learned."""

    text: str


Body = Chat | Pair | Text


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A well-formed row and where it stands."""

    file: DataFile
    line: int
    format: str
    body: Body

    @property
    def characters(self) -> int:
        """Length of its text."""
        body = self.body
        if isinstance(body, Chat):
            return sum(len(message.content) for message in body.messages)
        return len(body.text) if isinstance(body, Text) else len(body.plain_prompt) + len(body.completion)

    def bad(self, field: str, reason: str) -> BadRow:
        """The row as a bad one, for faults that only show later."""
        beginning = beginning_of(first_text(self.body))
        return BadRow(shown=self.file.shown, line=self.line, field=field, reason=reason, beginning=beginning)


class _Problem(Exception):
    """A fault of one row: the field and the reason."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field, self.reason = field, reason


def read_rows(file: DataFile, columns: Mapping[str, str], unused: set[str]) -> Iterator[Row | BadRow]:
    """Rows of one file, all in one format: the file's own, or the one of its first row that has any.

    Args:
        columns: the format's field names to the file's.
        unused: gets the names of the fields that the format does not read.

    Raises:
        DataError: `columns` names a field that no format has, or the file cannot be read.
    """
    check_columns(columns)
    name = "" if file.format == "auto" else str(file.format)
    for raw in read_raw(file):
        if isinstance(raw, BadRow):
            yield raw
            continue
        line, value = raw
        try:
            fields = _rename(value, columns)
            name = name or _detect(fields)
            unused.update(key for key in fields if key not in _FIELDS[name])
            yield Row(file=file, line=line, format=name, body=_NORMALISE[name](fields, unused))
        except _Problem as problem:
            begins = beginning_of(value)
            yield BadRow(shown=file.shown, line=line, field=problem.field, reason=problem.reason, beginning=begins)


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuse a mapping of fields that no format has.

    Raises:
        DataError: with the fields there are.
    """
    known = sorted({field for fields in _FIELDS.values() for field in fields})
    for field in columns:
        if field not in known:
            fix = f"map one of {', '.join(known)}, as in columns: {{prompt: question}}"
            raise DataError(f"no format has a field {field!r}", where="data.columns", fix=fix)


def first_text(body: Body) -> str:
    """The text a row begins with."""
    if isinstance(body, Chat):
        return body.messages[0].content if body.messages else ""
    return body.text if isinstance(body, Text) else body.plain_prompt


def is_blank(body: Body) -> bool:
    """Whether nothing is left to learn from: no text at all, or no answer."""
    if isinstance(body, Chat):
        return not any(message.content.strip() for message in body.messages)
    return not (body.text if isinstance(body, Text) else body.completion).strip()


def _rename(value: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    if not columns:
        return value
    renamed = {key: item for key, item in value.items() if key not in columns.values() and key not in columns}
    for field, column in columns.items():
        if column not in value:
            raise _Problem(column, f"missing (data.columns maps it to {field}); the row has {_names(value)}")
        renamed[field] = value[column]
    return renamed


def _detect(fields: dict[str, Any]) -> str:
    for key in ("messages", "conversations", "conversation"):
        if key in fields:
            return "sharegpt" if key == "conversations" and _speaks_sharegpt(fields[key]) else "messages"
    if "instruction" in fields and "output" in fields:
        return "alpaca"
    if "prompt" in fields and "completion" in fields:
        return "prompt_completion"
    if "text" in fields:
        return "text"
    raise _Problem("", f"no known format has the fields {_names(fields)}; name them in data.columns")


def _speaks_sharegpt(turns: object) -> bool:
    turns = _parsed(turns)
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "from" in turns[0]


def _names(fields: Mapping[str, Any]) -> str:
    return ", ".join(map(str, fields)) or "none"


def _parsed(value: object) -> object:
    """A list written as JSON text, which is how CSV holds one."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _messages(fields: dict[str, Any], unused: set[str]) -> Body:
    key = next((name for name in _FIELDS["messages"] if name in fields), "messages")
    turns = _turns(fields, key)
    return Chat(messages=_in_order(key, tuple(_message(f"{key}[{n}]", t, unused) for n, t in enumerate(turns))))


def _turns(fields: dict[str, Any], key: str) -> list[Any]:
    if key not in fields:
        raise _Problem(key, f"missing; the row has {_names(fields)}")
    turns = _parsed(fields[key])
    if not isinstance(turns, list):
        raise _Problem(key, f"a list of messages expected, found {type_name(turns)}")
    return turns


def _message(where: str, turn: object, unused: set[str]) -> Message:
    turn = _object(where, turn)
    role = _text(turn, "role", f"{where}.role")
    _check_role(role, ROLES, f"{where}.role")
    for field in turn:
        if field in _LATER_FIELDS and turn[field]:
            raise _Problem(f"{where}.{field}", "not available yet")
        if field not in ("role", "content", "train") and turn[field] is not None:
            unused.add(f"message.{field}")
    return Message(role=role, content=_content(turn, where), train=_flag(turn, where))


def _object(where: str, turn: object) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise _Problem(where, f"an object with role and content expected, found {type_name(turn)}")
    return turn


def _check_role(role: str, known: Mapping[str, str] | tuple[str, ...], where: str) -> None:
    if role in known:
        return
    if role in _LATER_ROLES:
        raise _Problem(where, f"the role {role!r} is not available yet")
    raise _Problem(where, f"unknown role {role!r}; known are {', '.join(known)}")


def _content(turn: dict[str, Any], where: str) -> str:
    parts = turn.get("content")
    if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], dict) and parts[0].get("type") == "text":
        return _text(parts[0], "text", f"{where}.content[0].text")
    return _text(turn, "content", f"{where}.content")


def _flag(turn: dict[str, Any], where: str) -> bool | None:
    flag = turn.get("train")
    if flag is not None and not isinstance(flag, bool):
        raise _Problem(f"{where}.train", f"true or false expected, found {type_name(flag)}")
    return flag


def _sharegpt(fields: dict[str, Any], unused: set[str]) -> Body:
    turns = _turns(fields, "conversations")
    messages = [_sharegpt_message(f"conversations[{n}]", turn, unused) for n, turn in enumerate(turns)]
    if system := _optional_text(fields, "system"):
        messages.insert(0, Message(role="system", content=system))
    return Chat(messages=_in_order("conversations", tuple(messages)))


def _sharegpt_message(where: str, turn: object, unused: set[str]) -> Message:
    turn = _object(where, turn)
    speaker = _text(turn, "from", f"{where}.from")
    _check_role(speaker, _SHAREGPT_ROLES, f"{where}.from")
    content = _text(turn, "value", f"{where}.value")
    unused.update(f"message.{field}" for field in turn if field not in ("from", "value", "train"))
    return Message(role=_SHAREGPT_ROLES[speaker], content=content, train=_flag(turn, where))


def _in_order(key: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    for number, message in enumerate(messages):
        if message.role == "system" and number:
            again = messages[0].role == "system"
            reason = "a second system message" if again else "a system message after the first turn"
            raise _Problem(f"{key}[{number}]", reason)
    return messages


def _alpaca(fields: dict[str, Any], _: set[str]) -> Body:
    instruction, output = _text(fields, "instruction"), _text(fields, "output")
    extra, system = _optional_text(fields, "input"), _optional_text(fields, "system")
    user = f"{instruction}\n\n{extra}" if extra else instruction
    head = f"{system}\n\n" if system else ""
    middle = f"### Input:\n{extra}\n\n" if extra else ""
    plain = f"{head}### Instruction:\n{instruction}\n\n{middle}### Response:\n"
    return Pair(system=system, user=user, plain_prompt=plain, completion=output)


def _prompt_completion(fields: dict[str, Any], _: set[str]) -> Body:
    prompt = _text(fields, "prompt")
    return Pair(system="", user=prompt, plain_prompt=prompt, completion=_text(fields, "completion"))


def _plain_text(fields: dict[str, Any], _: set[str]) -> Body:
    return Text(text=_text(fields, "text"))


def _text(fields: Mapping[str, Any], key: str, where: str = "") -> str:
    where = where or key
    if key not in fields:
        raise _Problem(where, f"missing; found {_names(fields)}")
    value = fields[key]
    if not isinstance(value, str):
        raise _Problem(where, f"text expected, found {type_name(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _Problem(where, f"not UTF-8 text at character {error.start + 1}") from None
    return value


def _optional_text(fields: Mapping[str, Any], key: str) -> str:
    return "" if fields.get(key) is None else _text(fields, key)


_NORMALISE: dict[str, Callable[[dict[str, Any], set[str]], Body]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "text": _plain_text,
}
