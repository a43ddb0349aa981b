"""What a worker says once its terminal is gone."""

from __future__ import annotations

import io
from pathlib import Path

from sft_play.record.live import line_of
from sft_play.runtime.output import LastingStream


class Closed(io.StringIO):
    """A pipe that nobody reads."""

    def flush(self) -> None:
        raise BrokenPipeError


def test_lines_for_the_terminal_stay_out_of_the_log(tmp_path: Path) -> None:
    stream = LastingStream(Closed(), tmp_path / "run.log")
    print("lost with the terminal", file=stream, flush=True)
    for values in ({"step": 3}, {"log": "step 3/10"}):
        print(line_of(values) + "\n", end="", file=stream, flush=True)
    print("saved", file=stream, flush=True)
    assert (tmp_path / "run.log").read_text() == "step 3/10\nsaved\n"
