"""Tools and their calls, in whichever writing, as OpenAI writes them: what chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sft_play.data.bad_row import RowProblem, type_name
from sft_play.data.fields import check_nested, optional_text, parsed, read_text
from sft_play.data.json_rows import parse_json


def read_tools(value: object) -> tuple[Mapping[str, Any], ...] | None:
    """The tools of a row: a list of objects, or its JSON text; None where there are none.

    Raises:
        RowProblem: it is something else.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    tools = parsed(value, "tools")
    if not isinstance(tools, list):
        raise RowProblem("tools", f"a list of tools expected, found {type_name(tools)}")
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if not isinstance(tool, dict):
            raise RowProblem(where, f"an object that describes a tool expected, found {type_name(tool)}")
        described = tool.get("function", tool)
        if not isinstance(described, dict) or not isinstance(described.get("name"), str):
            raise RowProblem(where, "the tool has no name")
        check_nested(tool, where)
    return tuple(tools) or None


def read_calls(value: object, where: str) -> list[dict[str, Any]]:
    """A turn's calls of tools; a list, or its JSON text.

    Raises:
        RowProblem: it is something else.
    """
    calls = parsed(value, where) if value != "" else []
    if not isinstance(calls, list):
        raise RowProblem(where, f"a list of calls expected, found {type_name(calls)}")
    return [read_call(f"{where}[{number}]", call) for number, call in enumerate(calls)]


def spoken_calls(turn: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Sharegpt's function_call turns: the call, or a list of calls, as JSON in the text.

    Raises:
        RowProblem: it is something else.
    """
    value = turn.get("value")
    if isinstance(value, str):
        try:
            value = parse_json(read_text(turn, "value", where).strip())
        except (ValueError, RecursionError):
            raise RowProblem(where, 'a call as JSON expected: {"name": ..., "arguments": {...}}') from None
    if isinstance(value, list) and value:
        return [read_call(f"{where}[{number}]", call) for number, call in enumerate(value)]
    return [read_call(where, value)]


def read_call(where: str, call: object) -> dict[str, Any]:
    """One call in OpenAI's writing, its arguments as an object where they are one: templates write them with tojson.

    Raises:
        RowProblem: it is something else.
    """
    if not isinstance(call, dict):
        raise RowProblem(where, f"a call as an object expected, found {type_name(call)}")
    if "function" in call:
        function, inside = call["function"], f"{where}.function"
    else:
        function, inside = call, where
    if not isinstance(function, dict):
        raise RowProblem(inside, f"an object with name and arguments expected, found {type_name(function)}")
    name = read_text(function, "name", f"{inside}.name")
    if not name:
        raise RowProblem(f"{inside}.name", "is empty")
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": _arguments(function, inside)}}
    if call_id := optional_text(call, "id", f"{where}.id"):
        made = {"id": call_id} | made
    return made


def _arguments(function: Mapping[str, Any], where: str) -> Any:
    """An object; JSON text of one is read, other text is kept as it is."""
    value = function.get("arguments", function.get("parameters"))
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        text = read_text({"arguments": value}, "arguments", f"{where}.arguments")
        try:
            value = parse_json(text.strip())
        except (ValueError, RecursionError):
            return text
        if not isinstance(value, dict):
            return text
    if not isinstance(value, dict):
        raise RowProblem(f"{where}.arguments", f"an object or its JSON text expected, found {type_name(value)}")
    check_nested(value, f"{where}.arguments")
    return value
