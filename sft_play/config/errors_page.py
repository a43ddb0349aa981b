"""The catalogue of errors, made from `sft_play/errors.py`.

`python -m sft_play.config.errors_page` writes docs/errors.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from sft_play import errors
from sft_play.errors import ExitCode, SeveralErrors, SftPlayError

PAGE = Path("docs/errors.md")

_INTRODUCTION = """\
# Errors

<!-- Made by `python -m sft_play.config.errors_page` from sft_play/errors.py; edit there. -->

Every error is one line on stderr:

```text
error: WHERE: WHAT is wrong -> HOW TO FIX it
```

Errors that are found together are printed together, and the first one's code counts. `ARGS=--debug` adds the traceback
of the command; a worker's is in `run.log` of the run's folder. The code is that of `python -m sft_play COMMAND`: make
turns every failure into 2 and prints the code (`make: *** [...] Error 4`). `make doctor CONFIG=...`
([doctor.md](doctor.md)) looks for most causes of code 4 before a run does. What stands behind the stack's own messages
when several processes train is in [distributed.md](distributed.md).
"""

MEANINGS = {
    ExitCode.DONE: "done; for `make doctor` and `make memory-check`: nothing stands in the way",
    ExitCode.CONFIG_OR_DATA: "the config, the call, the data or the model is not what it should be",
    ExitCode.RESUME_REFUSED: "there are checkpoints, and this run may not go on from them",
    ExitCode.ENVIRONMENT: "the machine lacks something: a GPU, memory, disk, a port, a package, the network",
    ExitCode.NOT_FINITE: "the loss or a gradient is not a number; the step was not applied",
    ExitCode.RANK_FAILED: "a process of the run died or hung, or this program has a fault",
    ExitCode.PREEMPTED: "asked to end (SIGTERM), and the state is saved",
    ExitCode.INTERRUPTED: "asked to end (Ctrl-C), and the state is saved",
}
"""What a code says by itself, for scripts and supervisors."""

AGAIN = {
    ExitCode.DONE: "no need",
    ExitCode.CONFIG_OR_DATA: "not before the input is mended",
    ExitCode.RESUME_REFUSED: "not with the same command",
    ExitCode.ENVIRONMENT: "once what is missing is there; it goes on from the last checkpoint",
    ExitCode.NOT_FINITE: "not with the same settings",
    ExitCode.RANK_FAILED: "yes, it goes on from the last checkpoint; look first where it comes again",
    ExitCode.PREEMPTED: "yes, it goes on from here",
    ExitCode.INTERRUPTED: "yes, it goes on from here",
}
"""Whether the same command makes sense once more."""


def error_classes() -> list[type[SftPlayError]]:
    """Every error that a user can meet, in the order of the file; the root and the list of several are none."""
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, SftPlayError)]
    return [one for one in classes if one not in (SftPlayError, SeveralErrors)]


def render_page() -> str:
    """docs/errors.md as text."""
    return "\n".join([_INTRODUCTION, *_codes(), *(line for code in ExitCode for line in _section(code))])


def _codes() -> Iterator[str]:
    yield "| code | meaning | start it again? |\n|---|---|---|"
    yield from (f"| {int(code)} | {MEANINGS[code]} | {AGAIN[code]} |" for code in ExitCode)
    yield ""


def _section(code: ExitCode) -> Iterator[str]:
    found = [one for one in error_classes() if one.exit_code is code]
    if not found:
        return
    yield f"## {int(code)}: {MEANINGS[code].partition(':')[0]}\n"
    yield "| error | cause | evidence shown | to try, where the line names nothing better |\n|---|---|---|---|"
    for one in found:
        cells = (f"`{one.__name__}`", _sentence(one.__doc__ or ""), one.evidence, one.hint)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _sentence(text: str) -> str:
    """The first paragraph of a docstring in one line, without its full stop."""
    return " ".join(text.partition("\n\n")[0].split()).removesuffix(".")


def main() -> int:
    """Writes the page under the repository's root."""
    root = Path(__file__).resolve().parents[2]
    (root / PAGE).write_text(render_page(), encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
