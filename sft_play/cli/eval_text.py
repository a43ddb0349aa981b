"""The figures of `make eval` as columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

COUNTS = ("eval_generated_rows",)


def table(figures: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """One line a figure: each model's column and, where there are two, what changed."""
    columns = list(figures)
    names = list(dict.fromkeys(name for one in figures.values() for name in one))
    width = max(map(len, names), default=0)
    several = len(columns) > 1
    if several:
        yield f"  {'':<{width}}  " + "  ".join(f"{one:>12}" for one in [*columns, "change"])
    for name in names:
        values = [figures[one].get(name) for one in columns]
        cells = [_number(name, value) for value in values]
        if several:
            first, last = values[0], values[-1]
            cells.append("" if first is None or last is None or name in COUNTS else f"{last - first:+.4f}")
        yield f"  {name:<{width}}  " + "  ".join(f"{cell:>12}" for cell in cells)


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.partition("/")[0] in COUNTS:
        return f"{value:,.0f}"
    return f"{value:,.4f}" if abs(value) < 1e6 else f"{value:.3g}"
