"""What is known about the prepared data: counts, lengths in tokens and a fingerprint of what is learned from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

PERCENTILES = (1, 25, 50, 75, 90, 95, 99)


class DropReason(StrEnum):
    """Why a row that was read is not learned from."""

    BAD = "bad"
    EMPTY = "empty"
    OVERLONG = "overlong"
    NOTHING_TO_LEARN = "nothing to learn"
    NOT_SAMPLED = "not sampled"


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """One source of the mix.

    Attributes:
        path: as the config names it.
        weight: as the config gives it; None where sources are put one after the other.
        rows: different rows that it has to give.
        taken: rows that it gave, repeated ones counted each time.
        tokens: tokens of the rows it gave.
    """

    path: str
    weight: float | None
    rows: int
    taken: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Something that was proved on the user's own rows.

    Attributes:
        name: what is claimed.
        holds: cases for which it holds, `of` so many.
        words: what it means where some do not; empty where all do.
    """

    name: str
    holds: int
    of: int
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class SplitFacts:
    """One split: `train`, `validation` or `test`. Lengths are in tokens, of the rows as they are kept."""

    rows_read: int
    """Rows of this split before any was dropped; for a carved split only rows that were well formed."""
    rows_kept: int
    dropped: Mapping[str, int]
    """Rows dropped, by `DropReason`."""
    truncated: int
    """Kept rows that were cut at the length limit."""
    tokens: int
    loss_tokens: int
    """Tokens that are predicted and counted in the loss; a row's first token never is."""
    longest: int
    percentiles: Mapping[int, int]
    histogram: tuple[tuple[int, int], ...]
    """(length, rows up to that length and above the bar before), lengths doubling."""
    formats: Mapping[str, int]
    """Well-formed rows by format."""
    end_of_turn_share: float
    """Share of the kept rows in which every learned turn's closing token carries loss, 0 to 1."""
    split_up: int = 0
    """Rows cut into several pieces, which count as rows kept."""
    duplicates: int = 0
    """Rows that say the same as an earlier row of the split; they are kept."""
    leaking: int = 0
    """Rows of a held-out split that stand in the training data too; they are kept."""
    sources: tuple[SourceFacts, ...] = ()
    """The mix, one entry a source of the config; empty where the rows were carved from `data.train`."""
    streamed: bool = False
    """Whether the rows are tokenised while training; the counts are those of a sample then."""
    packs: int | None = None
    """Sequences that the kept rows were packed into; None where each row is a sequence of its own."""
    fill: float | None = None
    """Real tokens over the packs' room, 0 to 1."""

    @property
    def sequences(self) -> int:
        """What a micro-batch is counted in: packs, or rows."""
        return self.rows_kept if self.packs is None else self.packs


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """All splits of one preparation."""

    key: str
    """Hash of what goes in: file contents, tokenizer, template, settings; the cache's name for it."""
    fingerprint: str
    """Hash of what comes out: every token and label in order. Equal fingerprints train alike."""
    max_seq_len: int
    splits: Mapping[str, SplitFacts]
    unused_columns: tuple[str, ...] = field(default=())
    """Fields of rows and messages that no format reads."""
    unwritten: Mapping[str, int] = field(default_factory=dict)
    """Fields of messages that the chat template leaves out, by how many messages have them."""
    proofs: tuple[Proof, ...] = ()
    """What was proved on a sample of the chat rows."""

    def to_json(self) -> str:
        """The facts as one JSON object."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> DataFacts:
        """Read back what `to_json` wrote.

        Raises:
            ValueError: the text is not JSON, or lacks a field or has one too many.
        """
        try:
            values = json.loads(text)
            splits = {name: _split_facts(split) for name, split in values.pop("splits").items()}
            unused = tuple(values.pop("unused_columns"))
            proofs = tuple(Proof(**proof) for proof in values.pop("proofs", ()))
            return cls(**values, splits=splits, unused_columns=unused, proofs=proofs)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the facts of a data set: {error}") from error


def summarise_lengths(lengths: Sequence[int]) -> tuple[dict[int, int], tuple[tuple[int, int], ...]]:
    """Percentiles and histogram of row lengths (tokens); both empty for no rows."""
    ordered = sorted(lengths)
    if not ordered:
        return {}, ()
    last = len(ordered) - 1
    percentiles = {p: ordered[round(last * p / 100)] for p in PERCENTILES}
    bars: dict[int, int] = {}
    for length in ordered:
        bar = max(16, 1 << (length - 1).bit_length())
        bars[bar] = bars.get(bar, 0) + 1
    return percentiles, tuple(sorted(bars.items()))


def _split_facts(values: dict[str, Any]) -> SplitFacts:
    percentiles = {int(p): length for p, length in values.pop("percentiles").items()}
    histogram = tuple((bar, count) for bar, count in values.pop("histogram"))
    sources = tuple(SourceFacts(**source) for source in values.pop("sources", ()))
    return SplitFacts(**values, percentiles=percentiles, histogram=histogram, sources=sources)
