"""Digests that are taken while files are written are those of the files on disk."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

from sft_play.record.digests import BLOCK_BYTES, Digests, sha256
from sft_play.record.manifest import folder_problem, write_manifest


@pytest.mark.parametrize("sizes", [[], [0], [1], [BLOCK_BYTES], [5, 3 * BLOCK_BYTES + 7, 0, 11], [BLOCK_BYTES - 1, 2]])
def test_what_is_written_in_pieces_has_the_digest_of_the_whole(tmp_path: Path, sizes: list[int]) -> None:
    pieces = [os.urandom(size) for size in sizes]
    digests, path = Digests(), tmp_path / "file"
    digests.save(path, lambda stream: [stream.write(piece) for piece in pieces])
    assert path.read_bytes() == b"".join(pieces)
    assert digests.finish(tmp_path) == {"file": hashlib.sha256(b"".join(pieces)).hexdigest()}


def test_files_of_before_meanwhile_and_after_are_all_there(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/before").write_bytes(b"before")
    digests = Digests()
    digests.begin(tmp_path)
    state = {"moments": torch.randn(70_000), "step": torch.tensor(3), "wide": torch.randn(3, 4).T}
    digests.save(tmp_path / "optimizer.pt", lambda stream: torch.save(state, stream))
    (tmp_path / "after").write_bytes(b"after")
    write_manifest(tmp_path, {}, digests)
    assert folder_problem(tmp_path) == ""
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    (tmp_path / "inside/before").write_bytes(b"befort")
    assert folder_problem(tmp_path) == "inside/before differs from its checksum"


def test_a_writer_that_fails_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        Digests().save(Path("/dev/full"), lambda stream: stream.write(b"x" * (2 * BLOCK_BYTES)))


def test_a_file_is_digested_in_blocks(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a" * (2 * BLOCK_BYTES + 1))
    assert sha256(tmp_path / "file") == hashlib.sha256(b"a" * (2 * BLOCK_BYTES + 1)).hexdigest()
