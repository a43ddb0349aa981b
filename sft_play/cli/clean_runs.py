"""`make clean-runs`: list runs, ask, and remove them; only what this program made, and never one that is at work."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sft_play.cli.inputs import output_dir, run_folders
from sft_play.cli.options import Options
from sft_play.cli.runs import table
from sft_play.config.inputs import INPUTS_OF, check_inputs
from sft_play.errors import EnvironmentProblem, RunLockedError, UsageError
from sft_play.record.run_dir import MARKER, RunDir, locked
from sft_play.report.listing import Listed, list_run
from sft_play.report.numbers import size_text
from sft_play.report.state import RunState, is_run, is_running, runs_in

TRASH = ".trash-"
SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Remove the runs that RUNS and ARGS choose, after a yes.

    Raises:
        UsageError: nothing is chosen, something is no run, or there is nobody to ask.
        RunLockedError: a run that is named is at work.
        EnvironmentProblem: a folder cannot be removed.
    """
    given = parser().parse_args(argv)
    check_inputs(environ, INPUTS_OF["clean-runs"])
    chosen = choose(given, environ)
    if not chosen:
        print("no run to remove")
        return 0
    print("\n".join(table(chosen)))
    print(f"{len(chosen)} to remove, {size_text(sum(run.bytes for run in chosen))}")
    if not given.yes and not _agreed():
        print("nothing was removed")
        return 0
    for run in chosen:
        remove(Path(run.path))
        print(f"removed {run.path}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The options that ARGS may hold."""
    result = Options(prog="make clean-runs", description=__doc__)
    result.add_argument("--older-than", type=_seconds, metavar="30d", help="runs last started before: 12h, 30d, 8w")
    result.add_argument("--failed", action="store_true", help="runs that failed or never started")
    result.add_argument("--yes", action="store_true", help="remove without asking")
    return result


def choose(given: argparse.Namespace, environ: Mapping[str, str]) -> list[Listed]:
    """The runs that all of RUNS, --failed and --older-than ask for.

    Raises:
        UsageError: none of them is given, or RUNS names a link or what is no run.
        RunLockedError: RUNS names one that is at work.
    """
    named = run_folders(environ)
    if not named and not given.failed and given.older_than is None:
        raise UsageError(
            "nothing is chosen", where="RUNS", fix='RUNS="runs/A runs/B", ARGS=--failed, ARGS="--older-than 30d"'
        )
    for folder in named:
        if folder.is_symlink():
            raise UsageError("is a link", where=str(folder), fix=f"name the run itself, {folder.resolve()}")
        if is_running(RunDir(folder)):
            raise RunLockedError(
                "the run is at work", where=str(folder), fix="stop it first: Ctrl-C or SIGTERM saves it"
            )
    found = [run for run in map(list_run, named or runs_in(output_dir(environ))) if run.state != RunState.RUNNING]
    if given.failed:
        found = [run for run in found if run.state in (RunState.FAILED, RunState.NOT_STARTED)]
    if given.older_than is not None:
        found = [run for run in found if run.started < time.time() - given.older_than]
    return found


def remove(folder: Path) -> None:
    """Rename a run before deleting it, under its lock: what is left after a kill is no run.

    Raises:
        UsageError: it is no run of this program.
        RunLockedError: it has been started meanwhile.
        EnvironmentProblem: it cannot be removed.
    """
    if folder.is_symlink() or not is_run(folder):
        raise UsageError("is no run of sft-play", where=str(folder))
    folder = folder.resolve()  # `.` has no name
    trash = folder.with_name(f"{TRASH}{folder.name}")
    if trash.exists() and not (trash / MARKER).is_file():
        raise EnvironmentProblem("is in the way and is not of sft-play", where=str(trash), fix="move it away")
    try:
        with locked(RunDir(folder)):
            if trash.exists():
                _delete(trash)
            folder.rename(trash)
        _delete(trash)
    except OSError as error:
        what = f"cannot be removed ({error.strerror})"
        raise EnvironmentProblem(what, where=str(folder), fix="allow writing there") from error


def _delete(folder: Path) -> None:
    """The marker goes last: what is left after a kill is still known as this program's."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == MARKER):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    folder.rmdir()


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise UsageError("asks before it removes, and here is no terminal", where="ARGS", fix="ARGS=--yes does not ask")
    return input("remove them? [y/N] ").strip().lower() in ("y", "yes")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)([hdw])", text)
    if not match:
        raise argparse.ArgumentTypeError("a number of hours, days or weeks: 12h, 30d, 8w")
    return float(int(match[1]) * SECONDS[match[2]])
