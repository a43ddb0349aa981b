"""Rows of tables: CSV and TSV with a header, and Parquet."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sft_play.data.bad_row import BadRow, beginning_of, shown_error
from sft_play.data.json_rows import RawRow
from sft_play.data.sources import DataFile, FileKind
from sft_play.errors import DataError

_BATCH_ROWS = 1000


def read_csv(file: DataFile, stream: IO[bytes]) -> Iterator[RawRow | BadRow]:
    """One row a record, every value text; a record may span lines, and its first one is told.

    Raises:
        DataError: there is no usable header.
    """
    csv.field_size_limit(sys.maxsize)
    # Bytes that are not UTF-8 become lone surrogates, so the row that holds them can be named and reading goes on.
    text = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
    separator = "\t" if file.kind is FileKind.TSV else ","
    reader = csv.reader(text, strict=True, delimiter=separator)
    header = _header(file, reader, separator)
    line = reader.line_num + 1
    while header:
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


def _header(file: DataFile, reader: Any, separator: str) -> list[str]:
    """The names of the columns; none where the file is blank."""
    try:
        header: list[str] = next((cells for cells in reader if cells), [])
    except csv.Error as error:
        raise DataError(
            f"the header is not CSV: {error}", where=f"{file.shown}:1", fix="write the file again"
        ) from error
    where = f"{file.shown}:{max(1, reader.line_num)}"
    if not all(_is_utf8(name) for name in header):
        raise DataError("the header is not UTF-8", where=where, fix="save the file as UTF-8")
    if len(set(header)) != len(header):
        raise DataError("a column name stands twice in the header", where=where, fix="rename one")
    other = next((sign for sign in ";\t,|" if sign != separator and sign in "".join(header)), "")
    if len(header) == 1 and other:
        names = {"\t": "tabs", ",": "commas"}
        right = "name it .tsv" if other == "\t" else "write it with commas (.csv) or tabs (.tsv)"
        raise DataError(f"the columns are separated by {names.get(other, other)}", where=where, fix=right)
    return header


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _csv_row(file: DataFile, line: int, header: list[str], cells: list[str]) -> RawRow | BadRow:
    if len(cells) != len(header):
        reason = f"{len(cells)} cells where the header has {len(header)} columns"
        return BadRow(shown=file.shown, line=line, field="", reason=reason, beginning=beginning_of(",".join(cells)))
    return line, dict(zip(header, cells, strict=True))


def read_parquet(file: DataFile) -> Iterator[RawRow | BadRow]:
    """One row a row, counted from 1; the nulls with which Parquet fills up tools and their calls are left out.

    Raises:
        DataError: the file is damaged.
    """
    with file.path.open("rb"):  # that it cannot be opened is told as of any file
        pass
    try:
        with pq.ParquetFile(file.path) as parquet:
            number = 0
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS):
                if len(set(batch.schema.names)) != len(batch.schema.names):
                    raise DataError("a column name stands twice", where=file.shown, fix="rename one")
                for row in _batch_rows(batch):
                    number += 1
                    if isinstance(row, dict):
                        yield number, {key: _without_filling(key, value) for key, value in row.items()}
                    else:
                        yield BadRow(shown=file.shown, line=number, field="", reason=row, beginning="")
    except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError) as error:
        what = f"not a whole Parquet file: {shown_error(error)}"
        raise DataError(what, where=file.shown, fix="write the file again") from error


def _batch_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | str]:
    """Rows as Python values; a reason where one cannot be (text that is not UTF-8, a date beyond all calendars)."""
    try:
        yield from batch.to_pylist()
        return
    except (ValueError, OverflowError, UnicodeError):
        pass
    for number in range(batch.num_rows):
        try:
            yield batch.slice(number, 1).to_pylist()[0]
        except UnicodeError:
            yield "not UTF-8"
        except (ValueError, OverflowError) as error:
            yield f"a value cannot be read: {shown_error(error)}"


def _without_filling(key: str, value: Any) -> Any:
    """A struct column has every field in every row, null where the row had none."""
    if not isinstance(value, list):
        return value
    if key == "tools":
        return _without_nulls(value)
    return [{k: _nested(v) for k, v in one.items()} if isinstance(one, dict) else one for one in value]


def _nested(value: Any) -> Any:
    return _without_nulls(value) if isinstance(value, list | dict) else value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
