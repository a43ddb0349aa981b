"""What a stream's files are known by: which changes are seen, and which are told by their time alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sft_play.cli.train import warn_of_written
from sft_play.config.schema import Config
from sft_play.data.fingerprint import ALL_BLOCKS, BLOCK_BYTES, END_BYTES, blocks_of, sample, stream_fingerprint
from sft_play.data.sources import resolve_sources
from sft_play.record.run_dir import RunDir
from tests.data.test_data_prepare import Bench

MIB = 1 << 20


def fingerprint(file: Path, *, ends_only: bool = False) -> str:
    config = Config.model_validate({"model": {"name": "m"}, "data": {"train": str(file), "streaming": True}})
    sources = resolve_sources(str(file), key="data.train", default_format="auto")
    return stream_fingerprint(config, sources, ends_only=ends_only)


def change(file: Path, place: int) -> None:
    """Another byte there; size and time stay."""
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)
        stream.seek(place)
        stream.write(b"x" if byte != b"x" else b"y")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("size", [0, 10, 2 * MIB, 2 * MIB + 1, 2 * MIB + 70_000, 5 * MIB + 13, 6 * MIB])
def test_a_file_up_to_6_mib_is_seen_whole(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "a").write_bytes(content)
    seen = list(sample(tmp_path / "a", blocks_of(1)))
    assert seen[:2] == [content[:END_BYTES], content[-END_BYTES:]]
    covered, step = END_BYTES, max(0, size - 2 * END_BYTES - BLOCK_BYTES)
    for number, block in enumerate(seen[2:]):
        start = END_BYTES + step * number // 63
        assert start <= covered
        assert block == content[start : start + BLOCK_BYTES]
        covered = max(covered, start + len(block))
    assert covered >= size - END_BYTES
    assert bool(seen[2:]) == (size > 2 * END_BYTES)


def test_a_change_in_the_middle_is_seen_where_only_the_ends_were(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'{"prompt": "a", "completion": "b"}\n' * 200_000)
    before, ends = fingerprint(file), fingerprint(file, ends_only=True)
    assert before != ends
    change(file, END_BYTES + 100)  # the first block
    assert fingerprint(file) != before
    assert fingerprint(file, ends_only=True) == ends
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(b'{"prompt": "a", "completion": "b"}\n' * 200_000)
    assert fingerprint(copy) == before  # neither name nor time counts


def test_blocks_of_many_files_are_bounded() -> None:
    assert [blocks_of(files) for files in (0, 1, 64, 128, 10_000)] == [64, 64, 64, 32, 4]
    assert all(blocks_of(files) * files <= max(ALL_BLOCKS, 4 * files) for files in range(1, 3000))


def test_a_small_stream_keeps_the_fingerprint_of_earlier_versions_and_a_larger_one_has_both(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.rows(20)
    assert bench.prepare(streaming=True).fingerprint_before == ""
    row = {"prompt": "question", "completion": "answer " * 40}
    bench.train.write_text((json.dumps(row) + "\n") * 8000)
    large = bench.prepare(streaming=True)
    assert len(large.fingerprint_before) == 64
    assert large.fingerprint_before != large.facts.fingerprint


def test_files_written_after_the_run_began_are_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(tmp_path)
    bench.rows(20)
    run = RunDir(tmp_path / "runs" / "x")
    run.create()
    (run.attempts / "001.json").touch()
    began = (run.attempts / "001.json").stat().st_mtime
    os.utime(bench.train, (began - 10, began - 10))
    config = bench.config(streaming=True)

    def said(**changes: str) -> str:
        warn_of_written(run, config.model_copy(update={"run": config.run.model_copy(update=changes)}))
        return capsys.readouterr().err

    (run.checkpoints / "step-4").mkdir(parents=True)
    assert said() == ""
    os.utime(bench.train, (began + 10, began + 10))
    told = f"warning: data.train: {bench.train} was written after this run began; only parts of"
    assert told in said()
    assert said(resume="never") == ""
    (run.checkpoints / "step-4").rmdir()
    assert said() == ""  # it has nothing to go on from
