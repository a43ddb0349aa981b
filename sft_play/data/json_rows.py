"""Rows of JSON files: one a line, or a list of them. Read strictly: what Python takes and JSON does not is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import IO, Any, cast

from sft_play.data.bad_row import BEGINNING_CHARACTERS, BadRow, beginning_of, shown_name, type_name
from sft_play.data.sources import DataFile
from sft_play.errors import DataError

RawRow = tuple[int, dict[str, Any]]
"""The line, and the fields with their values."""
_SPACE = " \t\r\n"


class _RefusedJson(ValueError):
    """JSON that Python would accept and that is wrong as data."""


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _RefusedJson(f"the field {shown_name(twice)} stands twice in one object")
    return fields


def _refuse_constant(name: str) -> None:
    raise _RefusedJson(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant)
_SCAN = cast(Any, _DECODER).scan_once


def parse_json(text: str) -> Any:
    """A value from JSON text without blanks around it.

    Raises:
        ValueError: it is not JSON; `json_reason` says why.
        RecursionError: nested too deeply.
    """
    try:
        value, end = _SCAN(text, 0)
    except StopIteration as error:
        raise json.JSONDecodeError("Expecting value", text, error.value) from None
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, _skip_space(text, end))
    return value


def json_reason(error: Exception) -> str:
    """Why text is not JSON."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start + 1}"
    if isinstance(error, json.JSONDecodeError):
        what = error.msg.removesuffix(" at")
        return f"not JSON: {what[0].lower() + what[1:]} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    # The one other ValueError is that of an integer beyond Python's limit of digits.
    return str(error) if isinstance(error, _RefusedJson) else "a number has too many digits"


def read_jsonl(file: DataFile, stream: IO[bytes]) -> Iterator[RawRow | BadRow]:
    """One object a line; blank lines are passed over.

    Raises:
        DataError: the file is a JSON list over several lines.
    """
    first = True
    for number, line in enumerate(stream, 1):
        stripped = line.strip()
        if not stripped:
            continue
        try:
            value = parse_json(stripped.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            if first and (stripped == b"[" or stripped.startswith(b"[{")):
                fix = "name it .json, or write one row a line"
                raise DataError("the file is a JSON list, not one row a line", where=file.shown, fix=fix) from error
            cut_off = stripped.startswith(b"{") and not line.endswith(b"\n") and not stripped.endswith(b"}")
            yield _bad_json(file, number, error, stripped, cut_off)
            continue
        finally:
            first = False
        yield (number, value) if type(value) is dict else _object_row(file, number, value)


def read_json(file: DataFile, stream: IO[bytes]) -> Iterator[RawRow | BadRow]:
    """A list of objects; a file with one object a line is read too.

    Raises:
        DataError: it is neither.
    """
    raw = stream.read()
    first = raw.lstrip()[:1]
    if first == b"[":
        yield from _read_array(file, raw)
    elif first:
        yield from _read_jsonl_in_json(file, raw)


def _bad_json(file: DataFile, line: int, error: Exception, raw: bytes, cut_off: bool) -> BadRow:
    reason = json_reason(error)
    if cut_off and isinstance(error, json.JSONDecodeError) and error.msg != "Extra data":
        reason = "the last line is cut off"
    beginning = beginning_of(raw[: 4 * BEGINNING_CHARACTERS + 4].decode("utf-8", errors="backslashreplace"))
    return BadRow(shown=file.shown, line=line, field="", reason=reason, beginning=beginning)


def _object_row(file: DataFile, line: int, value: object) -> RawRow | BadRow:
    if isinstance(value, dict):
        return line, value
    reason = f"an object with fields expected, found {type_name(value)}"
    return BadRow(shown=file.shown, line=line, field="", reason=reason, beginning=beginning_of(value))


def _read_jsonl_in_json(file: DataFile, raw: bytes) -> Iterator[RawRow | BadRow]:
    try:
        json.loads(raw.lstrip().splitlines()[0])
    except (ValueError, RecursionError) as error:
        fix = "write the rows as a list [{...}, {...}], or one a line in a .jsonl file"
        raise DataError(
            "the file is neither a JSON list of rows nor one row a line", where=file.shown, fix=fix
        ) from error
    yield from read_jsonl(file, io.BytesIO(raw))


def _read_array(file: DataFile, raw: bytes) -> Iterator[RawRow | BadRow]:
    """A list of rows, decoded one by one so that each has its line; the first fault ends it."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        start_of_line = raw.rfind(b"\n", 0, error.start) + 1
        error.start, error.object = error.start - start_of_line, raw[start_of_line:]
        yield _bad_json(file, line, error, error.object.splitlines()[0], False)
        return
    position, line, seen = _skip_space(text, text.index("[") + 1), 1, 0
    while text[position : position + 1] != "]":
        line, seen = line + text.count("\n", seen, position), position
        try:
            value, position = _DECODER.raw_decode(text, position)
            yield _object_row(file, line, value)
            position = _after_comma(text, position)
        except (ValueError, RecursionError) as error:
            yield _bad_array(file, line, error, text, seen)
            return
    if rest := text[position + 1 :].strip():
        line += text.count("\n", seen, position)
        yield BadRow(shown=file.shown, line=line, field="", reason="text after the list", beginning=beginning_of(rest))


def _bad_array(file: DataFile, line: int, error: Exception, text: str, start: int) -> BadRow:
    if isinstance(error, json.JSONDecodeError):
        at_end = error.pos >= len(text.rstrip())
        line, reason = error.lineno, "the list is cut off" if at_end else json_reason(error)
    else:
        reason = json_reason(error)
    beginning = beginning_of(text[start : start + 2 * BEGINNING_CHARACTERS])
    return BadRow(shown=file.shown, line=line, field="", reason=reason, beginning=beginning)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _after_comma(text: str, position: int) -> int:
    position = _skip_space(text, position)
    if text[position : position + 1] == "]":
        return position
    if text[position : position + 1] != ",":
        raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
    after = _skip_space(text, position + 1)
    if text[after : after + 1] in ("]", ""):
        raise json.JSONDecodeError("Expecting value", text, after)
    return after
