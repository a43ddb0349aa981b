"""Rows longer than the limit: cut, dropped, split into pieces, or refused."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from sft_play.config.schema import Config
from sft_play.data.encode import MASKED, Encoded
from sft_play.data.formats import Row, Text
from sft_play.data.validate import Rejects
from sft_play.facts.data import DropReason

Policy = Literal["truncate", "drop", "split", "error"]


def overlong_rejects() -> Rejects:
    """Takes the rows that `on_overlong: error` refuses; `on_bad_row` does not spare them."""
    return Rejects(
        "error", kind="overlong", fix="raise model.max_seq_len, or set data.on_overlong to truncate, drop or split"
    )


class Fitter:
    """Brings rows within `model.max_seq_len`, and counts what that took.

    Args:
        split: name of the split, for the rows that are refused.
        refused: gets the rows that `on_overlong: error` refuses.

    Attributes:
        dropped: rows of which nothing is left, by `DropReason`.
        truncated, split_up: rows that were cut, and rows that were cut into pieces.
    """

    def __init__(self, config: Config, split: str, refused: Rejects) -> None:
        self._limit, self._config, self._split, self._refused = config.model.max_seq_len, config, split, refused
        crossing = config.data.cross_documents and config.data.task != "sft"
        self._blocks = Blocks(self._limit) if crossing else None
        self.dropped: Counter[str] = Counter()
        self.truncated = self.split_up = 0

    def fit(self, row: Row, encoded: Encoded) -> list[Encoded]:
        """The row itself, cut, in pieces, or nothing."""
        text = isinstance(row.body, Text)
        if not encoded.loss_tokens:
            self.dropped[DropReason.NOTHING_TO_LEARN] += 1
            return []
        if text and self._blocks:
            return self._blocks.add(encoded)
        if len(encoded.input_ids) <= self._limit:
            return [encoded]
        policy = policy_of(self._config.data.on_overlong, text=text, task=self._config.data.task)
        if policy == "error":
            what = f"{len(encoded.input_ids):,} tokens, model.max_seq_len is {self._limit:,}"
            self._refused.add(self._split, row.bad("", what))
            return []
        if policy == "split" and (pieces := split_row(encoded, self._limit)):
            self.split_up += 1
            return pieces
        cut = encoded.cut(self._limit)
        if policy != "truncate" or not cut.loss_tokens:
            self.dropped[DropReason.OVERLONG] += 1
            return []
        self.truncated += 1
        return [cut]

    def rest(self) -> list[Encoded]:
        """The last block of texts that run on across documents."""
        return self._blocks.rest() if self._blocks else []


def policy_of(on_overlong: str, *, text: bool, task: str) -> Policy:
    """What happens to an overlong row: `data.on_overlong`, of which `auto` depends on the task.

    Args:
        text: the row is running text.
    """
    match on_overlong:
        case "auto":
            return "split" if text and task != "sft" else "truncate"
        case "truncate" | "drop" | "split" | "error":
            return on_overlong
    raise ValueError(on_overlong)


def split_row(row: Encoded, limit: int) -> list[Encoded]:
    """Consecutive pieces of at most `limit` tokens.

    A piece begins with the last token of the piece before, unlearned: so each learned token is predicted once, from
    what stands before it. A piece of which nothing is learned is left out.
    """
    step = max(1, limit - 1)
    pieces = []
    for start in range(0, max(1, len(row.input_ids) - 1), step):
        labels = row.labels[start : start + limit]
        labels[0] = MASKED
        inside = tuple(at - start for at in row.closings if start < at < start + limit)
        piece = Encoded(input_ids=row.input_ids[start : start + limit], labels=labels, closings=inside)
        if piece.loss_tokens:
            pieces.append(piece)
    return pieces


class Blocks:
    """Texts joined into blocks of just `limit` tokens that run on across documents.

    Like `split_row`, a block begins with the last token of the one before.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ids: list[int] = []
        self._labels: list[int] = []

    def add(self, row: Encoded) -> list[Encoded]:
        """The blocks that this document fills."""
        self._ids += row.input_ids
        self._labels += row.labels
        full = []
        while len(self._ids) > self._limit:
            full.append(self._block())
        return full

    def rest(self) -> list[Encoded]:
        """The last block, which may be short."""
        return [self._block()] if len(self._ids) > 1 else []

    def _block(self) -> Encoded:
        ids, labels, step = self._ids[: self._limit], self._labels[: self._limit], self._limit - 1
        labels[0] = MASKED
        del self._ids[:step], self._labels[:step]
        return Encoded(input_ids=ids, labels=labels, closings=())
