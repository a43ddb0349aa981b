"""The figures of a run: which curves stand in which chart, and what is said under it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from sft_play.facts.hardware import GIB
from sft_play.report import numbers
from sft_play.report.charts import area_chart, bar_chart, bar_roles, classes_of, line_chart
from sft_play.report.curves import Curve, curve, level, numbered, points_of, smoothed, with_trend
from sft_play.report.read import RunFacts

TIMES = {
    "data_seconds": "waiting for data",
    "compute_seconds": "forward and backward",
    "optimizer_seconds": "optimizer",
    "wait_seconds": "waiting for other ranks",
    "other_seconds": "rest",
}
"""The parts of a step."""

QUALITY = {
    "eval_token_accuracy": "token accuracy",
    "eval_rougeL": "ROUGE-L",
    "eval_exact_match": "exact match",
}
"""Figures of an evaluation that are shares, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart with its title, its legend as (name, style classes), and a line under it."""

    title: str
    unit: str
    svg: Markup
    legend: tuple[tuple[str, str], ...] = ()
    note: str = ""


def lines(
    key: str,
    title: str,
    curves: Sequence[Curve],
    *,
    unit: str = "",
    note: str = "",
    show: Callable[[float], str] = numbers.axis,
    from_zero: bool = False,
) -> Iterator[Figure]:
    """One figure of curves; none where there is nothing to draw, or one point alone."""
    if not any(len(one.points) > 1 for one in curves):
        return
    svg = line_chart(key, title, curves, show, from_zero=from_zero)
    yield Figure(title=title, unit=unit, svg=svg, legend=legend_of(curves), note=note)


def smooth(curves: Sequence[Curve]) -> list[Curve]:
    """Noisy curves that are drawn over each other."""
    return [smoothed(one) for one in curves]


def legend_of(curves: Sequence[Curve]) -> tuple[tuple[str, str], ...]:
    """What each line is; a curve and its trend are named once, one without points never. A single curve needs no
    legend.
    """
    classes = classes_of([one.role for one in curves])
    named = [(one, style) for one, style in zip(curves, classes, strict=True) if one.role != "faint"]
    return tuple((one.name, style) for one, style in named if one.points) if len(named) > 1 else ()


def learning(run: RunFacts) -> list[Figure]:
    """Loss, evaluation, learning rate, gradient norm."""
    train, evaluations = run.of("train"), run.of("eval")
    losses = [part for one in curve("training", train, "loss") for part in with_trend(one)]
    quality = [part for key, name in QUALITY.items() for part in curve(name, evaluations, key)]
    return [
        *lines("loss", "Loss", [*losses, *curve("held-out", evaluations, "eval_loss")]),
        *lines("quality", "Evaluation", quality, unit="share", from_zero=True),
        *lines("loss-ranks", "Loss by rank", smooth(numbered(train, "loss_rank", "rank")), unit="running mean"),
        *lines("learning-rate", "Learning rate", curve("", train, "learning_rate"), from_zero=True),
        *lines("grad-norm", "Gradient norm", curve("", train, "grad_norm"), from_zero=True),
    ]


def speed(run: RunFacts) -> list[Figure]:
    """Tokens/s and where the time of a step goes."""
    train = run.of("train")
    total = [part for one in curve("all", train, "tokens_per_second") for part in with_trend(one)]
    predicted = level("plan", (run.plan.get("predicted") or {}).get("tokens_per_second"), total)
    return [
        *lines("tokens", "Throughput", [*total, *predicted], unit="tokens/s", from_zero=True),
        *lines(
            "tokens-ranks",
            "Throughput by rank",
            smooth(numbered(train, "tokens_per_second_rank", "rank")),
            unit="tokens/s",
        ),
        *step_times(train),
        *lines("mfu", "Model FLOPs utilisation", curve("", train, "mfu_percent"), unit="%", from_zero=True),
    ]


def step_times(train: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    """The parts of a step, one on the other; a part that takes no time is left out."""
    parts = [part for key, name in TIMES.items() for part in curve(name, train, key) if any(y for _, y in part.points)]
    if parts and max(len(part.points) for part in parts) > 1:
        svg = area_chart("step-time", "Time of a step", parts, numbers.axis)
        legend = tuple(
            (part.name, f"{classes} area")
            for part, classes in zip(parts, classes_of(["line"] * len(parts)), strict=True)
        )
        yield Figure(title="Time of a step", unit="seconds", svg=svg, legend=legend)


def memory(run: RunFacts) -> list[Figure]:
    """Memory of each device over the run and by phase, beside the plan's."""
    train, predicted = run.of("train"), predicted_bytes(run)
    planned = predicted / GIB if predicted else None
    label = "process" if run.plan.get("device") == "cpu" else "GPU"
    found: list[Figure] = []
    by_phase = list(phases(run, label))
    for key, title in (("device", "Memory in use"), ("allocated", "Memory allocated"), ("reserved", "Memory reserved")):
        used = numbered(train, f"memory_{key}_gib_gpu", label)
        plan = level("plan", planned, used) if key == "device" else []
        found += lines(f"memory-{key}", title, [*used, *plan], unit="GiB", from_zero=True)
    hosts = numbered(train, "host_memory_gib_node", "machine")
    return [*found[:1], *by_phase, *found[1:], *lines("host", "Memory of the host", hosts, unit="GiB", from_zero=True)]


