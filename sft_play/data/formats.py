"""Row formats: which one a file has, and every row as one of three frozen values.

messages, sharegpt                                             -> Chat(messages, tools)
alpaca, prompt_completion, user_assistant, input_target        -> Pair(system, user, plain_prompt, completion)
prompt_completion whose prompt and completion are lists of turns  -> Chat
text, documents                                                -> Text(text)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sft_play.data.bad_row import BadRow, RowProblem, beginning_of, shown_name, shown_names, type_name
from sft_play.data.bodies import Body, Chat, Message, Pair, Row, Text, first_text, is_blank
from sft_play.data.fields import note_unused, optional_text, read_text
from sft_play.data.json_rows import parse_json
from sft_play.data.raw import read_raw
from sft_play.data.sources import DataFile
from sft_play.data.tools import read_tools
from sft_play.data.turns import (
    CHAT_FIELDS,
    TURN_FIELDS,
    check_order,
    flagged,
    read_chat,
    read_turns,
    speaks_sharegpt,
    with_system,
)
from sft_play.errors import DataError

__all__ = [
    "FORMATS",
    "PAIR_FORMATS",
    "Body",
    "Chat",
    "Message",
    "Pair",
    "Row",
    "Text",
    "check_columns",
    "first_text",
    "is_blank",
    "read_rows",
]

_SHAPES = 1000
_REQUIRED = {
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "user_assistant": ("user", "assistant"),
    "input_target": ("input", "target"),
    "text": ("text",),
}
"""Found by the fields that they need, in this order, after the formats of turns."""
_FIELDS = {
    "messages": CHAT_FIELDS,
    "sharegpt": CHAT_FIELDS,
    "alpaca": ("instruction", "input", "output", "system"),
    "prompt_completion": ("system", "prompt", "completion", "tools"),
    "user_assistant": ("system", "user", "assistant"),
    "input_target": ("system", "input", "target"),
    "text": ("text",),
}
FORMATS = tuple(_FIELDS)
PAIR_FORMATS = ("alpaca", "prompt_completion", "user_assistant", "input_target")
"""Formats whose rows are laid out as plain text where the tokenizer has no chat template."""
_LOOK_ALIKES = (
    (("instruction", "response", "context"), "{output: response, input: context}"),
    (("instruction", "response"), "{output: response}"),
    (("question", "answer"), "{prompt: question, completion: answer}"),
    (("query", "response"), "{prompt: query, completion: response}"),
    (("prompt", "response"), "{completion: response}"),
    (("input", "output"), "{target: output}"),
    (("prompt", "chosen"), "{completion: chosen}, if the chosen answers are what is to be learned"),
)
"""Fields that are often seen and mean something else in other files: mapped only when the user says so."""


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
    shapes: set[tuple[str, ...]] = set()
    for raw in read_raw(file):
        if isinstance(raw, BadRow):
            yield raw
            continue
        line, value = raw
        fields = value
        try:
            if columns:
                fields = _rename(value, columns)
            name = name or _detect(fields, columns)
            if (shape := tuple(fields)) not in shapes and len(shapes) < _SHAPES:
                shapes.add(shape)
                note_unused(unused, dict.fromkeys(shape, True), set(_FIELDS[name]), prefix="")
            yield Row(file=file, line=line, format=name, body=_NORMALISE[name](fields, unused))
        except RowProblem as problem:
            reason = problem.reason + _mixed(name, fields)
            begins = beginning_of(value)
            yield BadRow(shown=file.shown, line=line, field=problem.field, reason=reason, beginning=begins)


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuse a mapping of fields that no format has, or of two fields to one column.

    Raises:
        DataError: with the fields there are.
    """
    known = sorted({field for fields in _FIELDS.values() for field in fields})
    for field in columns:
        if field not in known:
            fix = f"map one of {', '.join(known)}, as in columns: {{prompt: question}}"
            raise DataError(f"no format has a field {field!r}", where="data.columns", fix=fix)
    twice = next((one for one in columns.values() if list(columns.values()).count(one) > 1), None)
    if twice is not None:
        fields = ", ".join(field for field, column in columns.items() if column == twice)
        fix = "name a column of its own for each"
        raise DataError(f"the column {shown_name(twice)} stands for {fields}", where="data.columns", fix=fix)
    if columns and not any(columns.keys() <= set(fields) for fields in _FIELDS.values()):
        what = f"no one format has all the fields {', '.join(columns)}"
        raise DataError(what, where="data.columns", fix="map the fields of one format, as docs/data.md lists them")


