"""One split on disk: an Arrow IPC stream of token ids and labels, and what is counted from it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from sft_play.data.encode import MASKED, Encoded

LISTS = pa.list_(pa.int32())
SCHEMA = pa.schema([("input_ids", LISTS), ("labels", LISTS), ("source", pa.int16()), ("closes", pa.bool_())])
"""One row a sequence: `input_ids` and `labels` of equal length, -100 where a token carries no loss; the number of the
source that the row came from; whether every closing token of it carries loss."""


class SplitWriter:
    """Writes rows in the order they come.

    Args:
        file: the Arrow IPC stream file to make.
    """

    def __init__(self, file: Path) -> None:
        self._sink = pa.OSFile(str(file), "wb")
        self._stream = pa.ipc.new_stream(self._sink, SCHEMA)

    def write(self, rows: Sequence[Encoded], sources: Sequence[int]) -> None:
        """Append rows and the number of the source of each."""
        if not rows:
            return
        ids, labels = array("i"), array("i")
        ends = array("i", [0])
        for row in rows:
            ids.extend(row.input_ids)
            labels.extend(row.labels)
            ends.append(len(ids))
        lists = [_lists(ends, values) for values in (ids, labels)]
        source = pa.array(sources, pa.int16())
        closes = pa.array([row.closes for row in rows], pa.bool_())
        self._stream.write_batch(pa.RecordBatch.from_arrays([*lists, source, closes], schema=SCHEMA))

    def close(self) -> None:
        """End the stream; the file is whole only then."""
        self._stream.close()
        self._sink.close()


@dataclass(kw_only=True)
class Counts:
    """What a file of rows holds.

    Attributes:
        lengths: tokens of each row, in order.
        loss_tokens: tokens that are predicted and learned; a row's first token never is.
        closed: rows whose closing tokens all carry loss.
        rows_of, tokens_of: by source.
        digest: of every token, label and row boundary in order, wherever the batches of the file end.
    """

    lengths: array[int] = field(default_factory=lambda: array("L"))
    loss_tokens: int = 0
    closed: int = 0
    rows_of: dict[int, int] = field(default_factory=dict)
    tokens_of: dict[int, int] = field(default_factory=dict)
    digest: str = ""


def count_rows(file: Path) -> Counts:
    """Read a file of rows once and count it."""
    counts = Counts()
    hashers = [sha256() for _ in range(3)]
    for batch in read_batches(file):
        lengths = pc.list_value_length(batch["input_ids"])
        flat = [batch[name].flatten() for name in ("input_ids", "labels")]
        for hasher, values in zip(hashers, (lengths, *flat), strict=True):
            hasher.update(_bytes(values))
        counts.lengths.extend(lengths.to_pylist())
        firsts = pc.list_element(batch["labels"], 0)
        counts.loss_tokens += _learned(flat[1]) - _learned(firsts)
        counts.closed += pc.sum(batch["closes"]).as_py() or 0
        table = pa.table({"source": batch["source"], "tokens": lengths}).group_by("source")
        for row in table.aggregate([("tokens", "sum"), ("tokens", "count")]).to_pylist():
            source = row["source"]
            counts.rows_of[source] = counts.rows_of.get(source, 0) + row["tokens_count"]
            counts.tokens_of[source] = counts.tokens_of.get(source, 0) + row["tokens_sum"]
    counts.digest = sha256(b"".join(hasher.digest() for hasher in hashers)).hexdigest()
    return counts


def read_batches(file: Path) -> Iterator[pa.RecordBatch]:
    """The record batches of a stream file, memory-mapped."""
    with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
        yield from stream


def _bytes(values: pa.Array) -> memoryview:
    """The values of an int32 array without nulls."""
    return memoryview(values.buffers()[1])[4 * values.offset : 4 * (values.offset + len(values))]


def _learned(labels: pa.Array) -> int:
    return pc.sum(pc.not_equal(labels, MASKED)).as_py() or 0


def _lists(ends: array[int], values: array[int]) -> pa.ListArray:
    buffers = [None, pa.py_buffer(ends)]
    flat = pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
    return pa.Array.from_buffers(LISTS, len(ends) - 1, buffers, children=[flat])
