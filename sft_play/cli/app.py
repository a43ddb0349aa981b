"""The command dispatcher: finds the command, prints errors as lines, turns them into exit codes."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

from sft_play.config.inputs import check_endpoint
from sft_play.config.secrets import redacted
from sft_play.errors import (
    EnvironmentProblem,
    ExitCode,
    Interrupted,
    RankFailedError,
    SftPlayError,
    UsageError,
    exit_code_of,
)

# Commands that only print: nothing is lost when nobody reads on.
READ_ONLY = ("config", "plan", "data-check", "gpu-info", "memory-check", "doctor", "runs")
# The machine's refusals, whatever was being read or written.
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
ALLOW = "make room there or allow access, or choose another place"
REPORT_IT = "ARGS=--debug shows where; report that with your config"
Command = Callable[[Sequence[str], Mapping[str, str]], int]

# Command -> the module in this package whose `main(argv, environ)` it is.
COMMANDS = {
    "chat": "chat",
    "clean-runs": "clean_runs",
    "compare": "compare",
    "config": "config",
    "data-check": "data_check",
    "demo": "demo",
    "doctor": "doctor",
    "download": "download",
    "eval": "evaluate",
    "gpu-info": "gpu_info",
    "export": "export",
    "infer": "infer",
    "memory-check": "memory_check",
    "merge": "merge",
    "plan": "plan",
    "push": "push",
    "report": "report",
    "runs": "runs",
    "serve": "serve",
    "setup-accelerate": "setup_accelerate",
    "slurm": "slurm",
    "smoke": "smoke",
    "tensorboard": "tensorboard",
    "train": "train",
    "train-deepspeed": "train_deepspeed",
    "train-deepspeed-tb": "train_deepspeed_tb",
    "train-distributed": "train_distributed",
    "train-distributed-tb": "train_distributed_tb",
    "verify-resume": "verify_resume",
}


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command. `ARGS` of make is split like a shell would and comes after the words given."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        words += _split(os.environ.get("ARGS", ""))
        debug = "--debug" in words
        words = [word for word in words if word != "--debug"]
        check_endpoint(os.environ)
        return find_command(words[:1])(words[1:], os.environ)
    except BrokenPipeError:  # the reader has gone: `make config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if words[:1] and words[0] in READ_ONLY:
            return ExitCode.DONE
        return fail(EnvironmentProblem("the output was closed", fix="keep it open, or send it to a file"), debug=debug)
    except SftPlayError as error:
        return fail(error, debug=debug)
    except KeyboardInterrupt:
        return fail(Interrupted("interrupted before anything was started"), debug=debug)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in REFUSED:
            return fail(refused(error), debug=debug)
        name = type(error).__name__
        return fail(RankFailedError(f"{name}: {error}", where="a fault of this program", fix=REPORT_IT), debug=debug)


def main() -> int:
    """`run`, with what is left to write written before Python leaves: a closed pipe must not change the exit code."""
    open_closed_streams()
    code = run()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if error.errno in REFUSED:  # what was said is lost
                code = code or fail(refused(error), debug=False)
    return code


def open_closed_streams() -> None:
    """Give what was started with `<&-` or `>&-` an empty input and an output that nobody reads.

    A file opened later would take the number of the closed stream, and what is printed would land in it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            empty = os.open(os.devnull, os.O_RDWR)
            if empty != number:
                os.dup2(empty, number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def refused(error: OSError) -> EnvironmentProblem:
    """What the machine did not let be read or written."""
    where = str(error.filename or "the output")
    return EnvironmentProblem(str(error.strerror).lower(), where=where, fix=ALLOW)


def fail(error: SftPlayError, *, debug: bool) -> int:
    """Print an error, its traceback under `--debug`; returns the exit code."""
    if debug:
        print(redacted(traceback.format_exc()), end="", file=sys.stderr)
    with contextlib.suppress(BrokenPipeError):  # nobody listens; the code says it
        for line in error.lines():
            print(redacted(f"error: {line}"), file=sys.stderr)
    return exit_code_of(error)


def find_command(words: Sequence[str]) -> Command:
    """The `main` of the command named by the first word.

    Raises:
        UsageError: no command, or an unknown one, with the nearest name.
    """
    if not words or words[0] not in COMMANDS:
        near = get_close_matches(words[0], COMMANDS, 1) if words else []
        what = f"no command {words[0]!r}" if words else "a command is missing"
        known = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise UsageError(what, fix=known)
    command: Command = importlib.import_module(f"sft_play.cli.{COMMANDS[words[0]]}").main
    return command


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"cannot be split into words ({error})", where="ARGS", fix="close the quote") from error
