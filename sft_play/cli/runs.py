"""`make runs`: every run with its state, model, method, loss, speed, age and size."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from sft_play.cli.inputs import output_dir
from sft_play.cli.options import Options
from sft_play.config.inputs import INPUTS_OF, check_inputs
from sft_play.report.listing import Listed, listed
from sft_play.report.numbers import size_text, span

HEADS = ("run", "state", "model", "method", "loss", "tokens/s", "age", "size")
# Columns of figures, which end at the same place.
RIGHT = ("loss", "tokens/s", "age", "size")


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the runs of the output folder, the newest last.

    Raises:
        UsageError: an option or input that this command does not have.
    """
    options = Options(prog="make runs", description=__doc__)
    options.add_argument("--json", action="store_true", help="one JSON list, with the exact figures")
    given = options.parse_args(argv)
    check_inputs(environ, INPUTS_OF["runs"])
    folder = output_dir(environ)
    found = listed(folder)
    if given.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    elif not found:
        print(f"no runs in {folder}")
    else:
        print("\n".join(table(found)))
    return 0


def table(runs: Sequence[Listed]) -> list[str]:
    """The runs as lines of text, one a run, under a line of heads."""
    rows = [HEADS, *(_row(run) for run in runs)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(HEADS))]
    return [
        "  ".join(_cell(text, head, width) for text, head, width in zip(row, HEADS, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(run: Listed) -> tuple[str, ...]:
    age = span(time.time() - run.started) if run.started else "-"
    return (
        run.name,
        run.state,
        Path(run.model).name or "-",
        run.method or "-",
        f"{run.loss:.4f}" if run.loss is not None else "-",
        f"{run.tokens_per_second:,.0f}" if run.tokens_per_second is not None else "-",
        age,
        size_text(run.bytes),
    )


def _cell(text: str, head: str, width: int) -> str:
    return text.rjust(width) if head in RIGHT else text.ljust(width)
