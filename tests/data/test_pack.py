"""Packing: which rows go together, and what is written."""

from __future__ import annotations

import random
import time
from array import array
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from sft_play.data import pack as pack_module
from sft_play.data.encode import MASKED
from sft_play.data.pack import PACK_SCHEMA, pack_lengths, write_packs

ROW_SCHEMA = pa.schema([*list(PACK_SCHEMA)[:2], ("source", pa.int16())])


def chat_lengths(count: int, *, longest: int = 400) -> list[int]:
    """Lengths like WordNet's chat rows: around 50 tokens, a few long ones."""
    draw = random.Random(1)
    return [min(longest, 25 + int(draw.lognormvariate(3.2, 0.6))) for _ in range(count)]


def write_rows(path: Path, rows: list[list[int]], *, a_batch: int = 7) -> Path:
    """Rows of these tokens, every label learned, in small batches."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, ROW_SCHEMA) as stream:
        for first in range(0, len(rows), a_batch):
            some = rows[first : first + a_batch]
            columns = [pa.array(some, pa.list_(pa.int32()))] * 2 + [pa.array([0] * len(some), pa.int16())]
            stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA))
    return path


def read_packs(path: Path) -> list[dict[str, list[int]]]:
    with pa.ipc.open_stream(path.read_bytes()) as stream:
        return stream.read_all().to_pylist()


@pytest.mark.parametrize("capacity", [1024, 2048])
def test_chat_rows_fill_packs_in_about_a_second(capacity: int) -> None:
    lengths = chat_lengths(117_659)
    before = time.process_time()
    packs = pack_lengths(lengths, capacity)
    assert time.process_time() - before < 3
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    assert max(sum(lengths[row] for row in pack) for pack in packs) <= capacity
    assert sum(lengths) / (len(packs) * capacity) > 0.98


def test_each_row_goes_where_the_least_room_is_left() -> None:
    packs = pack_lengths([2, 6, 7, 3, 1, 1], 10)
    assert sorted(sorted([2, 6, 7, 3, 1, 1][row] for row in pack) for pack in packs) == [[1, 1, 2, 6], [3, 7]]
    assert pack_lengths([], 10) == []
    assert sorted(pack_lengths([10, 10], 10)) == [[0], [1]]


def test_a_row_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 11 tokens"):
        pack_lengths([3, 11], 10)


def test_packs_depend_on_lengths_and_seed_only_and_mix_the_file() -> None:
    lengths = [50] * 400
    packs = pack_lengths(lengths, 200, seed=3)
    assert packs == pack_lengths(array("i", lengths), 200, seed=3)
    assert packs != pack_lengths(lengths, 200, seed=4)
    neighbours = sum(abs(one - other) == 1 for pack in packs for one, other in pairwise(pack))
    assert neighbours < 15


def test_packs_hold_whole_documents_with_a_masked_first_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_module, "_BATCH_TOKENS", 300)
    rows = [[number * 1000 + at for at in range(length)] for number, length in enumerate(chat_lengths(60))]
    facts = write_packs(write_rows(tmp_path / "rows", rows), tmp_path / "packs", 500, seed=0)
    packs = read_packs(tmp_path / "packs")
    assert facts.packs == len(packs)
    assert facts.fill == pytest.approx(sum(map(len, rows)) / (len(packs) * 500))
    found = []
    for pack in packs:
        assert sum(pack["lengths"]) == len(pack["input_ids"]) == len(pack["labels"]) <= 500
        start = 0
        for length in pack["lengths"]:
            document = pack["input_ids"][start : start + length]
            assert pack["labels"][start : start + length] == [MASKED, *document[1:]]
            found.append(document)
            start += length
    assert sorted(found) == rows


def test_the_same_rows_give_the_same_file(tmp_path: Path) -> None:
    rows = [[number] * length for number, length in enumerate(chat_lengths(50))]
    for name, seed, a_batch in (("one", 5, 7), ("two", 5, 20), ("other", 6, 7)):
        write_packs(write_rows(tmp_path / "rows", rows, a_batch=a_batch), tmp_path / name, 500, seed)
    one, two, other = ((tmp_path / name).read_bytes() for name in ("one", "two", "other"))
    assert one == two != other


def test_no_rows_make_no_packs(tmp_path: Path) -> None:
    facts = write_packs(write_rows(tmp_path / "rows", []), tmp_path / "packs", 500, seed=0)
    assert (facts.packs, facts.fill, read_packs(tmp_path / "packs")) == (0, 0.0, [])
