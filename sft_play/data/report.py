"""What can be said of rows before any tokenizer: bad ones, formats, doubles, and held-out ones that are learned.

One pass over the files, as a preparation makes it first; nothing is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from sft_play.config.schema import Config
from sft_play.data.bad_row import BadRow
from sft_play.data.formats import check_columns
from sft_play.data.select import Goes, carved_shares, choose_destinations
from sft_play.data.sources import SourceFiles, given_sources, resolve_sources
from sft_play.data.split import weights_of
from sft_play.data.validate import Rejects, Survey, count_duplicates, count_leaking, survey_rows
from sft_play.errors import DataError, SeveralErrors, SftPlayError

PLACES_SHOWN = 5

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Same:
    """Rows that say what another row says.

    Attributes:
        places: of the first few, where it stands and where the row that it equals.
    """

    count: int
    places: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class SplitRows:
    """The rows of one split that the config names.

    Attributes:
        sources: as the config names them; a hub id with the commit that was read.
        read: all rows, bad and empty ones too.
        empty: well-formed rows without text to learn from.
        formats: well-formed rows by format.
        duplicates: rows that say the same as an earlier one of the split.
        leaking: rows of a held-out split that are trained on too; None for `train`.
    """

    sources: tuple[str, ...]
    read: int
    bad: int
    empty: int
    formats: Mapping[str, int]
    duplicates: Same
    leaking: Same | None


@dataclass(frozen=True, kw_only=True)
class RowReport:
    """What the rows are like before any tokenizer.

    Attributes:
        policy: `data.on_bad_row`.
        splits: those that could be read.
        bad_rows: the first bad rows of all splits, in reading order.
        bad: all bad rows.
        unused: fields that no format reads.
        failed: why a split could not be read to its end, or be divided as the config asks.
    """

    policy: Literal["error", "skip"]
    splits: Mapping[str, SplitRows]
    bad_rows: tuple[BadRow, ...]
    bad: int
    unused: tuple[str, ...]
    failed: tuple[SftPlayError, ...]

    @property
    def read(self) -> int:
        """Rows read of all splits."""
        return sum(split.read for split in self.splits.values())

    def refusal(self) -> SftPlayError | None:
        """What a training would refuse; None where these rows are fine."""
        errors = list(self.failed)
        if self.bad and self.policy == "error":
            rows = "1 bad row" if self.bad == 1 else f"{self.bad:,} bad rows"
            fix = "mend them, or DATA_ON_BAD_ROW=skip leaves them out"
            errors.append(DataError(f"{rows} of {self.read:,}", where="data", fix=fix))
        return SeveralErrors(errors) if errors else None


class _FirstBad(Rejects):
    """Counts all bad rows and holds the first, whatever the policy is.

    Args:
        limit: rows to hold.
    """

    def __init__(self, limit: int) -> None:
        super().__init__("skip")
        self._limit = limit

    def add(self, split: str, row: BadRow) -> None:
        self.count[split] += 1
        if len(self.rows) < self._limit:
            self.rows.append(row)


def check_rows(config: Config, limit: int, progress: Progress = lambda _: None) -> RowReport:
    """Read every row of a config once.

    Args:
        limit: bad rows that are listed.
        progress: gets a line now and then.

    Raises:
        DataError: a file or folder that the config names is not there; `SeveralErrors` for several.
        EnvironmentProblem: a hub id cannot be fetched.
    """
    check_columns(config.data.columns)
    found = _find_sources(config)
    rejects = _FirstBad(limit)
    splits: dict[str, SplitRows] = {}
    failed: list[SftPlayError] = []
    unused: set[str] = set()
    train: Survey | None = None
    trained = Survey().hashes_of()
    for name, sources in found.items():
        try:
            survey = _survey(config, name, sources, rejects, progress)
            survey.kept = None
            unused |= survey.unused
            if name == "train":
                splits[name] = _split_rows(sources, survey, rejects.count[name], leaking=None)
                train, trained = survey, _trained(config, survey, sources, set(found))
            else:
                leaking = Same(count=0, places=()) if train is None else _leaking(survey, train, trained)
                splits[name] = _split_rows(sources, survey, rejects.count[name], leaking=leaking)
        except DataError as error:
            failed.append(error)
    return RowReport(
        policy=config.data.on_bad_row,
        splits=splits,
        bad_rows=tuple(rejects.rows),
        bad=rejects.count.total(),
        unused=tuple(sorted(unused)),
        failed=tuple(failed),
    )


def _find_sources(config: Config) -> dict[str, tuple[SourceFiles, ...]]:
    found: dict[str, tuple[SourceFiles, ...]] = {}
    errors: list[SftPlayError] = []
    for name, one in given_sources(config).items():
        try:
            found[name] = resolve_sources(one, key=f"data.{name}", default_format=config.data.format)
        except SftPlayError as error:
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else SeveralErrors(errors)
    return found


def _survey(
    config: Config, name: str, sources: tuple[SourceFiles, ...], rejects: Rejects, progress: Progress
) -> Survey:
    def tick(done: int) -> None:
        progress(f"reading {name}: {done:,} rows")

    return survey_rows(name, sources, config.data.columns, config.train.seed, rejects, tick)


def _split_rows(sources: tuple[SourceFiles, ...], survey: Survey, bad: int, leaking: Same | None) -> SplitRows:
    return SplitRows(
        sources=tuple(source.origin or source.path for source in sources),
        read=survey.read,
        bad=bad,
        empty=survey.empty,
        formats=dict(survey.formats),
        duplicates=_duplicates(survey),
        leaking=leaking,
    )


def _trained(config: Config, survey: Survey, sources: tuple[SourceFiles, ...], given: set[str]) -> pa.Array:
    """Hashes of the rows that are trained on: those that are neither held out nor left out.

    Raises:
        DataError: the rows cannot be divided as the config asks.
    """
    data = config.data
    shares = carved_shares(data.split, given)
    limits = [source.max_rows for source in sources]
    limit = None if weights_of(sources) else data.max_rows
    if not shares and limit is None and not any(limits):
        return survey.hashes_of()
    goes = choose_destinations(survey, goes=Goes.TRAIN, source_limits=limits, shares=shares, limit=limit)
    return survey.hashes_of(n for n, one in enumerate(goes) if one == Goes.TRAIN)


def _duplicates(survey: Survey) -> Same:
    count = count_duplicates(survey)
    if not count:
        return Same(count=0, places=())
    hashes = survey.hashes_of()
    values, counts = pc.value_counts(hashes).flatten()
    repeated = values.filter(pc.greater(counts, 1))
    firsts: dict[int, int] = {}
    pairs: list[tuple[int, int]] = []
    for scalar in pc.indices_nonzero(pc.is_in(hashes, repeated)):
        row = scalar.as_py()
        if (first := firsts.setdefault(survey.hashes[row], row)) != row:
            pairs.append((row, first))
            if len(pairs) == PLACES_SHOWN:
                break
    return Same(count=count, places=_places(pairs, survey, survey))


def _leaking(survey: Survey, train: Survey, trained: pa.Array) -> Same:
    rows = pc.indices_nonzero(pc.is_in(survey.hashes_of(), trained)).slice(0, PLACES_SHOWN).to_pylist()
    pairs = [(row, train.hashes.index(survey.hashes[row])) for row in rows]
    return Same(count=count_leaking(survey, trained), places=_places(pairs, survey, train))


def _places(pairs: Iterable[tuple[int, int]], survey: Survey, other: Survey) -> tuple[tuple[str, str], ...]:
    return tuple((survey.place(row), other.place(equal)) for row, equal in pairs)


def formats_of(splits: Mapping[str, SplitRows]) -> list[str]:
    """The formats of all splits, the commonest first."""
    total: Counter[str] = Counter()
    for split in splits.values():
        total.update(split.formats)
    return [name for name, _ in total.most_common()]
