"""What is left of a save while training goes on: the disk, and then the rotation of older checkpoints."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from sft_play.record.checkpoints import rotate, settle, step_of
from sft_play.record.digests import Digests
from sft_play.record.run_dir import RunDir
from sft_play.runtime.room import half_dropped


class Settling:
    """One checkpoint at a time: it is published already, a killed process loses nothing of it; a power cut might.

    Args:
        run: whose checkpoints these are.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._pool = ThreadPoolExecutor(1)
        self._doing: Future[None] | None = None

    def begin(self, published: Path, digests: Digests, needed: int, keep: int | None, best: int | None) -> None:
        """Start on a checkpoint; `wait` comes before the next one.

        Args:
            needed: its bytes, for the error of a full disk.
            keep: how many checkpoints `rotate` leaves; the one of step `best` beside them.
        """
        self._doing = self._pool.submit(self._settle, published, digests, needed, keep, best)

    def wait(self) -> None:
        """Return once nothing is under way.

        Raises:
            DiskFullError: the newest checkpoint did not get onto the disk and is gone; the earlier ones are kept.
        """
        doing, self._doing = self._doing, None
        if doing is not None:
            doing.result()

    def _settle(self, published: Path, digests: Digests, needed: int, keep: int | None, best: int | None) -> None:
        with half_dropped(published, step_of(published), needed):
            settle(published, digests)
        rotate(self._run, keep, published, best)
