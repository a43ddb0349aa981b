"""Several rows in one sequence: which go together, and the packed split on disk.

A pack is a list of whole documents. Where each begins is written down (`lengths`), and the first label of each is
masked, so that no document is asked to predict the next one's beginning.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import pyarrow as pa

from sft_play.data.encode import MASKED

PACK_SCHEMA = pa.schema([(name, pa.list_(pa.int32())) for name in ("input_ids", "labels", "lengths")])
"""One row a pack: documents one after the other, and the tokens of each."""
_BATCH_TOKENS = 1 << 20
_WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class PackFacts:
    """What packing made of a split.

    Attributes:
        packs: sequences written.
        fill: tokens over packs x capacity, 0 to 1.
    """

    packs: int
    fill: float


def pack_lengths(lengths: Sequence[int], capacity: int, seed: int = 0) -> list[list[int]]:
    """Row numbers of each pack, best-fit decreasing: the longest first, each into the fullest pack that has room.

    Rows of one length, and the packs themselves, are in a random order that only the seed decides.

    Args:
        lengths: tokens of each row, none longer than `capacity`.
        capacity: tokens that a pack holds.

    Raises:
        ValueError: a row is longer than a pack.
    """
    if max(lengths, default=0) > capacity:
        raise ValueError(f"a row of {max(lengths)} tokens does not go into a pack of {capacity}")
    scramble = random.Random(seed)
    order = list(range(len(lengths)))
    scramble.shuffle(order)
    order.sort(key=lengths.__getitem__, reverse=True)
    packs: list[list[int]] = []
    # Packs by the room they have left; bit r of `rooms` says that there is one with r tokens left.
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    for row in order:
        length = lengths[row]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            pack = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
            packs[pack].append(row)
        else:
            room, pack = capacity, len(packs)
            packs.append([row])
        left = room - length
        if left:
            by_room[left].append(pack)
            rooms |= 1 << left
    scramble.shuffle(packs)
    return packs


def write_packs(rows: Path, packs: Path, capacity: int, seed: int) -> PackFacts:
    """Pack a split's rows. Rows are read where they lie on disk; about a million tokens are held at a time.

    Args:
        rows: an Arrow IPC stream with list columns `input_ids` and `labels`.
        packs: the stream to write, `PACK_SCHEMA`.
        capacity: tokens that a pack holds, at least the longest row's.
        seed: of the order among rows of one length, and of the packs.
    """
    with pa.memory_map(str(rows)) as mapped:
        stored = _StoredRows(mapped)
        chosen = pack_lengths(stored.lengths, capacity, seed)
        with pa.OSFile(str(packs), "wb") as sink, pa.ipc.new_stream(sink, PACK_SCHEMA) as stream:
            for some in _in_batches(chosen, stored.lengths):
                stream.write_batch(stored.packed(some))
        tokens = sum(stored.lengths)
        stored.release()
    return PackFacts(packs=len(chosen), fill=tokens / (len(chosen) * capacity) if chosen else 0.0)


class _StoredRows:
    """The rows of a stream by number, without reading what is not asked for."""

    def __init__(self, mapped: pa.MemoryMappedFile) -> None:
        self._columns: list[tuple[memoryview, memoryview]] = []
        self._starts: list[memoryview] = []
        self.lengths = array("i")
        sizes = [0]
        with pa.ipc.open_stream(mapped) as stream:
            for batch in stream:
                ids, labels = batch.column("input_ids"), batch.column("labels")
                starts = _bytes(ids.offsets).cast("i")
                if not labels.offsets.equals(ids.offsets):
                    raise ValueError("input_ids and labels differ in length")
                self._columns.append((_bytes(ids.values), _bytes(labels.values)))
                self._starts.append(starts)
                self.lengths.extend(after - start for start, after in pairwise(starts))
                sizes.append(batch.num_rows)
        self._first = list(accumulate(sizes))

    def packed(self, packs: Sequence[Sequence[int]]) -> pa.RecordBatch:
        """These packs as one batch."""
        ids, labels, lengths = array("i"), array("i"), array("i")
        token_ends, document_ends = array("i", [0]), array("i", [0])
        for pack in packs:
            for row in pack:
                number = bisect_right(self._first, row) - 1
                at = row - self._first[number]
                start, after = self._starts[number][at], self._starts[number][at + 1]
                row_ids, row_labels = self._columns[number]
                begin = len(labels)
                ids.frombytes(row_ids[_WIDTH * start : _WIDTH * after])
                labels.frombytes(row_labels[_WIDTH * start : _WIDTH * after])
                if after > start:
                    labels[begin] = MASKED
                lengths.append(after - start)
            token_ends.append(len(ids))
            document_ends.append(len(lengths))
        columns = [_lists(token_ends, ids), _lists(token_ends, labels), _lists(document_ends, lengths)]
        return pa.RecordBatch.from_arrays(columns, schema=PACK_SCHEMA)

    def release(self) -> None:
        """Let the file go: it cannot be closed while something points into it."""
        self._columns.clear()
        self._starts.clear()


def _in_batches(packs: Sequence[list[int]], lengths: Sequence[int]) -> Iterator[list[list[int]]]:
    some: list[list[int]] = []
    tokens = 0
    for pack in packs:
        some.append(pack)
        tokens += sum(lengths[row] for row in pack)
        if tokens >= _BATCH_TOKENS:
            yield some
            some, tokens = [], 0
    if some:
        yield some


def _bytes(values: pa.Array) -> memoryview:
    """The bytes of an int32 array, not copied."""
    buffer = values.buffers()[1]
    if buffer is None or not len(values):
        return memoryview(b"")
    return memoryview(buffer).cast("B")[_WIDTH * values.offset : _WIDTH * (values.offset + len(values))]


def _lists(ends: array[int], values: array[int]) -> pa.ListArray:
    flat = pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
    return pa.Array.from_buffers(pa.list_(pa.int32()), len(ends) - 1, [None, pa.py_buffer(ends)], children=[flat])
