"""Charts as SVG for the inside of a page: pygal draws them, the page's own stylesheet colours them.

Nothing of pygal's style sheets, scripts and tooltips is kept, so that a chart follows the page into dark mode, and the
page needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pygal
from markupsafe import Markup
from pygal.etree import etree
from pygal.style import Style

from sft_play.report.curves import Curve, Points, thinned

WIDTH, HEIGHT = 480, 270
SIZE = 12
# Ticks of an axis, about.
TICKS = 5
COLOURS = 8
LINES = Style(label_font_size=SIZE, major_label_font_size=SIZE, legend_font_size=SIZE)
_DROPPED = ("style", "script", "desc")
_SVG = "{http://www.w3.org/2000/svg}"


def line_chart(
    key: str, title: str, curves: Sequence[Curve], show: Callable[[float], str], *, from_zero: bool = False
) -> Markup:
    """Values over the optimizer steps.

    Args:
        key: unique on the page.
        title: spoken by screen readers.
        show: a value of the axis as text.
        from_zero: whether the axis begins at zero whatever the values are.
    """
    points = [point for curve in curves for point in curve.points]
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    ticks = ticks_of(min(0.0, low) if from_zero else low, high)
    chart = pygal.XY(
        **_base(show),
        show_dots=max(len(curve.points) for curve in curves) <= 2,
        dots_size=2.5,
        x_value_formatter=steps_text,
        range=(min(ticks[0], low), max(ticks[-1], high)),
        xrange=(min(steps), max(steps)),
    )
    chart.y_labels = ticks
    chart.x_labels = step_ticks(min(steps), max(steps))
    for curve in curves:
        chart.add("", thinned(curve.points))
    return _markup(chart, key, title, [curve.role for curve in curves])


def area_chart(key: str, title: str, curves: Sequence[Curve], show: Callable[[float], str]) -> Markup:
    """Parts of a whole over the optimizer steps, one on the other."""
    steps = _shared_steps(curves)
    chart = pygal.StackedLine(**_base(show), fill=True, show_dots=False)
    stacked = [sum(dict(curve.points).get(step, 0.0) for curve in curves) for step in steps]
    chart.y_labels = ticks_of(0.0, max(stacked))
    chart.x_labels = [steps_text(step) for step in steps]
    chart.x_labels_major = [steps_text(step) for step in steps[:: max(1, math.ceil(len(steps) / TICKS))]]
    chart.show_minor_x_labels = False
    for curve in curves:
        at = dict(curve.points)
        chart.add("", [at.get(step, 0.0) for step in steps])
    return _markup(chart, key, title, ["area"] * len(curves))


def bar_chart(
    key: str,
    title: str,
    labels: Sequence[str],
    series: Sequence[tuple[str, Sequence[float]]],
    show: Callable[[float], str],
) -> Markup:
    """Bars by label, one beside the other where there are several series."""
    chart = pygal.Bar(**_base(show), rounded_bars=2)
    chart.y_labels = ticks_of(0.0, max(value for _, values in series for value in values))
    chart.x_labels = list(labels)
    chart.x_label_rotation = -40 if sum(map(len, labels)) > 50 else 0
    for _, values in series:
        chart.add("", list(values))
    return _markup(chart, key, title, bar_roles([name for name, _ in series]))


def classes_of(roles: Sequence[str]) -> list[str]:
    """The style classes of each series: a colour and its role. A faint curve has the colour of the one over it."""
    classes, colour = [], 0
    for role in roles:
        classes.append(role if role == "level" else f"c{colour % COLOURS} {role}")
        colour += role not in ("faint", "level")
    return classes


def bar_roles(names: Sequence[str]) -> list[str]:
    """How each series of bars is drawn: what was planned stands back."""
    return ["bar plan" if name == "plan" else "bar" for name in names]


def ticks_of(low: float, high: float, about: int = TICKS) -> list[float]:
    """Round values around a range, from below `low` to above `high`."""
    if high <= low:
        room = abs(low) / 10 or 1.0
        low, high = low - room, high + room
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    first, last = math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9)
    return [round(number * width, 12) for number in range(first, last + 1)]


def step_ticks(first: float, last: float) -> list[float]:
    """Round steps inside the range, whole ones."""
    if last <= first:
        return [first]
    return [tick for tick in ticks_of(first, last) if first <= tick <= last and tick == int(tick)] or [first, last]


def steps_text(step: float) -> str:
    """A step on an axis."""
    return f"{step:,.0f}"


def _shared_steps(curves: Sequence[Curve]) -> list[float]:
    points: Points = sorted({step: 0.0 for curve in curves for step, _ in curve.points}.items())
    if len(points) > 100:
        points = points[:: math.ceil(len(points) / 100)]
    return [step for step, _ in points]


def _base(show: Callable[[float], str]) -> dict[str, object]:
    return {
        "style": LINES,
        "js": [],
        "width": WIDTH,
        "height": HEIGHT,
        "margin": 8,
        "show_legend": False,
        "value_formatter": show,
        "show_x_guides": False,
        "show_y_guides": True,
        "no_data_text": "",
        "truncate_label": -1,
    }


def _markup(chart: pygal.graph.graph.Graph, key: str, title: str, roles: Sequence[str]) -> Markup:
    """The drawing without pygal's own styles, scripts, comments and tooltips; each series is of its class."""
    chart.uuid = key
    root = chart.render_tree()
    for parent in list(root.iter()):
        for child in list(parent):
            if not isinstance(child.tag, str) or child.tag.removeprefix(_SVG) in _DROPPED or _is(child, "tooltip"):
                parent.remove(child)
    classes = classes_of(roles)
    for element in root.iter():
        words = element.get("class", "").split()
        if "series" in words:
            number = int(next(word for word in words if word.startswith("serie-")).removeprefix("serie-"))
            element.set("class", f"series {classes[number]}")
    root.set("role", "img")
    root.set("aria-label", title)
    text = etree.tostring(root, encoding="unicode")
    return Markup(text.replace("<title>Pygal</title>", ""))


def _is(element: etree.Element, name: str) -> bool:
    return name in (element.get("class") or "").split()
