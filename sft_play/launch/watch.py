"""Watches the ranks of a run: where none moves on any more, says which one is silent and ends them all.

Each rank touches `launch/beat-N` with every batch, and writes its stacks to `launch/stacks-N.txt` when it gets
SIGUSR1; a rank that is stopped or gone does neither.
"""

from __future__ import annotations

import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from sft_play.launch.processes import ranks_below, send

ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
# Frames of whoever waits, not of what is waited for.
_WAITING = ("torch/distributed", "threading.py", "selectors.py", "queue.py", "torch/utils/data")


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The last sign of life of a rank.

    Attributes:
        seconds: since then.
        step: optimizer steps that it had done.
    """

    rank: int
    pid: int
    step: int
    seconds: float


def read_beats(folder: Path) -> list[Beat]:
    """The signs of life that ranks left in a launch folder, by rank."""
    beats = []
    for file in folder.glob("beat-*"):
        with suppress(OSError, ValueError):  # being written, or gone
            pid, step = map(int, file.read_text().split())
            age = time.time() - file.stat().st_mtime
            beats.append(Beat(rank=int(file.name.removeprefix("beat-")), pid=pid, step=step, seconds=age))
    return sorted(beats, key=lambda beat: beat.rank)


def clear_beats(folder: Path) -> None:
    """Remove what an earlier attempt left."""
    for file in [*folder.glob("beat-*"), *folder.glob("stacks-*.txt")]:
        file.unlink()


class Watch(Thread):
    """Looks after the ranks below one process until it is told to stop.

    Args:
        folder: the launch folder of this machine's ranks.
        root: id of the launcher.
        timeout_seconds: how long all ranks may stand still, counted from their first batch.

    Attributes:
        verdict: lines for the user once the ranks were ended; empty while all is well.
    """

    def __init__(self, folder: Path, root: int, timeout_seconds: float) -> None:
        super().__init__(daemon=True)
        self._folder, self._root, self._timeout = folder, root, timeout_seconds
        self._done = Event()
        self.verdict: list[str] = []

    def run(self) -> None:
        while not self._done.wait(_LOOK_SECONDS):
            beats = read_beats(self._folder)
            if beats and min(beat.seconds for beat in beats) > self._timeout:
                self.verdict = self._examine(beats)
                send([*ranks_below(self._root), *(beat.pid for beat in beats), self._root], signal.SIGKILL)
                return

    def stop(self) -> None:
        """End the watch; its verdict stands."""
        self._done.set()
        if self.is_alive():
            self.join()

    def _examine(self, beats: list[Beat]) -> list[str]:
        """Ask every rank for its stacks, and tell the silent ones from those that wait."""
        send([beat.pid for beat in beats], signal.SIGUSR1)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and not all(self._stacks(beat) for beat in beats):
            time.sleep(0.1)
        silent = [beat for beat in beats if not self._stacks(beat)]
        waiting = [beat for beat in beats if self._stacks(beat)]
        at = max(beat.step for beat in beats)
        if silent:
            named = ", ".join(f"rank {beat.rank} (process {beat.pid}, {_state(beat.pid)})" for beat in silent)
            what = f"{named} does not answer; nothing has moved for {self._timeout:g} s, after step {at}"
        else:
            what = f"no rank has moved for {self._timeout:g} s, after step {at}, and all of this machine's answer"
        where = "; ".join(f"rank {beat.rank} at {innermost(self._stacks(beat))}" for beat in waiting)
        fix = "the same command goes on from the last checkpoint; NCCL_TIMEOUT waits longer"
        lines = [f"{what} -> {fix}"]
        return [*lines, f"  stacks in {self._folder}: {where}"] if where else lines

    def _stacks(self, beat: Beat) -> str:
        try:
            return (self._folder / f"stacks-{beat.rank}.txt").read_text(errors="replace")
        except OSError:
            return ""


def innermost(stacks: str) -> str:
    """Where the main thread stands, as `file:line function`, machinery of waiting left out where something is left.

    Args:
        stacks: as faulthandler writes them, each with the innermost frame first and the main thread last.
    """
    frames = [match.groupdict() for match in _FRAME.finditer(stacks.rpartition("hread 0x")[2])]
    own = [frame for frame in frames if not any(part in frame["file"] for part in _WAITING)]
    if not frames:
        return "an unknown place"
    frame = (own or frames)[0]
    return f"{Path(frame['file']).name}:{frame['line']} {frame['function']}"


def _state(pid: int) -> str:
    """What the kernel says of a process."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "D": "waiting for a disk or driver", "Z": "dead"}.get(letter, "running")
