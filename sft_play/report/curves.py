"""Curves out of a run's events: what is drawn over the steps, thinned to what a chart can show."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

Points = list[tuple[float, float]]
MOST_POINTS = 400
# More lines than this are drawn as lowest, median and highest.
MOST_LINES = 8
# From so many points on a noisy curve gets a line through its middle.
TREND_FROM = 40


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart.

    Attributes:
        points: (step, value), in the order of the steps.
        role: how it is drawn: `line`, `faint` under its own trend, or `level` for what was predicted.
    """

    name: str
    points: Points
    role: str = "line"


def points_of(events: Iterable[Mapping[str, Any]], key: str) -> Points:
    """(step, value) of every event with a finite number under `key`; of a step that was done again the last one."""
    found: dict[float, float] = {}
    for event in events:
        value = event.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[event["step"]] = float(value)
    return sorted(found.items())


def curve(name: str, events: Iterable[Mapping[str, Any]], key: str, role: str = "line") -> list[Curve]:
    """The curve of a key as a list; empty where no event has it."""
    points = points_of(events, key)
    return [Curve(name=name, points=points, role=role)] if points else []


def numbered(events: Sequence[Mapping[str, Any]], stem: str, label: str) -> list[Curve]:
    """The curves of `stem_0`, `stem_1`, ...; many of them as their lowest, median and highest."""
    pattern = re.compile(rf"{re.escape(stem)}_(\d+)")
    known = set().union(*events)
    keys = {int(match[1]): key for key in known if (match := pattern.fullmatch(key))}
    lines = [Curve(name=f"{label} {number}", points=points_of(events, keys[number])) for number in sorted(keys)]
    lines = [line for line in lines if line.points]
    return lines if len(lines) <= MOST_LINES else _banded(lines, f"of {len(lines)}")


def _banded(lines: Sequence[Curve], of: str) -> list[Curve]:
    at: dict[float, list[float]] = {}
    for line in lines:
        for step, value in line.points:
            at.setdefault(step, []).append(value)
    kinds: dict[str, Callable[[list[float]], float]] = {"highest": max, "median": median, "lowest": min}
    steps = sorted(at)
    return [
        Curve(name=f"{name} {of}", points=[(step, float(pick(at[step]))) for step in steps])
        for name, pick in kinds.items()
    ]


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most about `most` points: the first, the last, and the lowest and highest of each stretch, so spikes stay."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 2 - 1))
    kept: set[int] = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        kept |= {min(stretch, key=lambda n: points[n][1]), max(stretch, key=lambda n: points[n][1])}
    return [points[n] for n in sorted(kept)]


def with_trend(line: Curve) -> list[Curve]:
    """A noisy curve, faint, and the mean of its neighbourhood over it; a short one as it is."""
    if len(line.points) < TREND_FROM:
        return [line]
    return [Curve(name=line.name, points=line.points, role="faint"), smoothed(line)]


def smoothed(line: Curve) -> Curve:
    """The mean of each point's neighbourhood, a twentieth of a long curve; a short one as it is."""
    if len(line.points) < TREND_FROM:
        return line
    half = max(2, len(line.points) // 40)
    sums = [0.0, *accumulate(value for _, value in line.points)]
    points = []
    for n, (step, _) in enumerate(line.points):
        first, last = max(0, n - half), min(len(line.points), n + half + 1)
        points.append((step, (sums[last] - sums[first]) / (last - first)))
    return Curve(name=line.name, points=points)


def level(name: str, value: float | None, under: Sequence[Curve]) -> list[Curve]:
    """A horizontal line across the curves, for what was predicted; empty without a value or without curves."""
    steps = [step for line in under for step, _ in line.points]
    if not value or not steps or min(steps) == max(steps):
        return []
    return [Curve(name=name, points=[(min(steps), value), (max(steps), value)], role="level")]
