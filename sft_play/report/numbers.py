"""Figures as a reader sees them."""

from __future__ import annotations

import math
import time

from sft_play.facts.hardware import GIB

NOTHING = "\N{EN DASH}"


def number(value: float | None, digits: int = 4) -> str:
    """About `digits` significant digits, thousands parted; a dash for nothing."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def axis(value: float) -> str:
    """A value on an axis: 0.25, 1,500, 2M, 5e-5."""
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if 0 < abs(value) < 1e-2:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:g}"


def gib(size: float | None) -> str:
    """Bytes in GiB, MiB below one."""
    if not size:
        return NOTHING
    return f"{size / GIB:.2f} GiB" if size >= GIB / 2 else f"{size / 2**20:.0f} MiB"


def percent(share: float) -> str:
    return f"{share:.1%}"


def span(seconds: float | None) -> str:
    """A time span: 45 s, 12 min, 3 h 20 min, 4 days."""
    if seconds is None:
        return NOTHING
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{round(hours / 24)} days"


def moment(seconds: float) -> str:
    """A point in time, of this machine's clock: 2026-03-01 14:05."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def size_text(size: float) -> str:
    """Bytes, short: 1.4 GiB, 12 MiB, 3 KiB."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:,.0f} {name}"
    return f"{size / 1024:.0f} KiB"