def phases(run: RunFacts, label: str) -> Iterator[Figure]:
    """The highest use of each phase, for each device; of many devices the highest."""
    peaks = phase_peaks(run)
    if not peaks:
        return
    devices = sorted({device for one in peaks.values() for device in one}, key=lambda name: (len(name), name))
    phase_names = list(peaks)
    series = [(device, [peaks[phase].get(device, 0) / GIB for phase in phase_names]) for device in devices]
    if len(series) > 4:
        series = [("highest", [max(one.values()) / GIB for one in peaks.values()])]
    if predicted := predicted_bytes(run):
        series.append(("plan", [predicted / GIB] * len(phase_names)))
    names = [name.replace("gpu_", f"{label} ") for name, _ in series]
    svg = bar_chart("memory-phases", "Memory by phase", phase_names, series, numbers.axis)
    legend = tuple(zip(names, classes_of(bar_roles(names)), strict=True))
    yield Figure(title="Highest memory by phase", unit="GiB", svg=svg, legend=legend)


def phase_peaks(run: RunFacts) -> dict[str, dict[str, float]]:
    """Phase -> device -> highest bytes over all attempts."""
    peaks: dict[str, dict[str, float]] = {}
    for event in run.of("phase_memory"):
        used = event.get("bytes")
        if not isinstance(used, dict):
            continue
        phase = peaks.setdefault(str(event.get("phase")), {})
        for device, size in used.items():
            phase[str(device)] = max(phase.get(str(device), 0), size or 0)
    return {phase: used for phase, used in peaks.items() if used}


def predicted_bytes(run: RunFacts) -> float | None:
    """What the plan expects on the device."""
    predicted = run.record.get("predicted") or run.plan.get("predicted") or {}
    value = predicted.get("device_bytes")
    return float(value) if value else None


def sensors(run: RunFacts) -> list[Figure]:
    """What the devices say of themselves."""
    train = run.of("train")
    wanted = (
        ("utilization_percent", "Utilisation", "%"),
        ("power_watts", "Power", "W"),
        ("temperature_celsius", "Temperature", "°C"),
        ("clock_mhz", "Clock", "MHz"),
    )
    return [
        figure
        for key, title, unit in wanted
        for figure in lines(
            key.replace("_", "-"), title, smooth(numbered(train, f"{key}_gpu", "GPU")), unit=unit, from_zero=True
        )
    ]


def lengths(run: RunFacts) -> list[Figure]:
    """How long the training rows are."""
    bars = histogram(run.data)
    if not bars:
        return []
    labels = [f"≤ {length:,}" for length, _ in bars]
    svg = bar_chart("lengths", "Length of the rows", labels, [("rows", [count for _, count in bars])], numbers.axis)
    return [Figure(title="Length of the training rows", unit="rows by tokens", svg=svg)]


def histogram(data: dict[str, Any]) -> list[tuple[int, int]]:
    """(length up to which, rows): the finer one of the report, else that of the facts."""
    tokens = data.get("tokens") or {}
    facts = ((tokens.get("facts") or {}).get("splits") or {}).get("train") or {}
    pairs = tokens.get("histogram") or facts.get("histogram") or []
    return [(int(pair[0]), int(pair[1])) for pair in pairs if len(pair) == 2]  # a damaged one has lost a number


def held_out_losses(run: RunFacts) -> list[tuple[float, float]]:
    """(step, loss) of every evaluation."""
    return points_of(run.of("eval"), "eval_loss")