def _rename(value: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    renamed = {key: item for key, item in value.items() if key not in columns.values() and key not in columns}
    for field, column in columns.items():
        if column not in value:
            reason = f"missing (data.columns maps it to {field}); the row has {shown_names(value)}"
            raise RowProblem(shown_name(column), reason)
        renamed[field] = value[column]
    return renamed


def _detect(fields: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """The format of a row.

    Raises:
        RowProblem: it has the fields of none.
    """
    fitting = [name for name in _FIELDS if columns.keys() <= set(_FIELDS[name])]
    # A Parquet row has all columns of the file: those that are null tell nothing while another format has values.
    given = {key: value for key, value in fields.items() if value is not None}
    name = _format_of(fields, given, fitting) or _format_of(fields, fields, fitting)
    if name:
        return name
    advice = "name them in data.columns"
    for names, mapping in _LOOK_ALIKES:
        if all(one in fields for one in names):
            advice = f"name them: data.columns: {mapping}"
            break
    raise RowProblem("", f"no known format has the fields {shown_names(fields)}; {advice}")


def _format_of(fields: Mapping[str, Any], given: Mapping[str, Any], fitting: list[str]) -> str:
    turns = next((given[key] for key in TURN_FIELDS if key in given), None)
    if any(key in given for key in TURN_FIELDS):
        name = "sharegpt" if speaks_sharegpt(turns) else "messages"
        if name in fitting:
            return name
    for name, required in _REQUIRED.items():
        if name in fitting and all(key in fields for key in required) and any(key in given for key in required):
            return name
    return ""


def _mixed(name: str, fields: Mapping[str, Any]) -> str:
    """What to add to the fault of a row that lacks a field of its file's format and looks like another format's."""
    if not name:
        return ""
    lacking = _REQUIRED.get(name, ())
    has_all = all(fields.get(key) is not None for key in lacking)
    if name in ("messages", "sharegpt"):
        has_all = any(fields.get(key) is not None for key in TURN_FIELDS)
    if has_all:
        return ""
    try:
        other = _detect(fields, {})
    except RowProblem:
        return ""
    if other == name:
        return ""
    return f"; the row looks like {other} in a file of {name}: put it into a file of its own"


def _messages(fields: dict[str, Any], unused: set[str]) -> Body:
    return read_chat(fields, unused, sharegpt=False)


def _sharegpt(fields: dict[str, Any], unused: set[str]) -> Body:
    return read_chat(fields, unused, sharegpt=True)


def _alpaca(fields: dict[str, Any], _: set[str]) -> Body:
    instruction, output = read_text(fields, "instruction"), read_text(fields, "output")
    extra, system = optional_text(fields, "input"), optional_text(fields, "system")
    user = f"{instruction}\n\n{extra}" if extra else instruction
    head = f"{system}\n\n" if system else ""
    middle = f"### Input:\n{extra}\n\n" if extra else ""
    plain = f"{head}### Instruction:\n{instruction}\n\n{middle}### Response:\n"
    return Pair(system=system, user=user, plain_prompt=plain, completion=output)


def _prompt_completion(fields: dict[str, Any], unused: set[str]) -> Body:
    prompt = fields.get("prompt")
    if _holds_turns(prompt) or _holds_turns(fields.get("completion")):
        return _conversation(fields, unused)
    if fields.get("tools"):
        unused.add("tools")
    return _pair(fields, "prompt", "completion")


def _pair(fields: dict[str, Any], question: str, answer: str) -> Pair:
    system, user = optional_text(fields, "system"), read_text(fields, question)
    plain = f"{system}\n\n{user}" if system else user
    return Pair(system=system, user=user, plain_prompt=plain, completion=read_text(fields, answer))


def _holds_turns(value: object) -> bool:
    """Whether a value is a list of turns or, as in CSV, the JSON text of one; other text in brackets is text."""
    if isinstance(value, str) and value.startswith("[{") and value.endswith("}]"):
        try:
            value = parse_json(value)
        except (ValueError, RecursionError):
            return False
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and "role" in one for one in value)


def _conversation(fields: dict[str, Any], unused: set[str]) -> Body:
    """Prompt and completion as turns, as trl has them: only the completion's answers have the loss flag."""
    for key in ("prompt", "completion"):
        if key in fields and not _holds_turns(fields[key]):
            found = type_name(fields[key])
            raise RowProblem(key, f"a list of messages expected, as its counterpart is one; found {found}")
    prompt = [flagged(one, False) for one in read_turns(fields, "prompt", unused)]
    completion = [flagged(one, True) for one in read_turns(fields, "completion", unused)]
    check_order("prompt + completion", [*prompt, *completion])
    messages = with_system([*prompt, *completion], fields, "prompt[0]")
    return Chat(messages=tuple(messages), tools=read_tools(fields.get("tools")))


def _user_assistant(fields: dict[str, Any], _: set[str]) -> Body:
    return _pair(fields, "user", "assistant")


def _input_target(fields: dict[str, Any], _: set[str]) -> Body:
    return _pair(fields, "input", "target")


def _plain_text(fields: dict[str, Any], _: set[str]) -> Body:
    return Text(text=read_text(fields, "text"))


_NORMALISE: dict[str, Callable[[dict[str, Any], set[str]], Body]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "user_assistant": _user_assistant,
    "input_target": _input_target,
    "text": _plain_text,
}
