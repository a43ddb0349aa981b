"""A live line below what a run prints, where there is a terminal; nothing elsewhere."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sft_play.facts.hardware import GIB
from sft_play.record.live import clock

# What the preparation of data says of how far it is.
PROGRESS = re.compile(r"data: (?P<what>[\w ]+): (?P<how>[\d,]+(?: of [\d,]+)?) rows")
# Losses that the trend is taken over, the newer half beside the older one.
TREND_LOSSES = 10
# A smaller change of the loss than this share of it is no trend.
FLAT = 0.005
BAR_WIDTH = 24
# Reports of the work a second.
REFRESHES = 4


class Screen:
    """What the live line says; `view` makes it anew for each refresh."""

    def __init__(self) -> None:
        self.now: dict[str, Any] = {}
        self.losses: deque[float] = deque(maxlen=TREND_LOSSES)

    def show(self, values: dict[str, Any]) -> None:
        """Take in what a worker tells; a phase without a count drops that of the one before."""
        if "phase" in values:
            self.now.pop("done", None)
        if values.get("loss") is not None:
            self.losses.append(values["loss"])
        self.now.update({name: value for name, value in values.items() if value is not None})

    def line(self, text: str) -> None:
        """Print a line above."""
        print(text, flush=True)

    def say(self, text: str) -> None:
        """A line of the preparation: how far it is goes into the live line, the rest above it."""
        if found := PROGRESS.fullmatch(text):
            self.show({"phase": f"data: {found['what']} {found['how']} rows"})
        else:
            self.line(text)

    def clear(self) -> None:
        """Forget all: what comes next is another attempt."""
        self.now, self.losses = {}, deque(maxlen=TREND_LOSSES)

    def parts(self) -> list[str]:
        """What the line says, most important first."""
        now = self.now
        doing = str(now.get("phase", "starting the worker"))
        if "done" in now:
            doing += f" {now['done']}/{now['of']}" if now.get("of") else f" {now['done']}"
        found = [doing]
        if self.losses:
            found.append(f"loss {self.losses[-1]:.4f} {trend(self.losses)}".rstrip())
        if "tokens_per_second" in now:
            found.append(f"{now['tokens_per_second']:,.0f} tok/s")
        if now.get("used_bytes"):
            planned = f" of {now['planned_bytes'] / GIB:.1f} planned" if now.get("planned_bytes") else ""
            found.append(f"{now['used_bytes'] / GIB:.1f} GiB{planned}")
        return found

    def view(self, width: int) -> str:
        """One line a row, none wider than `width` columns: the bar over the whole run, then what goes on."""
        return "\n".join(row[: width - 1] for row in (*self._bar(width - 1), fitting(self.parts(), width - 1)))

    def _bar(self, width: int) -> list[str]:
        step, steps = self.now.get("step"), self.now.get("steps")
        if step is None or not steps:
            return []
        eta = f"  eta {clock(self.now['eta_seconds'])}" if "eta_seconds" in self.now else ""
        text = f"step {step:,}/{steps:,} {step / steps:4.0%}{eta}"
        cells = min(BAR_WIDTH, max(0, width - len(text) - 1))
        filled = round(cells * step / steps)
        return [f"{'━' * filled}{'─' * (cells - filled)} {text}".lstrip()]


def fitting(parts: list[str], width: int) -> str:
    """As many of the parts as fit into one row, from the first on."""
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts = parts[:-1]
    return "  ".join(parts)


def trend(losses: deque[float]) -> str:
    """An arrow: the newer half of the losses against the older one; empty while there are too few."""
    if len(losses) < 4:
        return ""
    half = len(losses) // 2
    older = sum(list(losses)[:half]) / half
    newer = sum(list(losses)[half:]) / (len(losses) - half)
    if abs(newer - older) < FLAT * abs(older):
        return "→"
    return "↓" if newer < older else "↑"


def is_terminal() -> bool:
    """Whether somebody looks at a terminal that can rewrite a line."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and "CI" not in os.environ


@contextmanager
def live_screen(node: int = 0) -> Iterator[Screen | None]:
    """A screen while the block runs; None where no terminal is there. All that is printed meanwhile stands above it.

    Args:
        node: number of this machine; the first alone hears of the work.
    """
    if node or not is_terminal():
        yield None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    screen, console = Screen(), Console(highlight=False)

    def view() -> Text:
        return Text(screen.view(console.width), no_wrap=True, overflow="crop")

    with Live(get_renderable=view, console=console, refresh_per_second=REFRESHES, transient=True):
        screen.show({"phase": "preparing the data"})
        yield screen
