"""A worker's output: without secrets, and going on when the one who reads it has gone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TextIO

from sft_play.config.secrets import redacted


class LastingStream(io.TextIOBase):
    """A text stream that goes on in a file once its reader is gone: a run must not die of a closed terminal."""

    def __init__(self, stream: TextIO, log: Path) -> None:
        self.stream = stream
        self.log = log

    def write(self, text: str) -> int:
        text = redacted(text)
        try:
            return self.stream.write(text)
        except OSError:
            self.stream = self.log.open("a", encoding="utf-8", buffering=1)
            return self.stream.write(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            self.stream = self.log.open("a", encoding="utf-8", buffering=1)

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self.stream.fileno()
