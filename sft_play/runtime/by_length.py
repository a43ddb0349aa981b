"""`train.group_by_length`: rows of like length in one optimizer step, so that little of it is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch.utils.data import Sampler

from sft_play.plan.lengths import sorted_steps


def row_lengths(rows: Dataset) -> list[int]:
    """Tokens of every row, in the order of the rows, without reading the tokens."""
    lengths: Sequence[int] = pc.list_value_length(rows.data.column("input_ids")).to_pylist()
    if rows._indices is None:
        return list(lengths)
    return [lengths[number] for number in rows._indices.column(0).to_pylist()]


def order_by_length(lengths: Sequence[int], step_rows: int, generator: torch.Generator) -> list[int]:
    """An epoch's order: a permutation of the rows in which each `step_rows` in a row are of like length.

    Rows are shuffled, those of several steps (`sorted_steps`) sorted at a time and cut into steps, and those steps
    shuffled. The step with the longest row comes first, so that too little memory shows at once; what fills no whole
    step comes last. The order does not depend on how a step is cut into micro-batches and ranks.
    """
    shuffled: list[int] = torch.randperm(len(lengths), generator=generator).tolist()
    window = step_rows * sorted_steps(len(lengths), step_rows)
    whole = len(shuffled) // step_rows * step_rows
    steps: list[list[int]] = []
    for start in range(0, whole, window):
        rows = sorted(shuffled[start : min(start + window, whole)], key=lambda row: -lengths[row])
        cut = [rows[at : at + step_rows] for at in range(0, len(rows), step_rows)]
        steps += [cut[place] for place in torch.randperm(len(cut), generator=generator).tolist()]
    rest = sorted(shuffled[whole:], key=lambda row: -lengths[row])
    longest = max(range(len(steps)), key=lambda place: lengths[steps[place][0]], default=0)
    if steps:
        steps.insert(0, steps.pop(longest))
    return [row for step in [*steps, rest] for row in step]


class ByLength(Sampler[int]):
    """The rows of one epoch after another, of like length in each step; the same on every rank and when resumed.

    Args:
        lengths: tokens of every row.
        step_rows: rows of one optimizer step over all ranks.
    """

    def __init__(self, lengths: Sequence[int], step_rows: int, seed: int) -> None:
        self._lengths, self._step_rows, self._seed = lengths, step_rows, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The loader tells the number of the epoch, from 0."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return iter(order_by_length(self._lengths, self._step_rows, generator))


def sampler_by_length(rows: Any, step_rows: int, seed: int) -> ByLength:
    """The sampler of prepared rows."""
    return ByLength(row_lengths(rows), step_rows, seed)
