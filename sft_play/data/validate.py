"""The first pass over the rows: every fault found and reported together, every good row counted and hashed."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from sft_play.data.formats import Body, Chat, Pair, Row, is_blank, read_rows
from sft_play.data.raw import BadRow
from sft_play.data.sources import DataFile, FileKind, SourceFiles
from sft_play.errors import DataError, SeveralErrors, SftPlayError

REPORTED_ROWS = 20
KEPT_BYTES = 64 << 20
"""Files up to this size together are read once and held; larger ones are read again to be tokenised."""
_PACKED_FACTOR = 8


class Rejects:
    """Bad rows as they are found: refused all together at the end, or counted and written down.

    Args:
        policy: `data.on_bad_row`.
        kind: what they are called.
        fix: how each can be mended, where that is not by its format.
    """

    def __init__(self, policy: Literal["error", "skip"], *, kind: str = "bad", fix: str = "") -> None:
        self.policy, self._kind, self._fix = policy, kind, fix
        self.rows: list[BadRow] = []
        self.count: Counter[str] = Counter()

    def add(self, split: str, row: BadRow) -> None:
        """Take note of a bad row of a split."""
        self.count[split] += 1
        if self.policy == "skip" or len(self.rows) < REPORTED_ROWS:
            self.rows.append(row)

    def refuse(self, rows_read: int) -> None:
        """Report what was found, where bad rows are errors.

        Raises:
            SeveralErrors: the first bad rows, one line each, and a count of the others.
        """
        total = self.count.total()
        if self.policy == "skip" or not total:
            return
        errors: list[SftPlayError] = [row.error(self._fix) for row in self.rows]
        if total > len(errors):
            what = f"{total - len(errors):,} more {self._kind} rows, {total:,} of {rows_read:,} in all"
            fix = self._fix or "mend them, or set data.on_bad_row: skip"
            errors.append(DataError(what, where="data", fix=fix))
        raise SeveralErrors(errors)

    def write(self, file: Path) -> None:
        """One JSON object a rejected row; no file where there are none."""
        if self.rows:
            file.write_text(self.take(), encoding="utf-8")

    def take(self) -> str:
        """The rejected rows as JSON lines; they are forgotten, their number is not."""
        lines = []
        for row in self.rows:
            place = {"file": row.shown, "line": row.line, "field": row.field}
            lines.append(json.dumps(place | {"reason": row.reason, "row": row.beginning}) + "\n")
        self.rows.clear()
        return "".join(lines)


@dataclass(kw_only=True)
class Survey:
    """What the first pass found in the files of one split.

    Attributes:
        hashes: one a good row in reading order, of the row's content and the seed: equal rows, equal hashes.
        sources: the source's number of each good row.
        files: every file that has a good row, in reading order.
        file_of, lines: where each good row stands.
        read: rows read, bad and empty ones too.
        empty: well-formed rows without anything to learn from.
        flagged: rows with loss flags of their own.
        kept: the good rows themselves, where the files are small enough to hold them; else None.
    """

    hashes: array[int] = field(default_factory=lambda: array("Q"))
    sources: array[int] = field(default_factory=lambda: array("H"))
    files: list[DataFile] = field(default_factory=list)
    file_of: array[int] = field(default_factory=lambda: array("L"))
    lines: array[int] = field(default_factory=lambda: array("L"))
    read: int = 0
    empty: int = 0
    flagged: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    unused: set[str] = field(default_factory=set)
    kept: list[Row] | None = None

    def add(self, row: Row, key: bytes) -> None:
        """Take note of a good row."""
        self.hashes.append(_hash(row.body, key))
        self.sources.append(row.file.source)
        if not self.files or self.files[-1] is not row.file:
            self.files.append(row.file)
        self.file_of.append(len(self.files) - 1)
        self.lines.append(row.line)
        if self.kept is not None:
            self.kept.append(row)

    def place(self, number: int) -> str:
        """Where a good row stands, as `file:line`."""
        return f"{self.files[self.file_of[number]].shown}:{self.lines[number]}"

    def hashes_of(self, rows: Iterable[int] | None = None) -> pa.Array:
        """The hashes of all good rows, or of these."""
        values = self.hashes if rows is None else array("Q", (self.hashes[n] for n in rows))
        return pa.Array.from_buffers(pa.uint64(), len(values), [None, pa.py_buffer(values)])

    def duplicates(self) -> list[tuple[int, int]]:
        """(row, the earlier row that it equals) of every row that says what an earlier one says."""
        firsts: dict[int, int] = {}
        return [(n, first) for n, value in enumerate(self.hashes) if (first := firsts.setdefault(value, n)) != n]


def count_duplicates(survey: Survey) -> int:
    """Good rows that say the same as an earlier one."""
    return len(survey.hashes) - int(pc.count_distinct(survey.hashes_of()).as_py())


def count_leaking(survey: Survey, trained: pa.Array) -> int:
    """Good rows whose hash is among those that are trained on."""
    return pc.sum(pc.is_in(survey.hashes_of(), trained)).as_py() or 0


def survey_rows(
    split: str,
    sources: tuple[SourceFiles, ...],
    columns: Mapping[str, str],
    seed: int,
    rejects: Rejects,
    tick: Callable[[int], None],
) -> Survey:
    """Read every row of a split once.

    Args:
        tick: called with the number of rows read so far.

    Raises:
        DataError: a file cannot be read, or there is no row at all.
    """
    survey = Survey(kept=[] if _total_bytes(sources) <= KEPT_BYTES else None)
    key = blake2b(str(seed).encode(), digest_size=16).digest()
    for row in each_row(sources, columns, survey.unused):
        survey.read += 1
        if survey.read % 1000 == 0:
            tick(survey.read)
        if isinstance(row, BadRow):
            rejects.add(split, row)
            continue
        survey.formats[row.format] += 1
        if is_blank(row.body):
            survey.empty += 1
            continue
        survey.add(row, key)
        survey.flagged += isinstance(row.body, Chat) and any(one.train is not None for one in row.body.messages)
    if not survey.read:
        files = ", ".join(file.shown for one in sources for file in one.files)
        raise DataError("0 rows", where=files, fix=f"put rows in it, or name another file under data.{split}")
    return survey


def each_row(sources: tuple[SourceFiles, ...], columns: Mapping[str, str], unused: set[str]) -> Iterator[Row | BadRow]:
    """Rows of all sources and their files in order."""
    for source in sources:
        for file in source.files:
            yield from read_rows(file, columns, unused)


def _total_bytes(sources: tuple[SourceFiles, ...]) -> int:
    files = [file for source in sources for file in source.files]
    packed = {True: _PACKED_FACTOR, False: 1}
    return sum(
        file.path.stat().st_size * packed[bool(file.compression) or file.kind is FileKind.PARQUET] for file in files
    )


def _hash(body: Body, key: bytes) -> int:
    digest = blake2b(digest_size=8, key=key)
    for text in _texts(body):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little")


def _texts(body: Body) -> Iterator[str]:
    if isinstance(body, Chat):
        for message in body.messages:
            yield message.role
            yield message.content
            if message.extra:
                yield json.dumps(message.extra, sort_keys=True, default=str)
        if body.tools:
            yield json.dumps(body.tools, sort_keys=True, default=str)
    elif isinstance(body, Pair):
        yield from ("", body.plain_prompt, body.completion)
    else:
        yield from ("", body.text)
