"""Rows longer than the limit: cut, dropped, split into pieces, or refused."""

from __future__ import annotations

from typing import Literal

from sft_play.data.encode import MASKED, Encoded

Policy = Literal["truncate", "drop", "split", "error"]


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
