"""Digests that are taken while files are written are those of the files on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from sft_play.record.digests import BLOCK_BYTES, Digests, sha256
from sft_play.record.manifest import folder_problem, read_manifest, write_manifest


def test_files_of_before_and_after_are_all_there(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/before").write_bytes(b"before")
    digests = Digests()
    digests.begin(tmp_path)
    (tmp_path / "after").write_bytes(b"after")
    write_manifest(tmp_path, {}, digests)
    files = read_manifest(tmp_path)["files"]
    assert {name: one["sha256"] for name, one in files.items()} == {
        "inside/before": hashlib.sha256(b"before").hexdigest(),
        "after": hashlib.sha256(b"after").hexdigest(),
    }
    assert folder_problem(tmp_path) == ""
    (tmp_path / "inside/before").write_bytes(b"befort")
    assert folder_problem(tmp_path) == "inside/before differs from its checksum"


def test_a_file_that_goes_meanwhile_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    digests = Digests()
    digests.begin(tmp_path)
    (tmp_path / "file").unlink()
    with pytest.raises(FileNotFoundError):
        write_manifest(tmp_path, {}, digests)


def test_what_is_half_written_when_digesting_begins_is_found_out(tmp_path: Path) -> None:
    """Why a run of several ranks begins only when all have written."""
    (tmp_path / "of another rank").write_bytes(b"half")
    digests = Digests()
    digests.begin(tmp_path)
    digests.finish(tmp_path)
    (tmp_path / "of another rank").write_bytes(b"half and half")
    write_manifest(tmp_path, {}, digests)
    assert folder_problem(tmp_path) != ""


def test_a_file_is_digested_in_blocks(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a" * (2 * BLOCK_BYTES + 1))
    assert sha256(tmp_path / "file") == hashlib.sha256(b"a" * (2 * BLOCK_BYTES + 1)).hexdigest()
