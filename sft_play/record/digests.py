"""SHA-256 of a checkpoint's files, taken while its other files are still being written."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

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


class DigestedFile(io.RawIOBase):
    """A new file whose blocks a thread digests while they are written."""

    def __init__(self, path: Path, pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self._stream, self._pool = path.open("wb"), pool
        self._digest, self._block = hashlib.sha256(), bytearray()
        self._digesting: Future[None] | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):
            self._block += view[start : start + BLOCK_BYTES]
            if len(self._block) >= BLOCK_BYTES:
                self._pass_on()
        return len(view)

    def finish(self) -> str:
        """Write what is left, sync, close; returns the hexadecimal digest of all that was written."""
        with self._stream:
            self._pass_on()
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self._wait()
        return self._digest.hexdigest()

    def _pass_on(self) -> None:
        self._wait()  # blocks are digested in their order
        block, self._block = self._block, bytearray()
        self._digesting = self._pool.submit(self._digest.update, block)
        self._stream.write(block)

    def _wait(self) -> None:
        if self._digesting is not None:
            self._digesting.result()


class Digests:
    """The digests of one folder: some are known or under way before all of its files are there."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WRITERS)
        self._known: dict[Path, Future[str]] = {}
        self._syncs: list[Future[None]] = []

    def begin(self, folder: Path) -> None:
        """Start on every file that is there and will not change."""
        for path in sorted(file for file in folder.rglob("*") if file.is_file() and file not in self._known):
            self._syncs.append(self._pool.submit(_sync_file, path))
            self._known[path] = self._pool.submit(sha256, path)

    def save(self, path: Path, write: Callable[[DigestedFile], None]) -> None:
        """Call `write` with a stream to a new file, which is digested on the way."""
        stream = DigestedFile(path, self._pool)
        write(stream)
        done: Future[str] = Future()
        done.set_result(stream.finish())
        self._known[path] = done

    def finish(self, folder: Path) -> dict[str, str]:
        """Sync and digest the rest; the path inside `folder` -> digest of every file."""
        self.begin(folder)
        try:
            for one in self._syncs:
                one.result()
            return {str(path.relative_to(folder)): self._known[path].result() for path in sorted(self._known)}
        finally:
            self._pool.shutdown()


def _sync_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
