"""Single fields of a row: text, lists written as text, and the names of fields that are not read."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from sft_play.data.bad_row import RowProblem, shown_name, shown_names, type_name
from sft_play.data.json_rows import json_reason, parse_json

_UNUSED_NAMES = 100


def read_text(fields: Mapping[str, Any], key: str, where: str = "") -> str:
    """A field that has to be text.

    Raises:
        RowProblem: it is missing, of another type, or cannot be written as UTF-8.
    """
    where = where or key
    if key not in fields:
        raise RowProblem(where, f"missing; found {shown_names(fields)}")
    value = fields[key]
    if not isinstance(value, str):
        raise RowProblem(where, f"text expected, found {type_name(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RowProblem(where, f"not UTF-8 text at character {error.start + 1}") from None
    return value


def optional_text(fields: Mapping[str, Any], key: str, where: str = "") -> str:
    """A field that may be missing, null or empty."""
    return "" if fields.get(key) is None else read_text(fields, key, where)


def parsed(value: object, where: str) -> object:
    """A list written as JSON text, which is how CSV holds one.

    Raises:
        RowProblem: it begins like a list and is not JSON.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return parse_json(value.strip())
        except (ValueError, RecursionError) as error:
            raise RowProblem(where, json_reason(error)) from None
    return value


def check_nested(value: object, where: str) -> None:
    """Refuse what JSON cannot write anywhere in a nested value: half letters (lone surrogates), NaN, dates, bytes.

    Raises:
        RowProblem: there is one.
    """
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, str) and not one.isascii():
            try:
                one.encode()
            except UnicodeEncodeError:
                raise RowProblem(where, "holds text that is not UTF-8") from None
        elif isinstance(one, float) and not isfinite(one):
            raise RowProblem(where, "holds a number that is not finite")
        elif one is not None and not isinstance(one, str | int | float):
            raise RowProblem(where, f"holds a value of type {type_name(one)}, which JSON does not have")


def note_unused(unused: set[str], turn: Mapping[str, Any], known: set[str], prefix: str = "message.") -> None:
    """Take note of fields that have a value and are not read; a bounded number of them."""
    for field, value in turn.items():
        if field not in known and value is not None and len(unused) < _UNUSED_NAMES:
            unused.add(prefix + shown_name(field))
