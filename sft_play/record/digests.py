"""SHA-256 of a checkpoint's files, taken while its other files are still being written."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
# Threads that sync and digest files beside each other.
WRITERS = 4


def sha256(path: Path) -> str:
    """The hexadecimal digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


class Digests:
    """The digests of one folder: some are known or under way before all of its files are there."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WRITERS)
        self._known: dict[Path, Future[str]] = {}
        self._syncs: list[Future[None]] = []

    def begin(self, folder: Path) -> None:
        """Start on every file that is there and will not change."""
        for path in sorted(file for file in folder.rglob("*") if file.is_file() and file not in self._known):
            self._syncs.append(self._pool.submit(_sync, path.open("rb")))  # open: the folder may be renamed meanwhile
            self._known[path] = self._pool.submit(sha256, path)

    def finish(self, folder: Path) -> dict[str, str]:
        """Digest the rest; the path inside `folder` -> digest of every file. They may not be on the disk yet."""
        self.begin(folder)
        return {str(path.relative_to(folder)): self._known[path].result() for path in sorted(self._known)}

    def settle(self) -> None:
        """Wait until every file is on the disk.

        Raises:
            OSError: one cannot get there.
        """
        try:
            for one in self._syncs:
                one.result()
        finally:
            self._pool.shutdown()


def _sync(stream: BinaryIO) -> None:
    with stream:
        os.fsync(stream.fileno())
