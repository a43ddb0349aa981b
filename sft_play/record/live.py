"""What a worker tells its parent for the live line of a terminal: lines of output that nobody else is shown."""

from __future__ import annotations

import json
from typing import Any

# Set by a parent that shows a live line; without it a worker writes no such lines.
ASKED = "SFT_PLAY_LIVE"
# Begins such a line; ASCII's record separator stands in no printed text.
MARK = "\x1e"


def line_of(values: dict[str, Any]) -> str:
    """The line that carries the values."""
    return MARK + json.dumps(values)


def values_of(line: str) -> dict[str, Any] | None:
    """What such a line carries; None for any other, and for half of one."""
    if not line.startswith(MARK):
        return None
    try:
        values: dict[str, Any] = json.loads(line[1:])
    except ValueError:
        return {}
    return values


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
