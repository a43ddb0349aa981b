"""A scatter plot as SVG text, on logarithmic axes, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SIZE, MARGIN = 520, 56
COLOURS = ("#1f6fb2", "#c2571a", "#3a8f4d", "#8a4fb0")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One dot; `series` gives its colour, `label` shows on hover."""

    x: float
    y: float
    series: str
    label: str = ""


def render_scatter(points: Sequence[Point], *, x_label: str, y_label: str) -> str:
    """Dots, the diagonal, and a band of 15% about it."""
    low, high = _limits(points)
    series = sorted({point.series for point in points})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" font-family="sans-serif" font-size="12">',
        f'<rect width="{SIZE}" height="{SIZE}" fill="#fff"/>',
        *_axes(low, high, x_label, y_label),
        *(_line(low, high, factor) for factor in (0.85, 1.0, 1.15)),
    ]
    for number, name in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        parts += [_dot(point, low, high, colour) for point in points if point.series == name]
        parts.append(f'<text x="{MARGIN + 12}" y="{MARGIN + 16 + 16 * number}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _limits(points: Sequence[Point]) -> tuple[float, float]:
    values = [value for point in points for value in (point.x, point.y) if value > 0] or [1.0, 10.0]
    return min(values) * 0.9, max(values) * 1.1


def _place(value: float, low: float, high: float) -> float:
    share = math.log(max(value, low) / low) / math.log(high / low)
    return MARGIN + share * (SIZE - 2 * MARGIN)


def _dot(point: Point, low: float, high: float, colour: str) -> str:
    x, y = _place(point.x, low, high), SIZE - _place(point.y, low, high)
    title = f"<title>{point.label}: {point.x:.1f} measured, {point.y:.1f} predicted</title>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.55">{title}</circle>'


def _line(low: float, high: float, factor: float) -> str:
    ends = [(low, low * factor), (high, high * factor)]
    (x1, y1), (x2, y2) = [(_place(x, low, high), SIZE - _place(min(max(y, low), high), low, high)) for x, y in ends]
    style = 'stroke="#333"' if factor == 1.0 else 'stroke="#aaa" stroke-dasharray="4 4"'
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _axes(low: float, high: float, x_label: str, y_label: str) -> list[str]:
    end = SIZE - MARGIN
    parts = [
        f'<path d="M{MARGIN} {MARGIN} V{end} H{end}" fill="none" stroke="#333"/>',
        f'<text x="{SIZE / 2}" y="{SIZE - 14}" text-anchor="middle">{x_label}</text>',
        f'<text x="16" y="{SIZE / 2}" text-anchor="middle" transform="rotate(-90 16 {SIZE / 2})">{y_label}</text>',
    ]
    for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500):
        if low <= tick <= high:
            at = _place(tick, low, high)
            parts.append(f'<text x="{at:.1f}" y="{end + 18}" text-anchor="middle">{tick}</text>')
            parts.append(f'<text x="{MARGIN - 8}" y="{SIZE - at + 4:.1f}" text-anchor="end">{tick}</text>')
    return parts
