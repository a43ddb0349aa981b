"""One split on disk: an Arrow IPC stream of token ids and labels, and the counts that go with it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pyarrow as pa

from sft_play.data.encode import Encoded
from sft_play.facts.data import DropReason, SplitFacts, summarise_lengths

SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32()))])
"""One row a sequence: `input_ids` and `labels` of equal length, -100 where a token carries no loss."""


class SplitWriter:
    """Writes rows in the order they come and counts them.

    Args:
        file: the Arrow IPC stream file to make.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.dropped: Counter[str] = Counter()
        self.truncated = 0
        self._sink = pa.OSFile(str(file), "wb")
        self._stream = pa.ipc.new_stream(self._sink, SCHEMA)
        self._digest = sha256()
        self._lengths = array("L")
        self._loss_tokens = 0
        self._closed_rows = 0

    @property
    def rows(self) -> int:
        """Rows written."""
        return len(self._lengths)

    def write(self, rows: list[Encoded]) -> None:
        """Append rows."""
        if not rows:
            return
        ids, labels = array("i"), array("i")
        ends = array("i", [0])
        for row in rows:
            ids.extend(row.input_ids)
            labels.extend(row.labels)
            ends.append(len(ids))
            self._lengths.append(len(row.input_ids))
            self._loss_tokens += row.loss_tokens
            self._closed_rows += row.closes
        for column in (ends, ids, labels):
            self._digest.update(memoryview(column))
        columns = [_lists(ends, values) for values in (ids, labels)]
        self._stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))

    def close(self) -> None:
        """End the stream; the file is whole only then."""
        self._stream.close()
        self._sink.close()

    @property
    def digest(self) -> str:
        """Hash of every token, label and row boundary in order."""
        return self._digest.hexdigest()

    def facts(self, formats: Mapping[str, int]) -> SplitFacts:
        """What was written."""
        percentiles, histogram = summarise_lengths(self._lengths)
        return SplitFacts(
            rows_read=self.rows + self.dropped.total(),
            rows_kept=self.rows,
            dropped={reason: self.dropped[reason] for reason in DropReason if self.dropped[reason]},
            truncated=self.truncated,
            tokens=sum(self._lengths),
            loss_tokens=self._loss_tokens,
            longest=max(self._lengths, default=0),
            percentiles=percentiles,
            histogram=histogram,
            formats=dict(formats),
            end_of_turn_share=self._closed_rows / self.rows if self.rows else 0.0,
        )


def _lists(ends: array[int], values: array[int]) -> pa.ListArray:
    buffers = [None, pa.py_buffer(ends)]
    flat = pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
    return pa.Array.from_buffers(pa.list_(pa.int32()), len(ends) - 1, buffers, children=[flat])
