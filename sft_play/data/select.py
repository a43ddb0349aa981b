"""Which split each good row goes to: decided from hashes of the rows and the seed, before anything is tokenised.

The hash of a row does not depend on its place, so equal rows go to the same split: none is both learned and held out.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum

from sft_play.config.schema import SplitSection
from sft_play.data.validate import Survey
from sft_play.errors import DataError


class Goes(IntEnum):
    """Where a row goes."""

    NOWHERE = 0
    TRAIN = 1
    VALIDATION = 2
    TEST = 3


Shares = Mapping[Goes, float]


def choose_destinations(
    survey: Survey,
    *,
    goes: Goes,
    source_limits: Sequence[int | None],
    shares: Shares | None = None,
    limit: int | None = None,
) -> bytearray:
    """A `Goes` for each good row of a survey, in reading order.

    Args:
        goes: where rows go that are not carved off.
        source_limits: rows taken at most from each source.
        shares: held-out splits and their shares of the rows, carved off first.
        limit: rows left to `goes` at most.

    Raises:
        DataError: a held-out split would be empty, or would leave nothing to train on.
    """
    destinations = bytearray([goes]) * len(survey.hashes)
    for source, most in enumerate(source_limits):
        _limit(destinations, survey, [n for n, one in enumerate(survey.sources) if one == source], most)
    if shares:
        _carve(destinations, survey.hashes, shares)
    taken = [n for n, one in enumerate(destinations) if one == goes] if limit is not None else []
    _limit(destinations, survey, taken, limit)
    return destinations


def carved_shares(split: SplitSection, given: set[str]) -> dict[Goes, float]:
    """The held-out shares that have no file of their own.

    Raises:
        DataError: together they leave nothing to train on.
    """
    shares = {Goes.VALIDATION: split.validation, Goes.TEST: split.test}
    carved = {goes: share for goes, share in shares.items() if share > 0 and goes.name.lower() not in given}
    if sum(carved.values()) >= 1:
        what = f"held-out shares of {sum(carved.values()):g} leave nothing to train on"
        raise DataError(what, where="data.split", fix="lower them, as in 0.05 each")
    return carved


def _limit(destinations: bytearray, survey: Survey, rows: list[int], most: int | None) -> None:
    """Send all but the `most` rows with the smallest scrambled hash nowhere; reading order stays."""
    if most is None or len(rows) <= most:
        return
    # Scrambled, so that a sample is drawn apart from the held-out rows, which are those with the smallest hashes.
    rows.sort(key=lambda n: (_scramble(survey.hashes[n]), n))
    for n in rows[most:]:
        destinations[n] = Goes.NOWHERE


def _scramble(value: int) -> int:
    mixed = (value ^ (value >> 31)) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 29)


def _carve(destinations: bytearray, hashes: array[int], shares: Shares) -> None:
    counts = Counter(value for value, goes in zip(hashes, destinations, strict=True) if goes != Goes.NOWHERE)
    total, ordered = counts.total(), iter(sorted(counts))
    where: dict[int, Goes] = {}
    for goes, share in shares.items():
        wanted, taken = round(total * share), 0
        while taken < wanted and (value := next(ordered, None)) is not None:
            where[value] = goes
            taken += counts[value]
        if not taken:
            what = f"a share of {share:g} of {total:,} rows is no row at all"
            raise DataError(what, where=f"data.split.{goes.name.lower()}", fix="raise it, or give a file")
    if len(where) == len(counts):
        raise DataError("the held-out shares take every row", where="data.split", fix="lower them, or add rows")
    for n, value in enumerate(hashes):
        if destinations[n] != Goes.NOWHERE:
            destinations[n] = where.get(value, Goes(destinations[n]))
