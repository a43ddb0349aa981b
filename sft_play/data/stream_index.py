"""What the windows of a streamed run held, written down so that a resumed run need not tokenise them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sft_play.data.stream import Window


class StreamIndex:
    """One JSON line a window; what a killed run left half written is taken away before more is added.

    Args:
        folder: gets `stream.jsonl`, and `rejects.jsonl` where rows were skipped, each of them once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file, self._rejects = folder / "stream.jsonl", folder / "rejects.jsonl"
        self._written: int | None = None
        self._told: set[str] = set()

    def known(self, skip: int) -> tuple[int, int]:
        """(windows, their sequences) that lie wholly before sequence number `skip`."""
        windows = before = 0
        for line in _whole_lines(self._file):
            if line["window"] != windows or before + line["sequences"] > skip:
                break
            windows, before = windows + 1, before + line["sequences"]
        return windows, before

    def add(self, window: Window) -> None:
        """Write down a window; the first one begins anew, one that is known already is left as it is."""
        if self._written is None:
            self._begin(anew=window.number == 0)
        if window.number < (self._written or 0):
            return
        rejects = [line for line in window.rejects.splitlines(keepends=True) if line not in self._told]
        if rejects:
            self._told.update(rejects)
            _append(self._rejects, "".join(rejects))
        line = {"window": window.number, "sequences": len(window.sequences), "rows": window.read}
        counts = {"dropped": window.dropped, "truncated": window.truncated, "split_up": window.split_up}
        _append(self._file, json.dumps(line | counts) + "\n")
        self._written = window.number + 1

    def _begin(self, *, anew: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in (self._file, self._rejects):
            lines = [] if anew else _whole_lines(file)
            text = "".join(json.dumps(line) + "\n" for line in lines)
            if lines:
                file.write_text(text, encoding="utf-8")
            else:
                file.unlink(missing_ok=True)
            if file == self._rejects:
                self._told = set(text.splitlines(keepends=True))
            else:
                self._written = len(lines)


def _append(file: Path, text: str) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(text)


def _whole_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file up to the first that is not whole; none where there is no file."""
    lines: list[dict[str, Any]] = []
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                lines.append(json.loads(line))
                if not line.endswith("\n"):
                    lines.pop()
    except FileNotFoundError:
        pass
    except ValueError:  # a power cut can leave anything at the end
        pass
    return lines
