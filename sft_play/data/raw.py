"""From files to raw rows: one dictionary a row with its line, or the reason why there is none.

A raw row is `(line, {field: value})`. A row that cannot be read is a `BadRow` in its place and reading goes on
where the format allows it, so that one pass finds every fault of a file.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sft_play.data.sources import DataFile, FileKind
from sft_play.errors import DataError

BEGINNING_CHARACTERS = 60
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_PARQUET_BATCH_ROWS = 1000
_SPACE = " \t\r\n"


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that cannot be used: where, which field, why, and how the row begins."""

    shown: str
    line: int
    field: str
    reason: str
    beginning: str

    def error(self) -> DataError:
        """The row as the line a user reads."""
        field = f"{self.field}: " if self.field else ""
        begins = f" (row begins {self.beginning!r})" if self.beginning else ""
        return DataError(f"{field}{self.reason}{begins}", where=f"{self.shown}:{self.line}")


RawRow = tuple[int, dict[str, Any]]


class _RefusedJson(ValueError):
    """JSON that Python would accept and that is wrong as data."""


def read_raw(file: DataFile) -> Iterator[RawRow | BadRow]:
    """Rows of one file in order; lines count from 1, of Parquet files rows do.

    Raises:
        DataError: the file cannot be opened or its container is damaged.
    """
    readers = {FileKind.JSONL: _read_jsonl, FileKind.JSON: _read_json, FileKind.CSV: _read_csv}
    try:
        if file.kind is FileKind.PARQUET:
            yield from _read_parquet(file)
        else:
            with _open(file) as stream:
                yield from readers[file.kind](file, stream)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"damaged gzip file: {error}", where=file.shown, fix="fetch or pack the file again") from error
    except OSError as error:
        fix = "check that the file exists and that you may read it"
        raise DataError(f"cannot be read: {error.strerror or error}", where=file.shown, fix=fix) from error


def beginning_of(value: object) -> str:
    """The first characters of a row, for messages."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= BEGINNING_CHARACTERS else text[:BEGINNING_CHARACTERS] + "..."


def _open(file: DataFile) -> IO[bytes]:
    stream: Any = gzip.open(file.path, "rb") if file.gzipped else file.path.open("rb")  # noqa: SIM115
    buffered = io.BufferedReader(stream)
    head = buffered.peek(4)[:4]
    if head.startswith(_UTF16_BOMS):
        buffered.close()
        raise DataError("the file is UTF-16", where=file.shown, fix="save it as UTF-8")
    if head.startswith(_UTF8_BOM):
        buffered.read(len(_UTF8_BOM))
    return buffered


def _read_jsonl(file: DataFile, stream: IO[bytes]) -> Iterator[RawRow | BadRow]:
    decode = _json_decoder().decode
    for number, line in enumerate(stream, 1):
        stripped = line.strip()
        if not stripped:
            continue
        try:
            value = decode(stripped.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            cut_off = not line.endswith(b"\n") and not stripped.endswith(b"}")
            yield _bad_json(file, number, error, stripped, cut_off)
            continue
        yield _object_row(file, number, value)


def _bad_json(file: DataFile, line: int, error: Exception, raw: bytes, cut_off: bool) -> BadRow:
    reason = _json_reason(error)
    if cut_off and isinstance(error, json.JSONDecodeError) and error.msg != "Extra data":
        reason = "the last line is cut off"
    beginning = beginning_of(raw.decode("utf-8", errors="backslashreplace"))
    return BadRow(shown=file.shown, line=line, field="", reason=reason, beginning=beginning)


def _json_reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start + 1}"
    if isinstance(error, json.JSONDecodeError):
        what = error.msg.removesuffix(" at")
        return f"not JSON: {what[0].lower() + what[1:]} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    # The one other ValueError is that of an integer beyond Python's limit of digits.
    return str(error) if isinstance(error, _RefusedJson) else "a number has too many digits"


def _object_row(file: DataFile, line: int, value: object) -> RawRow | BadRow:
    if isinstance(value, dict):
        return line, value
    reason = f"an object with fields expected, found {type_name(value)}"
    return BadRow(shown=file.shown, line=line, field="", reason=reason, beginning=beginning_of(value))


def type_name(value: object) -> str:
    """What JSON calls a value's type, with its article."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _json_decoder() -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _RefusedJson(f"the field {twice!r} stands twice in one object")
    return fields


def _refuse_constant(name: str) -> None:
    raise _RefusedJson(f"{name} is not JSON")


def _read_json(file: DataFile, stream: IO[bytes]) -> Iterator[RawRow | BadRow]:
    raw = stream.read()
    first = raw.lstrip()[:1]
    if first == b"[":
        yield from _read_array(file, raw)
    elif first:
        yield from _read_jsonl_in_json(file, raw)


def _read_jsonl_in_json(file: DataFile, raw: bytes) -> Iterator[RawRow | BadRow]:
    try:
        json.loads(raw.lstrip().splitlines()[0])
    except ValueError as error:
        fix = "write the rows as a list [{...}, {...}], or one a line in a .jsonl file"
        raise DataError(
            "the file is neither a JSON list of rows nor one row a line", where=file.shown, fix=fix
        ) from error
    yield from _read_jsonl(file, io.BytesIO(raw))


def _read_array(file: DataFile, raw: bytes) -> Iterator[RawRow | BadRow]:
    """A list of rows, decoded one by one so that each has its line; the first fault ends it."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        start_of_line = raw.rfind(b"\n", 0, error.start) + 1
        yield _bad_json(file, line, error, raw[start_of_line:].splitlines()[0], False)
        return
    decoder, position, line = _json_decoder(), _skip_space(text, text.index("[") + 1), 1
    seen = 0
    while text[position : position + 1] != "]":
        line, seen = line + text.count("\n", seen, position), position
        try:
            value, position = decoder.raw_decode(text, position)
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
        line, reason = error.lineno, "the list is cut off" if at_end else _json_reason(error)
    else:
        reason = _json_reason(error)
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


def _read_csv(file: DataFile, stream: IO[bytes]) -> Iterator[RawRow | BadRow]:
    csv.field_size_limit(sys.maxsize)
    # Bytes that are not UTF-8 become lone surrogates, so the row that holds them can be named and reading goes on.
    text = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
    reader = csv.reader(text, strict=True)
    try:
        header = next(reader, None)
    except csv.Error as error:
        raise DataError(
            f"the header is not CSV: {error}", where=f"{file.shown}:1", fix="write the file again"
        ) from error
    if header is None:
        return
    if len(set(header)) != len(header):
        raise DataError("a column name stands twice in the header", where=f"{file.shown}:1", fix="rename one")
    line = reader.line_num + 1
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield BadRow(shown=file.shown, line=line, field="", reason=f"not CSV: {error}", beginning="")
            return
        if cells:
            yield _csv_row(file, line, header, cells)
        line = reader.line_num + 1


def _csv_row(file: DataFile, line: int, header: list[str], cells: list[str]) -> RawRow | BadRow:
    if len(cells) != len(header):
        reason = f"{len(cells)} cells where the header has {len(header)} columns"
        return BadRow(shown=file.shown, line=line, field="", reason=reason, beginning=beginning_of(",".join(cells)))
    return line, dict(zip(header, cells, strict=True))


def _read_parquet(file: DataFile) -> Iterator[RawRow | BadRow]:
    try:
        with pq.ParquetFile(file.path) as parquet:
            number = 0
            for batch in parquet.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    yield number, value
    except pa.ArrowException as error:
        raise DataError(f"not a Parquet file: {error}", where=file.shown, fix="write the file again") from error
