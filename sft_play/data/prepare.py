"""From the config's files to tokens and masks on disk, once, before any training process starts.

Two passes over the rows: the first finds every fault and decides which row goes to which split, the second
tokenises. So a bad row is told in seconds, and progress knows its total.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from sft_play.config.schema import Config, Sources
from sft_play.data.cache import Entry, finish_entry, key_of, key_parts, new_entry, read_entry, reason_of_miss
from sft_play.data.encode import Encoded, encode_rows, plain_layout, prompts_agree
from sft_play.data.formats import Row, check_columns, is_blank
from sft_play.data.mask import Rendered, Renderer, RowRefused
from sft_play.data.select import Goes, carved_shares, choose_destinations
from sft_play.data.sources import SourceFiles, resolve_sources
from sft_play.data.template import TextTokenizer, load_text_tokenizer
from sft_play.data.validate import Rejects, Survey, each_row, survey_rows
from sft_play.data.write import SplitWriter
from sft_play.errors import DataError, NotAvailableError, SeveralErrors
from sft_play.facts.data import DataFacts, DropReason, SplitFacts

_CHUNK_ROWS = 1000
_CHUNK_CHARACTERS = 4_000_000
_SAY_SECONDS = 2.0

Say = Callable[[str], None]
SourcesBySplit = dict[str, tuple[SourceFiles, ...]]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Tokenised data.

    Attributes:
        splits: `train`, and `validation` and `test` where there are any, each an Arrow IPC stream file with the
            columns `input_ids` and `labels` (int32 lists, -100 where masked).
        hit: whether it was in the cache already.
        rejects: rows that were skipped, one JSON object a line, where there are any.
    """

    splits: Mapping[str, Path]
    facts: DataFacts
    hit: bool
    rejects: Path | None


def prepare(config: Config, tokenizer_dir: Path, cache_dir: Path, say: Say) -> Prepared:
    """Tokenise and mask the data of a config, or find it in the cache.

    Args:
        tokenizer_dir: the model's folder, with tokenizer.json.
        cache_dir: holds one folder a preparation; may be shared by runs.
        say: gets plain lines: hit or miss and why, progress, what was found.

    Raises:
        DataError: files, rows or the template are unusable, or nothing is left to learn; `SeveralErrors` for rows.
        NotAvailableError: the config asks for what this version cannot do.
        ModelError: the tokenizer cannot be read.
        EnvironmentProblem: the cache cannot be written.
    """
    sources = _sources(config)
    parts = key_parts(config, sources, tokenizer_dir)
    key = key_of(parts)
    if entry := read_entry(cache_dir, key):
        say(f"data: taken from the cache ({key[:8]}): same files, tokenizer, template and settings")
        _say_facts(entry.facts, say)
        return _prepared(entry, hit=True)
    say(f"data: not in the cache ({reason_of_miss(cache_dir, key, parts)}); preparing")
    tokenizer = load_text_tokenizer(tokenizer_dir, config.model.chat_template)
    with new_entry(cache_dir) as folder:
        facts = _Preparation(config, sources, tokenizer, folder, key, say).run()
        entry = finish_entry(folder, cache_dir, key, parts, facts)
    _say_facts(facts, say)
    return _prepared(entry, hit=False)


def read_cached_facts(config: Config, tokenizer_dir: Path, cache_dir: Path) -> DataFacts | None:
    """The facts of an earlier preparation of just this data, for planning; None where there is none.

    Raises:
        DataError: the files that the config names are not there.
    """
    entry = read_entry(cache_dir, key_of(key_parts(config, _sources(config), tokenizer_dir)))
    return None if entry is None else entry.facts


def _sources(config: Config) -> SourcesBySplit:
    _check_available(config)
    check_columns(config.data.columns)
    given: dict[str, Sources | None] = {
        "train": config.data.train,
        "validation": config.data.validation,
        "test": config.data.test,
    }
    return {
        name: resolve_sources(one, key=f"data.{name}", default_format=config.data.format)
        for name, one in given.items()
        if one is not None
    }


