"""Training rows tokenised while training runs: an endless, repeatable sequence, for data larger than the disk.

The rows of all sources are read in windows. A window is shuffled, tokenised, fitted to the length limit and, if asked
for, packed by itself, so everything about window N follows from the files, the settings and N. Which of the resulting
sequences a rank takes is decided by counting them: every world size sees the same order, and a resumed run only has to
count. Windows before the place to go on from are read and not tokenised where `StreamIndex` knows what they held.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TYPE_CHECKING

from sft_play.config.schema import Config
from sft_play.data.bad_row import BadRow
from sft_play.data.encode import MASKED, Encoded, encode_rows
from sft_play.data.formats import Row, is_blank, read_rows
from sft_play.data.mask import Rendered, Renderer, RowRefused
from sft_play.data.mix import shares_of
from sft_play.data.overlong import Fitter, overlong_rejects
from sft_play.data.pack import pack_lengths
from sft_play.data.sources import SourceFiles
from sft_play.data.template import TextTokenizer
from sft_play.data.validate import Rejects
from sft_play.errors import DataError
from sft_play.facts.data import DropReason, SourceFacts, SplitFacts, summarise_lengths

if TYPE_CHECKING:
    from sft_play.data.stream_index import StreamIndex

WINDOW_ROWS = 4096
WINDOW_CHARACTERS = 16_000_000

Tokens = dict[str, list[int]]
"""One sequence: `input_ids` and `labels`, and of a pack the `lengths` of its documents."""


@dataclass(kw_only=True)
class Window:
    """What one window gave.

    Attributes:
        rows: good ones as they were read, then shuffled.
        encoded: what is trained on, within the length limit.
        sequences: the same as it goes into batches: packed where packs are asked for.
        dropped: rows that gave nothing, by `DropReason`.
        rejects: bad rows that were skipped, as JSON lines.
        passed_over: bad and empty rows that were met on the way to the good ones.
    """

    number: int
    rows: list[Row] = field(default_factory=list)
    encoded: list[Encoded] = field(default_factory=list)
    sequences: list[Tokens] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    split_up: int = 0
    rejects: str = ""
    passed_over: int = 0

    @property
    def read(self) -> int:
        """Rows that were read for it, also those that are none of `rows`."""
        return len(self.rows) + self.passed_over


class Stream:
    """The training rows of a config, without end.

    Args:
        sources: of `data.train`.

    Attributes:
        limit: tokens of a sequence at most.
    """

    def __init__(self, config: Config, sources: Sequence[SourceFiles], tokenizer: TextTokenizer) -> None:
        self._config, self._sources, self._tokenizer = config, sources, tokenizer
        self.limit = config.model.max_seq_len
        self._renderer = Renderer(tokenizer, config.data.loss_on, config.data.task)
        self._rejects = Rejects(config.data.on_bad_row)
        self._lost: Counter[str] = Counter()

    def sequences(self, skip: int = 0, index: StreamIndex | None = None, *, keep: bool = False) -> Iterator[Tokens]:
        """The sequences from number `skip` on.

        Args:
            index: knows what earlier windows held; without it they are tokenised again.
            keep: write down there what the windows hold.

        Raises:
            DataError: as `windows`.
        """
        known, before = index.known(skip) if index and skip else (0, 0)
        for window in self.windows(known):
            if index and keep:
                index.add(window)
            yield from window.sequences[max(0, skip - before) :]
            before += len(window.sequences)

    def windows(self, known: int = 0) -> Iterator[Window]:
        """Window after window; the first `known` are read over.

        Raises:
            DataError: a row is bad under `on_bad_row: error`, or nothing is left to learn; `SeveralErrors` for rows.
        """
        rows, number = self._rows(), 0
        while True:
            window = Window(number=number, rows=_window_rows(rows))
            window.passed_over = self._lost.total()
            if number >= known:
                yield self._fill(window)
            self._rejects.take()
            self._lost.clear()
            number += 1

    def _fill(self, window: Window) -> Window:
        random.Random(f"{self._config.train.seed}/{window.number}").shuffle(window.rows)
        overlong = overlong_rejects()
        fitter = Fitter(self._config, "train", overlong)
        rendered: list[Rendered] = []
        kept: list[Row] = []
        for row in window.rows:
            window.formats[row.format] += 1
            try:
                rendered.append(self._renderer.render(row))
                kept.append(row)
            except RowRefused as refused:
                self._refuse(row, refused)
        for row, encoded in zip(kept, encode_rows(self._tokenizer, rendered), strict=True):
            if isinstance(encoded, RowRefused):
                self._refuse(row, encoded)
            else:
                window.encoded += fitter.fit(row, encoded)
        window.encoded += fitter.rest()
        self._rejects.refuse(len(window.rows))
        overlong.refuse(len(window.rows))
        window.dropped = fitter.dropped + self._lost
        window.truncated, window.split_up = fitter.truncated, fitter.split_up
        window.rejects = self._rejects.take()
        window.sequences = self._packed(window) if self._config.data.packing else _plain(window.encoded)
        if not window.sequences:
            what = f"{len(window.rows):,} rows in a row leave nothing to learn from"
            raise DataError(what, where="data.train", fix="check data.loss_on and model.max_seq_len")
        return window

    def _packed(self, window: Window) -> list[Tokens]:
        rows = window.encoded
        packs = pack_lengths([len(row.input_ids) for row in rows], self.limit, self._config.train.seed + window.number)
        return [_joined([rows[n] for n in pack]) for pack in packs]

    def _refuse(self, row: Row, refused: RowRefused) -> None:
        self._reject(row.bad(refused.field, refused.reason))

    def _reject(self, row: BadRow) -> None:
        self._rejects.add("train", row)
        self._lost[DropReason.BAD] += 1

    def _rows(self) -> Iterator[Row | None]:
        """Good rows of all sources, over and over: mixed by weight, or one source after the other and then None."""
        weights = [source.weight for source in self._sources if source.weight is not None]
        if not weights:
            while True:
                yield from self._good(self._sources, "data.train")
                yield None
        endless = [self._endless(source) for source in self._sources]
        shares = shares_of(weights)
        taken = [0] * len(shares)
        for total in count(1):  # each time from the source that is furthest behind its share
            behind = max(range(len(shares)), key=lambda n: shares[n] * total - taken[n])
            taken[behind] += 1
            yield next(endless[behind])

    def _endless(self, source: SourceFiles) -> Iterator[Row]:
        while True:
            yield from self._good([source], source.path)

    def _good(self, sources: Sequence[SourceFiles], where: str) -> Iterator[Row]:
        """One pass."""
        found = False
        for source in sources:
            rows = (row for file in source.files for row in read_rows(file, self._config.data.columns, set()))
            for row in islice(self._usable(rows), source.max_rows):
                found = True
                yield row
        if not found:
            raise DataError("no row is left to learn from", where=where, fix="check that it holds rows with text")

    def _usable(self, rows: Iterator[Row | BadRow]) -> Iterator[Row]:
        for row in rows:
            if isinstance(row, BadRow):
                self._reject(row)
                self._rejects.refuse(1)
            elif is_blank(row.body):
                self._lost[DropReason.EMPTY] += 1
            else:
                yield row


def sample_facts(stream: Stream, sources: Sequence[SourceFiles]) -> tuple[SplitFacts, list[Row]]:
    """What the first window looks like, and its rows.

    Raises:
        DataError: as `Stream.windows`.
    """
    window = next(stream.windows())
    lengths = [len(row.input_ids) for row in window.encoded]
    percentiles, histogram = summarise_lengths(lengths)
    packs = len(window.sequences) if "lengths" in window.sequences[0] else None
    room = (packs or 0) * stream.limit
    facts = SplitFacts(
        streamed=True,
        rows_read=window.read,
        rows_kept=len(lengths),
        dropped=dict(window.dropped),
        truncated=window.truncated,
        split_up=window.split_up,
        tokens=sum(lengths),
        loss_tokens=sum(row.loss_tokens for row in window.encoded),
        longest=max(lengths),
        percentiles=percentiles,
        histogram=histogram,
        formats=dict(window.formats),
        end_of_turn_share=sum(row.closes for row in window.encoded) / len(lengths),
        sources=_taken(window.rows, sources),
        packs=packs,
        fill=sum(lengths) / room if room else None,
    )
    return facts, window.rows


def _taken(rows: Sequence[Row], sources: Sequence[SourceFiles]) -> tuple[SourceFacts, ...]:
    taken = Counter(row.file.source for row in rows)
    return tuple(
        SourceFacts(path=source.path, weight=source.weight, rows=taken[n], taken=taken[n], tokens=0)
        for n, source in enumerate(sources)
    )


def _window_rows(rows: Iterator[Row | None]) -> list[Row]:
    """Rows up to the size of a window or the end of a pass."""
    window: list[Row] = []
    characters = 0
    for row in rows:
        if row is None:
            if window:
                break
            continue
        window.append(row)
        characters += row.characters
        if len(window) == WINDOW_ROWS or characters >= WINDOW_CHARACTERS:
            break
    return window


def _plain(rows: Sequence[Encoded]) -> list[Tokens]:
    return [{"input_ids": row.input_ids, "labels": row.labels} for row in rows]


def _joined(rows: Sequence[Encoded]) -> Tokens:
    """Documents one after the other; the first label of each is masked, as in `data.pack`."""
    return {
        "input_ids": [token for row in rows for token in row.input_ids],
        "labels": [label for row in rows for label in (MASKED, *row.labels[1:])],
        "lengths": [len(row.input_ids) for row in rows],
    }
