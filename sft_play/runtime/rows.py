"""Rows over ranks: each row is trained on once an epoch and evaluated once, whatever their number.

accelerate fills the last round of an epoch with rows from its start, and drops evaluation rows under `drop_last`;
a row whose labels are all ignored takes part in every collective and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset, concatenate_datasets
from torch.utils.data import DataLoader

from sft_play.plan.build import Plan
from sft_play.runtime.collate import IGNORED, LENGTHS
from sft_play.runtime.job import SOURCE

ROW = "row"
"""Column of training rows: the number of the row among the prepared ones, from 0; -1 for one that fills a batch."""


def numbered(rows: Any) -> Any:
    """Training rows with their numbers; a stream has none."""
    return rows.add_column(ROW, np.arange(len(rows))) if isinstance(rows, Dataset) else rows


def silent_row(rows: Dataset) -> dict[str, Any]:
    """Two tokens of the first row, nothing of them learned; for packs one document."""
    token = rows[0]["input_ids"][0]
    row: dict[str, Any] = {"input_ids": [token, token], "labels": [IGNORED, IGNORED]}
    extra = {LENGTHS: [2], SOURCE: 0, ROW: -1}
    return row | {name: value for name, value in extra.items() if name in rows.column_names}


def filled(rows: Dataset, batch_rows: int, plan: Plan) -> Dataset:
    """Evaluation rows up to whole batches on every rank, so that none is seen twice and none is dropped."""
    ranks = plan.global_batch // (plan.micro_batch * plan.grad_accum)
    lacking = -len(rows) % (batch_rows * ranks)
    if not lacking:
        return rows
    row = silent_row(rows)
    filler = Dataset.from_dict({name: [row[name]] * lacking for name in row}, features=rows.features)
    return concatenate_datasets([rows, filler])


class OwnRows(BatchSamplerShard):
    """A rank's share of an epoch's batches; an empty one where the last round has none left for it."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.batch_sampler)
        while several := list(islice(batches, self.num_processes)):
            if self.drop_last and len(several) < self.num_processes:
                return
            yield several[self.process_index] if self.process_index < len(several) else []


@dataclass(frozen=True)
class SilentWhereEmpty:
    """A collator that puts the silent row into an empty batch."""

    collate: Any
    row: dict[str, Any]

    def __call__(self, examples: list[Any]) -> Any:
        return self.collate(examples or [self.row])


@dataclass(frozen=True)
class KeepNumbers:
    """A collator that hands on the numbers of training rows and of evaluation rows' sources, which no model takes."""

    collate: Any

    def __call__(self, examples: list[Any]) -> Any:
        kept = [name for name in (SOURCE, ROW) if name in examples[0]]
        bare = [{name: value for name, value in row.items() if name not in kept} for row in examples]
        numbers = {name: torch.tensor([row[name] for row in examples]) for name in kept}
        return {**self.collate(bare), **numbers}


def repeat_no_row(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Give the ranks of a training loader their own rows only; its collator must take an empty batch."""
    if type(loader.batch_sampler) is BatchSamplerShard:
        loader.batch_sampler.__class__ = OwnRows  # torch lets no loader's sampler be replaced
    return loader
