"""Real rows out of prepared data, as text in pieces that are learned or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from sft_play.data.encode import MASKED
from sft_play.data.stream import Tokens
from sft_play.data.template import TextTokenizer
from sft_play.data.write import read_batches

EXAMPLES = 3
PIECE_CHARACTERS = 400
_FIRST_PIECES, _LAST_PIECES = 8, 4


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Consecutive tokens of a row that are all learned or all not; long ones without their middle."""

    text: str
    learned: bool


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row.

    Attributes:
        number: of the sequence in the file, from 1; of a pack, its first document is shown.
        of: sequences in the file.
        loss_tokens: tokens of it that carry loss.
    """

    number: int
    of: int
    tokens: int
    loss_tokens: int
    pieces: tuple[Piece, ...]


def read_examples(file: Path, tokenizer: TextTokenizer, count: int = EXAMPLES) -> tuple[Example, ...]:
    """A few rows of a split's file: one of each source where there are several, else evenly spread.

    Args:
        file: rows or packs.
    """
    total, firsts = _look_over(file)
    spread = [round(n * (total - 1) / max(1, count - 1)) for n in range(count)]
    wanted = sorted(list(dict.fromkeys([*(firsts if len(firsts) > 1 else []), *spread]))[: min(count, total)])
    return tuple(_example(number, total, row, tokenizer) for number, row in _rows(file, wanted))


def stream_examples(rows: Iterable[Tokens], tokenizer: TextTokenizer) -> tuple[Example, ...]:
    """The first rows of a stream."""
    return tuple(_example(number, EXAMPLES, row, tokenizer) for number, row in enumerate(islice(rows, EXAMPLES)))


def _look_over(file: Path) -> tuple[int, list[int]]:
    """Rows in the file, and the first row of each source."""
    total = 0
    firsts: dict[int, int] = {}
    for batch in read_batches(file):
        if "source" in batch.schema.names:
            for source in pc.unique(batch["source"]).to_pylist():
                firsts.setdefault(source, total + pc.index(batch["source"], source).as_py())
        total += batch.num_rows
    return total, sorted(firsts.values())


def _rows(file: Path, wanted: Sequence[int]) -> Iterable[tuple[int, dict[str, Any]]]:
    first = 0
    for batch in read_batches(file):
        for number in wanted:
            if first <= number < first + batch.num_rows:
                yield number, batch.slice(number - first, 1).to_pylist()[0]
        first += batch.num_rows


def _example(number: int, total: int, row: dict[str, Any], tokenizer: TextTokenizer) -> Example:
    ids, labels = row["input_ids"], row["labels"]
    if "lengths" in row:
        ids, labels = ids[: row["lengths"][0]], labels[: row["lengths"][0]]
    learned = [label != MASKED for label in labels]
    pieces = list(pieces_of(ids, learned, tokenizer))
    left_out = len(pieces) - _FIRST_PIECES - _LAST_PIECES
    if left_out > 1:
        gap = Piece(text=f"(... {left_out} more pieces ...)", learned=False)
        pieces = [*pieces[:_FIRST_PIECES], gap, *pieces[-_LAST_PIECES:]]
    return Example(number=number + 1, of=total, tokens=len(ids), loss_tokens=sum(learned[1:]), pieces=tuple(pieces))


def pieces_of(ids: Sequence[int], learned: Sequence[bool], tokenizer: TextTokenizer) -> Iterable[Piece]:
    """The text of a row in pieces.

    A piece is what it adds to the text before it: decoded alone, some tokenizers drop the blank that it begins with.
    """
    start, before = 0, ""
    for is_learned, group in groupby(learned):
        end = start + sum(1 for _ in group)
        text = tokenizer.tokenizer.decode(ids[:end], skip_special_tokens=False)
        added = text.removeprefix(before)
        if not text.startswith(before):  # a character whose bytes stand on both sides
            added = tokenizer.tokenizer.decode(ids[start:end], skip_special_tokens=False)
        yield Piece(text=_without_middle(added), learned=is_learned)
        start, before = end, text


def _without_middle(text: str) -> str:
    left_out = len(text) - PIECE_CHARACTERS
    if left_out < PIECE_CHARACTERS // 4:
        return text
    half = PIECE_CHARACTERS // 2
    return f"{text[:half]} (... {left_out:,} more characters ...) {text[-half:]}"
