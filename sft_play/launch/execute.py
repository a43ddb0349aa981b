"""Carry out a LaunchSpec: the only place that starts processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from sft_play.config.secrets import redacted
from sft_play.errors import ExitCode
from sft_play.launch.processes import adopt_orphans, descendants, end_all, ranks_below, send
from sft_play.launch.spec import LaunchSpec
from sft_play.launch.tied import tied
from sft_play.launch.watch import Watch, clear_beats
from sft_play.record.live import ASKED, values_of
from sft_play.record.run_dir import RunDir, write_atomic
from sft_play.record.run_record import clear_exits, read_exits

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def execute(
    spec: LaunchSpec,
    run: RunDir,
    environ: Mapping[str, str],
    *,
    lock: int | None = None,
    screen: Screen | None = None,
) -> tuple[int, list[str]]:
    """Run the worker to its end, its output on the terminal and in run.log.

    Args:
        lock: descriptor of the run's lock, which the worker holds as well.
        screen: what shows a live line, where there is a terminal.

    Returns:
        The exit code of the run and the error lines that its worker left.
    """
    for path, text in spec.files.items():
        write_atomic(path, text)
    attempt = len(list(run.attempts.glob("*.json"))) + 1
    write_atomic(run.attempts / f"{attempt:03d}.json", spec.files[run.run_json])
    clear_exits(run.launch)
    for of_rank in run.launch.glob("rank-*.log"):  # of an earlier attempt; run.log has it
        of_rank.unlink()
    clear_beats(run.launch)
    # A session of its own: a Ctrl-C reaches each worker once, through us, and nothing below us outlives the run.
    # Workers start with both signals blocked and take them once they can answer; a launcher never does.
    adopt_orphans()
    before = set(descendants(os.getpid()))
    live = {ASKED: "1"} if screen else {}
    if screen:
        screen.clear()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    log = run.log.open("ab", buffering=0)
    try:
        worker = subprocess.Popen(
            spec.argv if spec.alone else tied(signal.SIGKILL, *spec.argv),
            env={**environ, **spec.environment, **live, "SFT_PLAY_PARENT": str(os.getpid())},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if spec.alone else log,  # no pipe: ranks outlive a killed parent while they save
            start_new_session=True,
            pass_fds=(lock,) if lock is not None else (),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    assert worker.stdout is not None
    watch = Watch(run.launch, worker.pid, spec.timeout_seconds)
    try:
        if not spec.alone:
            watch.start()
        with log, _forwarding(worker) as asked:
            _copy(worker.stdout, log, screen)
            returned = worker.wait()
    finally:
        watch.stop()
        end_all(os.getpid(), keep=before)
        _append_rank_logs(run)
        _scrub(run.log)
    if watch.verdict:
        return int(ExitCode.RANK_FAILED), watch.verdict
    if asked.interrupts > 1 and returned == -signal.SIGKILL:
        return int(ExitCode.INTERRUPTED), ["ended at once -> the last checkpoint is whole; the same command goes on"]
    return _outcome(run, returned)


class Screen(Protocol):
    """Shows a live line below what is printed."""

    def line(self, text: str) -> None:
        """Print a line above it."""

    def show(self, values: dict[str, Any]) -> None:
        """Take in what the worker says of itself."""

    def clear(self) -> None:
        """Forget it: another worker starts."""


def _copy(source: IO[bytes], log: IO[bytes], screen: Screen | None) -> None:
    for raw in iter(source.readline, b""):
        line = _redacted(raw)
        told = values_of(line.decode(errors="replace")) if screen else None
        if told is not None and "log" in told:
            line = f"{told['log']}\n".encode()
        if told is None or "log" in told:
            with contextlib.suppress(OSError):  # a full disk: the terminal still shows it, the worker tells the reason
                log.write(line)
        try:
            if screen is None:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            elif told is None:
                screen.line(line.decode(errors="replace").rstrip("\n"))
            else:
                screen.show(told)
        except BrokenPipeError:  # the reader has gone (`make train | head`); the run goes on into run.log
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123


def _append_rank_logs(run: RunDir) -> None:
    """Keep what the ranks that do not speak have said, each line with its rank."""
    with contextlib.suppress(OSError), run.log.open("a", encoding="utf-8") as log:
        for path in sorted(run.launch.glob("rank-*.log")):
            rank = path.stem.replace("-", " ")
            said = path.read_text(encoding="utf-8", errors="replace")
            log.writelines(f"{rank}: {line}\n" for line in said.splitlines())


def _scrub(path: Path) -> None:
    """Take secrets out of what launchers and native code wrote into the log by themselves."""
    with contextlib.suppress(OSError):
        text = path.read_bytes()
        if (clean := _redacted(text)) != text:
            path.write_bytes(clean)


def _redacted(line: bytes) -> bytes:
    return redacted(line.decode(errors="surrogateescape")).encode(errors="surrogateescape")


@dataclass
class _Asked:
    """How often the user pressed Ctrl-C."""

    interrupts: int = 0


@contextmanager
def _forwarding(worker: subprocess.Popen[bytes]) -> Iterator[_Asked]:
    """Hand SIGTERM and SIGINT to the worker, which saves and leaves; a second Ctrl-C ends it now."""
    asked = _Asked()

    def forward(number: int, frame: FrameType | None) -> None:
        asked.interrupts += number == signal.SIGINT
        if asked.interrupts > 1:
            worker.kill()  # the ranks of a launcher follow it
        else:
            send(ranks_below(worker.pid) or [worker.pid], number)

    previous = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _outcome(run: RunDir, returned: int) -> tuple[int, list[str]]:
    exits = read_exits(run.launch)
    if failed := [one for one in exits if one["code"]]:
        return int(failed[0]["code"]), list(failed[0]["lines"])
    if exits and not returned:
        return 0, []
    if returned < 0:
        name = signal.Signals(-returned).name
        if name == "SIGKILL":
            why = "the worker was killed (SIGKILL; often the machine ran out of memory)"
        else:
            why = f"the worker died of {name}"
        return int(ExitCode.RANK_FAILED), [f"{why} -> its last lines are in {run.log}; the same command goes on"]
    if returned:
        return int(ExitCode.RANK_FAILED), [f"the worker ended with {returned} -> see {run.log}"]
    return 0, []
