"""What a worker was told to do: run.json, read once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset

from sft_play.config.schema import Config
from sft_play.errors import AppliedDiffersError
from sft_play.plan.build import Plan
from sft_play.record.checkpoints import step_of
from sft_play.record.run_dir import RunDir
from sft_play.record.told import read_told
from sft_play.runtime.collate import LENGTHS
from sft_play.runtime.stream import StreamPlace, stream_dataset

COLUMNS = ("input_ids", "labels", LENGTHS)
SOURCE = "source"
"""Column of held-out rows: the number of the source that a row came from."""
# Rows that a calibration chooses from.
LONGEST_ROWS = 64
# Rows of a stream that are looked at before it is trained on.
FIRST_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Job:
    """Config and plan of a run, and where its model and its prepared rows lie.

    Attributes:
        told: config, plan and stamp as they were read: what every rank must have been told alike.
    """

    run: RunDir
    config: Config
    plan: Plan
    stamp: dict[str, Any]
    model_path: Path
    splits: dict[str, Path]
    resume_from: Path | None
    longest_first: bool
    told: dict[str, Any]

    def dataset(self, split: str) -> Any:
        """Prepared rows, memory-mapped; None where the split does not exist.

        Columns are input_ids and labels; lengths of packs; the source of held-out rows.

        Streamed training rows are a `datasets.IterableDataset` of the same columns.

        Raises:
            AppliedDiffersError: the rows to train on are packed and should not be, or the other way round.
        """
        if split == "train" and self.config.data.streaming:
            return stream_dataset(self._place())
        if split not in self.splits:
            return None
        rows = Dataset.from_file(str(self.splits[split]))
        wanted = COLUMNS if split == "train" else (*COLUMNS, SOURCE)
        rows = rows.select_columns([name for name in wanted if name in rows.column_names])
        if split == "train" and (LENGTHS in rows.column_names) != self.config.data.packing:
            raise AppliedDiffersError(f"data.packing is {self.config.data.packing} and the rows are prepared otherwise")
        if self.longest_first:
            lengths = pc.list_value_length(rows.data.column("input_ids"))
            order = pc.sort_indices(lengths, sort_keys=[("", "descending")])
            return rows.select(order.to_pylist()[:LONGEST_ROWS])
        limit = self.config.train.eval_max_rows
        return rows.select(range(limit)) if split != "train" and limit and limit < len(rows) else rows

    def first_rows(self, rows: Any) -> Dataset:
        """Training rows that can be looked at by number: all of them, or the first of a stream."""
        return rows if isinstance(rows, Dataset) else Dataset.from_list(list(rows.take(FIRST_ROWS)))

    def _place(self) -> StreamPlace:
        return StreamPlace(
            config=self.config,
            model_path=self.model_path,
            folder=self.run.data,
            skip=step_of(self.resume_from) * self.plan.global_batch,
            keep=os.environ.get("RANK", "0") == "0",
        )


def read_job(run_json: Path) -> Job:
    """The job of the run whose folder holds `run_json`.

    Raises:
        DataError: the file is damaged.
    """
    told = read_told(run_json)
    values, resume_from = told.values, told.values.get("resume_from")
    return Job(
        run=RunDir(Path(values["run"]), node=values["node"]),
        config=told.config,
        plan=told.plan,
        stamp=values["stamp"],
        model_path=Path(values["model_path"]),
        splits={name: Path(path) for name, path in values["splits"].items()},
        longest_first=values["longest_first"],
        told={**{key: values[key] for key in ("config", "plan", "stamp")}, "resume_from": resume_from},
        resume_from=Path(resume_from) if resume_from else None,
    )
