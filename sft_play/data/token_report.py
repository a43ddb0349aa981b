"""What can be said of prepared data: the facts, what packing gives or would give, and a few real rows."""

from __future__ import annotations

import json
import random
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from sft_play.config.schema import Config
from sft_play.data.examples import Example, read_examples, stream_examples
from sft_play.data.pack import pack_lengths
from sft_play.data.prepare import Prepared, open_stream
from sft_play.data.report import RowReport
from sft_play.data.template import load_text_tokenizer
from sft_play.data.write import read_batches
from sft_play.errors import SftPlayError
from sft_play.facts.data import DataFacts, SplitFacts

JUDGED_ROWS = 50_000
"""Rows from which packing is judged where it is off."""
_PADDED_TOGETHER = 8
_BARS = 8
_WIDE = 6


@dataclass(frozen=True, kw_only=True)
class WouldPack:
    """What packing would make of the training rows, which are not packed.

    Attributes:
        packs: sequences that all rows would make.
        fill: real tokens over the room of the packs, 0 to 1.
        padded_fill: the same of micro-batches as they are, padded to their longest row.
        together: rows of such a micro-batch.
    """

    packs: int
    fill: float
    padded_fill: float
    together: int


@dataclass(frozen=True, kw_only=True)
class TokenReport:
    """Prepared data.

    Attributes:
        histogram: (length, rows up to that length and above the bar before) of the training rows, to look at.
        would_pack: None where the rows are packed or streamed.
        bad_rows: rows that were only found to be bad when they were tokenised, as `rejects.jsonl` has them.
    """

    facts: DataFacts
    histogram: tuple[tuple[int, int], ...]
    would_pack: WouldPack | None
    examples: tuple[Example, ...]
    bad_rows: tuple[dict[str, Any], ...]


def make_token_report(config: Config, prepared: Prepared, tokenizer_dir: Path, *, known_bad: int = 0) -> TokenReport:
    """Look at what was prepared.

    Args:
        known_bad: rejected rows that are reported elsewhere; the first of the rejects.

    Raises:
        SftPlayError: the tokenizer cannot be read.
    """
    facts, file = prepared.facts, prepared.splits.get("train")
    tokenizer = load_text_tokenizer(tokenizer_dir, config.model.chat_template)
    if file is None:
        return TokenReport(
            facts=facts,
            histogram=facts.splits["train"].histogram,
            would_pack=None,
            examples=stream_examples(open_stream(config, tokenizer_dir).sequences(), tokenizer),
            bad_rows=(),
        )
    lengths = read_lengths(file)
    packed = facts.splits["train"].packs is not None
    return TokenReport(
        facts=facts,
        histogram=bars_of(lengths, facts.splits["train"]),
        would_pack=None if packed else judge_packing(lengths, config),
        examples=read_examples(file, tokenizer),
        bad_rows=_read_rejects(prepared.rejects)[known_bad:],
    )


def read_lengths(file: Path) -> array[int]:
    """Tokens of each row of a file, also of packed ones."""
    lengths = array("L")
    for batch in read_batches(file):
        packed = "lengths" in batch.schema.names
        each = batch["lengths"].flatten() if packed else pc.list_value_length(batch["input_ids"])
        lengths.extend(each.to_pylist())
    return lengths


def bars_of(lengths: Sequence[int], facts: SplitFacts) -> tuple[tuple[int, int], ...]:
    """A histogram to look at: a few equal bars and one for the rest, or doubling ones where lengths are far apart."""
    few, middle, most = facts.percentiles[1], facts.percentiles[50], facts.percentiles[99]
    if most > _WIDE * middle:
        return facts.histogram
    step = _round_step(max(1, most - few) / _BARS)
    ends = [*range(-(-few // step) * step, most + step, step)]
    ends = [end for end in ends if end < facts.longest] + [facts.longest]
    counts = [0] * len(ends)
    for length in lengths:
        counts[bisect_left(ends, length)] += 1
    return tuple(zip(ends, counts, strict=True))


def _round_step(step: float) -> int:
    """The next number of the form 1, 2, 5, 10, 20, 50, ..."""
    unit = 1
    while True:
        for factor in (1, 2, 5):
            if factor * unit >= step:
                return factor * unit
        unit *= 10


def judge_packing(all_lengths: Sequence[int], config: Config) -> WouldPack:
    """What packing would make of rows of these lengths, judged from `JUDGED_ROWS` of them."""
    lengths = random.Random(0).sample(all_lengths, min(JUDGED_ROWS, len(all_lengths)))
    capacity, given = config.model.max_seq_len, config.train.batch_size
    together = given if isinstance(given, int) else _PADDED_TOGETHER
    packs = len(pack_lengths(lengths, capacity))
    padded = [lengths[n : n + together] for n in range(0, len(lengths), together)]
    return WouldPack(
        packs=round(packs * len(all_lengths) / len(lengths)),
        fill=sum(lengths) / (packs * capacity),
        padded_fill=sum(lengths) / sum(max(some) * len(some) for some in padded),
        together=together,
    )


def report_as_json(
    rows: RowReport | None, tokens: TokenReport | None, refused: SftPlayError | None = None
) -> dict[str, Any]:
    """The whole report for programs. What could not be looked at is null; `refused` holds error lines."""
    first = None
    if rows:
        first = asdict(rows) | {"failed": [line for error in rows.failed for line in error.lines()]}
    return {
        "rows": first,
        "tokens": None if tokens is None else json.loads(json.dumps(asdict(tokens))),
        "refused": refused.lines() if refused else [],
    }


def _read_rejects(file: Path | None) -> tuple[dict[str, Any], ...]:
    if file is None:
        return ()
    with file.open(encoding="utf-8") as stream:
        return tuple(json.loads(line) for line in stream)
