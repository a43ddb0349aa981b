"""The command dispatcher: finds the command, prints errors as lines, turns them into exit codes."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

from sft_play.errors import ExitCode, SftPlayError, UsageError, exit_code_of

Command = Callable[[Sequence[str], Mapping[str, str]], int]

# Command -> the module in this package whose `main(argv, environ)` it is.
COMMANDS = {"config": "config", "demo": "demo", "infer": "infer", "plan": "plan", "train": "train"}


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command. `ARGS` of make is split like a shell would and comes after the words given."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        words += _split(os.environ.get("ARGS", ""))
        debug = "--debug" in words
        words = [word for word in words if word != "--debug"]
        return find_command(words[:1])(words[1:], os.environ)
    except SftPlayError as error:
        if debug:
            raise
        for line in error.lines():
            print(f"error: {line}", file=sys.stderr)
        return exit_code_of(error)
    except KeyboardInterrupt:
        if debug:
            raise
        print("error: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader has gone: `make config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE


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
