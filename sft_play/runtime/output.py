"""A worker's output: without secrets, and going on when the one who reads it has gone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TextIO

from sft_play.config.secrets import redacted
from sft_play.record.live import values_of


class LastingStream(io.TextIOBase):
    """A text stream that goes on in a file once its reader is gone: a run must not die of a closed terminal."""

    def __init__(self, stream: TextIO, log: Path) -> None:
        self.stream = stream
        self.log = log
        self.alone = False

    def write(self, text: str) -> int:
        text = redacted(text)
        if not self.alone:
            try:
                return self.stream.write(text)
            except OSError:
                self._go_on_alone()
        return self.stream.write(for_log(text))

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            self._go_on_alone()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self.stream.fileno()

    def _go_on_alone(self) -> None:
        self.stream, self.alone = self.log.open("a", encoding="utf-8", buffering=1), True


def for_log(text: str) -> str:
    """A line for the live line of a terminal as the log has it: only what belongs there."""
    values = values_of(text)
    if values is None:
        return text
    return f"{values['log']}\n" if "log" in values else ""