def _check_available(config: Config) -> None:
    """The commands refuse these by `config.not_yet`; callers of `prepare` need not have asked there."""
    data = config.data
    later = {
        f"data.task: {data.task}": data.task != "sft",
        "data.on_overlong: split": data.on_overlong == "split",
        "data.streaming: true": data.streaming,
    }
    errors = [NotAvailableError("not available yet", where=where) for where, asked in later.items() if asked]
    if errors:
        raise errors[0] if len(errors) == 1 else SeveralErrors(errors)


def _prepared(entry: Entry, *, hit: bool) -> Prepared:
    return Prepared(splits=entry.splits, facts=entry.facts, hit=hit, rejects=entry.rejects)


class _Ticker:
    """Says how far a long step is, every two seconds and not before."""

    def __init__(self, say: Say, step: str, total: int | None) -> None:
        self._say, self._step = say, step
        self._of = "" if total is None else f" of {total:,}"
        self._last = time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._last >= _SAY_SECONDS:
            self._last = time.monotonic()
            self._say(f"data: {self._step}: {done:,}{self._of} rows")


class _Preparation:
    """One preparation: survey every split, choose, tokenise, count."""

    def __init__(
        self, config: Config, sources: SourcesBySplit, tokenizer: TextTokenizer, folder: Path, key: str, say: Say
    ) -> None:
        self._config, self._sources, self._tokenizer = config, sources, tokenizer
        self._folder, self._key, self._say = folder, key, say
        self._rejects = Rejects(config.data.on_bad_row)
        self._overlong = Rejects("error")
        self._renderer = Renderer(tokenizer, config.data.loss_on)
        self._writers: dict[Goes, SplitWriter] = {}

    def run(self) -> DataFacts:
        surveys = {name: self._survey(name) for name in self._sources}
        self._rejects.refuse(sum(survey.read for survey in surveys.values()))
        self._say_formats(surveys)
        formats = {goes: Counter[str]() for goes in Goes}
        for name, survey in surveys.items():
            self._tokenise(name, survey, self._destinations(name, survey), formats)
        for writer in self._writers.values():
            writer.close()
        if self._renderer.probed and not prompts_agree(self._tokenizer):
            self._say("data: careful: the prompt's last token is another one when the answer follows than at inference")
        read = sum(survey.read for survey in surveys.values())
        self._rejects.refuse(read)
        self._overlong.refuse(read)
        self._rejects.write(self._folder / "rejects.jsonl")
        return self._facts(surveys, formats)

    def _survey(self, name: str) -> Survey:
        ticker = _Ticker(self._say, f"reading {name}", None)
        seed = self._config.train.seed
        return survey_rows(name, self._sources[name], self._config.data.columns, seed, self._rejects, ticker)

    def _destinations(self, name: str, survey: Survey) -> bytearray:
        data, limits = self._config.data, [source.max_rows for source in self._sources[name]]
        if name != "train":
            return choose_destinations(survey, goes=Goes[name.upper()], source_limits=limits)
        shares = carved_shares(data.split, set(self._sources))
        return choose_destinations(survey, goes=Goes.TRAIN, source_limits=limits, shares=shares, limit=data.max_rows)

    def _tokenise(
        self, name: str, survey: Survey, destinations: bytearray, formats: Mapping[Goes, Counter[str]]
    ) -> None:
        for goes in sorted({Goes(one) for one in destinations} - {Goes.NOWHERE} | {Goes[name.upper()]}):
            self._writers[goes] = SplitWriter(self._folder / f"{goes.name.lower()}.arrow")
        own = self._writers[Goes[name.upper()]]
        own.dropped[DropReason.EMPTY] += survey.empty
        own.dropped[DropReason.BAD] += self._rejects.count[name]
        own.dropped[DropReason.NOT_SAMPLED] += destinations.count(Goes.NOWHERE)
        wanted = len(destinations) - destinations.count(Goes.NOWHERE)
        ticker, done = _Ticker(self._say, f"tokenising {name}", wanted), 0
        for chunk in _chunks(self._wanted_rows(name, survey, destinations)):
            for goes, row in chunk:
                formats[goes][row.format] += 1
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
        raise DataError("a file changed while it was read", where=f"data.{name}", fix="start again when it is complete")

    def _read_again(self, name: str) -> Iterator[Row]:
        rows = each_row(self._sources[name], self._config.data.columns, set())
        return (row for row in rows if isinstance(row, Row) and not is_blank(row.body))

    def _encode_chunk(self, chunk: list[tuple[Goes, Row]]) -> None:
        rendered: list[Rendered] = []
        kept: list[tuple[Goes, Row]] = []
        for goes, row in chunk:
            try:
                rendered.append(self._renderer.render(row))
                kept.append((goes, row))
            except RowRefused as refused:
                self._refuse_row(goes, row, refused)
        by_split: dict[Goes, list[Encoded]] = {goes: [] for goes in self._writers}
        for (goes, row), result in zip(kept, encode_rows(self._tokenizer, rendered), strict=True):
            if isinstance(result, RowRefused):
                self._refuse_row(goes, row, result)
            elif (fitted := self._fit(goes, row, result)) is not None:
                by_split[goes].append(fitted)
        for goes, rows in by_split.items():
            self._writers[goes].write(rows)

    def _refuse_row(self, goes: Goes, row: Row, refused: RowRefused) -> None:
        self._rejects.add(goes.name.lower(), row.bad(refused.field, refused.reason))
        self._writers[goes].dropped[DropReason.BAD] += 1

    def _fit(self, goes: Goes, row: Row, encoded: Encoded) -> Encoded | None:
        """The row within the length limit; None where it is dropped, which is counted."""
        limit, length, writer = self._config.model.max_seq_len, len(encoded.input_ids), self._writers[goes]
        if not encoded.loss_tokens:
            writer.dropped[DropReason.NOTHING_TO_LEARN] += 1
            return None
        if length <= limit:
            return encoded
        if self._config.data.on_overlong == "error":
            self._overlong.add(goes.name.lower(), row.bad("", f"{length:,} tokens, model.max_seq_len is {limit:,}"))
            return None
        cut = encoded.cut(limit)
        if self._config.data.on_overlong == "drop" or not cut.loss_tokens:
            writer.dropped[DropReason.OVERLONG] += 1
            return None
        writer.truncated += 1
        return cut

    def _say_formats(self, surveys: Mapping[str, Survey]) -> None:
        for name, survey in surveys.items():
            found = ", ".join(f"{count:,} {one}" for one, count in sorted(survey.formats.items()))
            self._say(f"data: {name}: {survey.read:,} rows read; format: {found or 'none'}")
            if {"alpaca", "prompt_completion"} & survey.formats.keys():
                self._say(f"data: {name}: {plain_layout(self._tokenizer)}")
            if survey.unused:
                self._say(f"data: {name}: not used: {', '.join(sorted(survey.unused))}")

    def _facts(self, surveys: Mapping[str, Survey], formats: Mapping[Goes, Counter[str]]) -> DataFacts:
        facts, digest = {}, sha256()
        for goes, writer in sorted(self._writers.items()):
            name = goes.name.lower()
            facts[name] = writer.facts(formats[goes])
            digest.update(f"{name} {writer.digest}\n".encode())
            if not writer.rows:
                raise _nothing_left(name, facts[name])
        unused = sorted(set().union(*(survey.unused for survey in surveys.values())))
        return DataFacts(
            key=self._key,
            fingerprint=digest.hexdigest(),
            max_seq_len=self._config.model.max_seq_len,
            splits=facts,
            unused_columns=tuple(unused),
        )


def _nothing_left(name: str, facts: SplitFacts) -> DataError:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in facts.dropped.items()) or "none read"
    fix = "check that there are assistant turns to learn, data.loss_on and model.max_seq_len"
    return DataError(
        f"no row is left to learn from, of {facts.rows_read:,} read: {reasons}", where=f"data.{name}", fix=fix
    )


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


def _say_facts(facts: DataFacts, say: Say) -> None:
    for name, split in facts.splits.items():
        share = split.loss_tokens / split.tokens if split.tokens else 0.0
        lines = f"{split.rows_kept:,} rows, {split.tokens:,} tokens, {share:.0%} with loss, longest {split.longest:,}"
        dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in split.dropped.items())
        cut = f", {split.truncated:,} truncated to {facts.max_seq_len:,}" if split.truncated else ""
        say(f"data: {name}: {lines}{cut}{dropped}")
