"""One preparation: survey every split, choose where each row goes, tokenise, mix, pack, count.

Two passes over the rows: the first finds every fault and decides which row goes to which split, the second
tokenises. So a bad row is told in seconds, and progress knows its total.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path

import pyarrow as pa

from sft_play.config.schema import Config
from sft_play.data.encode import encode_rows, plain_layout
from sft_play.data.formats import PAIR_FORMATS, Row, is_blank
from sft_play.data.mask import Rendered, Renderer, RowRefused
from sft_play.data.overlong import overlong_rejects
from sft_play.data.proofs import prove, refuse_unproved
from sft_play.data.select import Goes, carved_shares, choose_destinations
from sft_play.data.sources import SourceFiles
from sft_play.data.split import Split, weights_of
from sft_play.data.template import TextTokenizer
from sft_play.data.validate import Rejects, Survey, count_duplicates, count_leaking, each_row, survey_rows
from sft_play.errors import DataError
from sft_play.facts.data import DataFacts, DropReason, Proof

PROVED_ROWS = 200
_CHUNK_ROWS = 1000
_CHUNK_CHARACTERS = 4_000_000
_SAY_SECONDS = 2.0

Say = Callable[[str], None]
SourcesBySplit = dict[str, tuple[SourceFiles, ...]]


class Ticker:
    """Says how far a long step is, every two seconds and not before."""

    def __init__(self, say: Say, step: str, total: int | None = None) -> None:
        self._say, self._step = say, step
        self._of = "" if total is None else f" of {total:,}"
        self._last = time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._last >= _SAY_SECONDS:
            self._last = time.monotonic()
            self._say(f"data: {self._step}: {done:,}{self._of} rows")


class Preparation:
    """Prepares the data of a config into a folder.

    Args:
        folder: gets one Arrow file a split, and the rejected rows.
        key: the cache's name for what comes out.
    """

    def __init__(
        self, config: Config, sources: SourcesBySplit, tokenizer: TextTokenizer, folder: Path, key: str, say: Say
    ) -> None:
        self._config, self._sources, self._tokenizer = config, sources, tokenizer
        self._folder, self._key, self._say = folder, key, say
        self._rejects = Rejects(config.data.on_bad_row)
        self._overlong = overlong_rejects()
        self._renderer = Renderer(tokenizer, config.data.loss_on, config.data.task)
        self._splits: dict[Goes, Split] = {}
        self._sample: list[Row] = []
        self._trained: pa.Array | None = None

    def run(self) -> DataFacts:
        """Do all of it.

        Raises:
            DataError: rows, files or the template are unusable, or nothing is left to learn; `SeveralErrors` for rows.
        """
        surveys = {name: self._survey(name) for name in self._sources}
        read = sum(survey.read for survey in surveys.values())
        self._rejects.refuse(read)
        self._say_formats(surveys)
        for name, survey in surveys.items():
            self._tokenise(name, survey, self._destinations(name, survey))
        for split in self._splits.values():
            split.close()
        self._rejects.refuse(read)
        self._overlong.refuse(read)
        self._rejects.write(self._folder / "rejects.jsonl")
        proofs = prove(self._tokenizer, self._sample, self._config.data.loss_on) if self._sample else ()
        template = self._tokenizer.template
        refuse_unproved(proofs, template.where if template else str(self._tokenizer.folder))
        return self._facts(surveys, proofs)

    def _survey(self, name: str) -> Survey:
        ticker = Ticker(self._say, f"reading {name}")
        seed = self._config.train.seed
        return survey_rows(name, self._sources[name], self._config.data.columns, seed, self._rejects, ticker)

    def _destinations(self, name: str, survey: Survey) -> bytearray:
        data, limits = self._config.data, [source.max_rows for source in self._sources[name]]
        if name != "train":
            return choose_destinations(survey, goes=Goes[name.upper()], source_limits=limits)
        shares = carved_shares(data.split, set(self._sources))
        # A weighted mix is cut to size when it is made.
        limit = None if weights_of(self._sources[name]) else data.max_rows
        return choose_destinations(survey, goes=Goes.TRAIN, source_limits=limits, shares=shares, limit=limit)

    def _tokenise(self, name: str, survey: Survey, destinations: bytearray) -> None:
        for goes in sorted({Goes(one) for one in destinations} - {Goes.NOWHERE} | {Goes[name.upper()]}):
            self._splits[goes] = self._split(goes)
        own = self._splits[Goes[name.upper()]]
        own.dropped[DropReason.EMPTY] += survey.empty
        own.dropped[DropReason.BAD] += self._rejects.count[name]
        own.dropped[DropReason.NOT_SAMPLED] += destinations.count(Goes.NOWHERE)
        own.duplicates = count_duplicates(survey)
        own.read = survey.empty + self._rejects.count[name] + destinations.count(Goes.NOWHERE)
        if name == "train":
            self._trained = survey.hashes_of(n for n, goes in enumerate(destinations) if goes == Goes.TRAIN)
        else:
            own.leaking = count_leaking(survey, self._trained) if self._trained else 0
        wanted = len(destinations) - destinations.count(Goes.NOWHERE)
        ticker, done, every = Ticker(self._say, f"tokenising {name}", wanted), 0, 1 + wanted // PROVED_ROWS
        for chunk in _chunks(self._wanted_rows(name, survey, destinations)):
            self._sample += [row for _, row in chunk[-done % every :: every] if name == "train"]
            self._encode_chunk(chunk)
            done += len(chunk)
            ticker(done)

    def _wanted_rows(self, name: str, survey: Survey, destinations: bytearray) -> Iterator[tuple[Goes, Row]]:
        rows = self._read_again(name) if survey.kept is None else iter(survey.kept)
        for destination in destinations:
            row = next(rows, None)
            if row is None:
                break
            if destination != Goes.NOWHERE:
                yield Goes(destination), row
        else:
            if next(rows, None) is None:
                return
        raise changed_while_read(name)

    def _read_again(self, name: str) -> Iterator[Row]:
        rows = each_row(self._sources[name], self._config.data.columns, set())
        return (row for row in rows if isinstance(row, Row) and not is_blank(row.body))

    def _split(self, goes: Goes) -> Split:
        name = goes.name.lower()
        sources = self._sources.get(name, ())
        return Split(self._config, self._folder / f"{name}.arrow", sources, self._rejects, self._overlong)

    def _encode_chunk(self, chunk: list[tuple[Goes, Row]]) -> None:
        rendered: list[Rendered] = []
        kept: list[tuple[Goes, Row]] = []
        for goes, row in chunk:
            self._splits[goes].formats[row.format] += 1
            self._splits[goes].read += 1
            try:
                rendered.append(self._renderer.render(row))
                kept.append((goes, row))
            except RowRefused as refused:
                self._splits[goes].refuse(row, refused)
        encoded = encode_rows(self._tokenizer, rendered)
        for goes, split in self._splits.items():
            split.write([(row, one) for (to, row), one in zip(kept, encoded, strict=True) if to is goes])

    def _say_formats(self, surveys: Mapping[str, Survey]) -> None:
        for name, survey in surveys.items():
            found = ", ".join(f"{count:,} {one}" for one, count in sorted(survey.formats.items()))
            self._say(f"data: {name}: {survey.read:,} rows read; format: {found or 'none'}")
            if survey.formats.keys() & set(PAIR_FORMATS):
                self._say(f"data: {name}: {plain_layout(self._tokenizer)}")
            if survey.flagged and self._config.data.loss_on != "flags":
                what = "have loss flags of their own (train or weight), which only data.loss_on: flags looks at"
                self._say(f"data: {name}: careful: {survey.flagged:,} rows {what}")
            if survey.unused:
                self._say(f"data: {name}: not used: {', '.join(sorted(survey.unused))}")

    def _facts(self, surveys: Mapping[str, Survey], proofs: tuple[Proof, ...]) -> DataFacts:
        facts, digest = {}, sha256()
        for _, split in sorted(self._splits.items()):
            facts[split.name], counted = split.finish()
            digest.update(f"{split.name} {counted}\n".encode())
        unused = sorted(set().union(*(survey.unused for survey in surveys.values())))
        return DataFacts(
            key=self._key,
            fingerprint=digest.hexdigest(),
            max_seq_len=self._config.model.max_seq_len,
            splits=facts,
            unused_columns=tuple(unused),
            unwritten=dict(self._renderer.dropped_fields),
            proofs=proofs,
        )


def changed_while_read(name: str) -> DataError:
    """What is said where a file of a split is not what it was when the preparation began."""
    return DataError("a file changed while it was read", where=f"data.{name}", fix="start again when it is complete")


def _chunks(rows: Iterator[tuple[Goes, Row]]) -> Iterator[list[tuple[Goes, Row]]]:
    """Rows in lists that bound memory, by their number and by the size of their text."""
    chunk: list[tuple[Goes, Row]] = []
    characters = 0
    for goes, row in rows:
        chunk.append((goes, row))
        characters += row.characters
        if len(chunk) == _CHUNK_ROWS or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
