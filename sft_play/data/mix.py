"""Several sources as one: how many rows each gives, and the rows written in that proportion.

The mix has as many rows as its sources have together, or `data.max_rows`. A source that has fewer than its share is
gone through several times, one that has more is sampled: no weight bends to the sizes of the files.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from sft_play.data.write import SCHEMA, read_batches
from sft_play.errors import DataError

_BATCH_ROWS = 1000


def shares_of(weights: Sequence[float]) -> list[float]:
    """Weights above 0 as shares of 1, however large or small they are."""
    largest = max(weights)
    parts = [weight / largest for weight in weights]
    return [part / sum(parts) for part in parts]


def share_rows(weights: Sequence[float], total: int) -> list[int]:
    """Rows of each source, `total` in all, by the largest remainder."""
    exact = [total * share for share in shares_of(weights)]
    rows = [int(share) for share in exact]
    for source in sorted(range(len(exact)), key=lambda n: rows[n] - exact[n])[: total - sum(rows)]:
        rows[source] += 1
    return rows


def mix_rows(
    file: Path, out: Path, *, weights: Sequence[float], names: Sequence[str], limit: int | None, seed: int
) -> dict[int, int]:
    """Write the rows of `file` in proportion to the weights of their sources.

    Args:
        names: of the sources, for errors.
        limit: rows of the mix at most.
        seed: decides which rows are left out or taken once more.

    Returns:
        Different rows that each source has.

    Raises:
        DataError: a source has no row to give.
    """
    places = _places(file, len(weights))
    empty = [names[number] for number, rows in enumerate(places) if not rows]
    if empty:
        fix = "take it out of the mix, or mend its rows"
        raise DataError(f"no row of {empty[0]} is left to learn from", where="data.train", fix=fix)
    have = sum(map(len, places))
    copies = array("L", [0]) * have
    for number, (rows, wanted) in enumerate(zip(places, share_rows(weights, min(have, limit or have)), strict=True)):
        passes, rest = divmod(wanted, len(rows))
        for row in rows:
            copies[row] = passes
        for row in random.Random(f"{seed}/{number}").sample(rows, rest):
            copies[row] += 1
    _write_copies(file, out, copies)
    return {number: len(rows) for number, rows in enumerate(places)}


def _places(file: Path, sources: int) -> list[array[int]]:
    places = [array("L") for _ in range(sources)]
    row = 0
    for batch in read_batches(file):
        for source in batch["source"].to_pylist():
            places[source].append(row)
            row += 1
    return places


def _write_copies(file: Path, out: Path, copies: array[int]) -> None:
    """Pass after pass over the rows, each with those that are still wanted."""
    with pa.OSFile(str(out), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as stream:
        left: list[tuple[pa.RecordBatch, int, array[int]]] = []
        first = 0
        for batch in read_batches(file):
            left.append((batch, first, array("L", range(batch.num_rows))))
            first += batch.num_rows
        held: list[pa.RecordBatch] = []
        done = waiting = 0
        while left:
            wanted = [
                (batch, first, array("L", (row for row in rows if copies[first + row] > done)))
                for batch, first, rows in left
            ]
            left = [one for one in wanted if one[2]]
            for batch, _, rows in left:
                held.append(batch.take(pa.array(rows, pa.int64())))
                waiting += len(rows)
                if waiting >= _BATCH_ROWS:
                    stream.write_batch(pa.concat_batches(held))
                    held, waiting = [], 0
            done += 1
        if held:
            stream.write_batch(pa.concat_batches(held))


def said_mix(rows: Mapping[str, tuple[int, int]]) -> str:
    """The mix in words: `a 60.0% (2.40 x 500 rows), b 40.0% (0.80 x 1,000 rows)`.

    Args:
        rows: by source, the rows it has and the rows it gave.
    """
    total = max(1, sum(taken for _, taken in rows.values()))
    parts = [f"{name} {taken / total:.1%} ({taken / have:.2f} x {have:,} rows)" for name, (have, taken) in rows.items()]
    return ", ".join(parts)
