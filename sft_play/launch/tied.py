"""`python -m sft_play.launch.tied SIGNAL COMMAND...`: run a command that gets the signal when its parent dies."""

from __future__ import annotations

import os
import signal
import sys

from sft_play.launch.processes import tie_to_parent


def tied(number: signal.Signals, *command: str) -> tuple[str, ...]:
    """The command line that runs `command` so."""
    return (sys.executable, "-m", __name__, number.name, *command)


if __name__ == "__main__":
    parent = os.getppid()
    tie_to_parent(signal.Signals[sys.argv[1]])
    if os.getppid() == parent:  # it may have died just before
        os.execvp(sys.argv[2], sys.argv[2:])
