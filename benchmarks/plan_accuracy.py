"""Predict every run of a table of measured runs and print by how much the plan is off.

    python benchmarks/plan_accuracy.py --table FILE.csv [--json FILE]

Every family of runs (the id's prefix and the model) weighs the same. Errors are |predicted - measured| / measured
against the figure that the source printed. Writes docs/plan_accuracy.md and docs/plan_accuracy.svg.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from scatter import Point, render_scatter  # noqa: E402
from table import RowProblem, Run, read_rows, read_run  # noqa: E402

from sft_play.facts.hardware import GIB  # noqa: E402
from sft_play.plan.memory import Estimate, estimate  # noqa: E402
from sft_play.plan.speed import estimate_speed  # noqa: E402

UNDER = 0.05
KINDS = ("allocated", "reserved", "device", "tokens/s")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One row with what was predicted; None where the row has no such figure to compare with."""

    id: str
    family: str
    outcome: str
    fits: bool
    needed_gib: float
    capacity_gib: float
    measured: dict[str, float]
    predicted: dict[str, float]

    def error(self, kind: str) -> float | None:
        """(predicted - measured) / measured."""
        if kind not in self.measured:
            return None
        return self.predicted[kind] / self.measured[kind] - 1

    @property
    def right_verdict(self) -> bool:
        return self.fits == (self.outcome == "ok")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Errors of one kind of figure, over some rows, each family weighing the same."""

    rows: int
    families: int
    median: float
    p90: float
    under_share: float
    under_share_of_rows: float


def predict(run: Run) -> Prediction:
    """Memory, verdict and speed of one row."""
    memory = estimate(run.facts, run.settings)
    capacity = run.hardware.smallest_gpu_bytes
    measured, predicted = {}, {}
    for kind, value in _memory_figures(memory, capacity).items():
        figure = run.figure(f"{kind}_gib")
        predicted[kind] = value / GIB
        if figure is not None and run.row["outcome"] == "ok":
            measured[kind] = figure
    speed = estimate_speed(run.facts, run.settings, run.hardware)
    tokens = run.figure("tokens_per_second")
    if speed is not None:
        predicted["tokens/s"] = speed.tokens_per_second_per_gpu
        if tokens and "not stated" not in run.row.get("tokens_scope", ""):
            measured["tokens/s"] = tokens
    return Prediction(
        id=run.id,
        family=run.family,
        outcome=run.row["outcome"],
        fits=memory.needed_bytes <= capacity,
        needed_gib=memory.needed_bytes / GIB,
        capacity_gib=capacity / GIB,
        measured=measured,
        predicted=predicted,
    )


def _memory_figures(memory: Estimate, capacity: int) -> dict[str, int]:
    return {
        "allocated": memory.allocated_bytes,
        "reserved": memory.shown_reserved_bytes(capacity),
        "device": memory.shown_device_bytes(capacity),
    }


def read_predictions(table: Path) -> tuple[list[Prediction], list[str]]:
    """Every row predicted, and a line for each that cannot be."""
    found, problems = [], []
    for row in read_rows(table):
        try:
            found.append(predict(read_run(row)))
        except (RowProblem, KeyError, ValueError) as error:
            problems.append(f"{row.get('id', '?')}: {error}")
    return found, problems


def summarise(rows: Sequence[Prediction], kind: str) -> Summary | None:
    """Weighted median and 90th percentile of one kind's errors; None without such a row."""
    errors = [(row.family, error) for row in rows if (error := row.error(kind)) is not None]
    if not errors:
        return None
    counts = {family: sum(1 for other, _ in errors if other == family) for family, _ in errors}
    weighted = sorted((abs(error), 1 / counts[family]) for family, error in errors)
    under = sum(1 / counts[family] for family, error in errors if error < -UNDER)
    return Summary(
        rows=len(errors),
        families=len(counts),
        median=_quantile(weighted, 0.5),
        p90=_quantile(weighted, 0.9),
        under_share=under / len(counts),
        under_share_of_rows=sum(error < -UNDER for _, error in errors) / len(errors),
    )


def printed_summary(rows: Sequence[Prediction]) -> Summary | None:
    """Errors against the figure the source printed: allocated where given, else reserved."""
    renamed = [
        Prediction(
            **{
                **vars(row),
                "measured": {"memory": row.measured.get("allocated", row.measured.get("reserved"))},
                "predicted": {"memory": row.predicted["allocated" if "allocated" in row.measured else "reserved"]},
            }
        )
        for row in rows
        if "allocated" in row.measured or "reserved" in row.measured
    ]
    return summarise(renamed, "memory")


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Smallest value with at least this share of the weight at or below it."""
    total, seen = sum(weight for _, weight in weighted), 0.0
    for value, weight in weighted:
        seen += weight
        if seen >= share * total - 1e-9:
            return value
    return weighted[-1][0]


def verdict_share(rows: Sequence[Prediction]) -> float | None:
    """Share of rows with a stated memory outcome whose verdict is right."""
    judged = [row for row in rows if row.outcome in {"ok", "oom"}]
    return sum(row.right_verdict for row in judged) / len(judged) if judged else None


def verdict_line(rows: Sequence[Prediction]) -> str:
    """How many runs that fitted and how many that did not were told apart."""
    parts = []
    for outcome, name in (("ok", "runs that fitted"), ("oom", "runs out of memory")):
        judged = [row for row in rows if row.outcome == outcome]
        parts.append(f"{sum(row.right_verdict for row in judged)} of {len(judged)} {name}")
    return "Right verdicts, on the device memory needed: " + ", ".join(parts) + "."


def figures(rows: Sequence[Prediction]) -> dict[str, Any]:
    """The figures of some rows, for programs."""
    summaries = {kind: summarise(rows, kind) for kind in KINDS} | {"printed": printed_summary(rows)}
    return {
        "rows": len(rows),
        "verdict_right": verdict_share(rows),
        **{kind: asdict(value) if value else None for kind, value in summaries.items()},
    }


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _row(name: str, rows: Sequence[Prediction]) -> list[str]:
    cells = [name, str(len(rows))]
    for summary in (printed_summary(rows), summarise(rows, "allocated"), summarise(rows, "device")):
        cells += [_percent(summary.median), _percent(summary.p90)] if summary else ["-", "-"]
    device, speed = summarise(rows, "device"), summarise(rows, "tokens/s")
    cells += [_percent(device.under_share_of_rows if device else None)]
    return [*cells, _percent(verdict_share(rows)), _percent(speed.median if speed else None)]


HEADER = [
    "family", "rows", "memory median", "p90", "allocated median", "p90", "device median", "p90", "device under 5%",
    "verdict", "tokens/s median",
]  # fmt: skip


def table_lines(rows: Sequence[Prediction]) -> list[list[str]]:
    """One line a family and one for all, as cells."""
    families = sorted({row.family for row in rows})
    lines = [_row(family, [row for row in rows if row.family == family]) for family in families]
    return [*lines, _row("all, families alike", rows)]


def render_text(lines: Sequence[Sequence[str]]) -> str:
    """Cells as aligned columns."""
    everything = [HEADER, *lines]
    widths = [max(len(line[i]) for line in everything) for i in range(len(HEADER))]
    pad: Callable[[Sequence[str]], str] = lambda line: "  ".join(  # noqa: E731
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    )
    return "\n".join(pad(line) for line in everything)


def render_markdown(rows: Sequence[Prediction], problems: Sequence[str], table: str) -> str:
    """docs/plan_accuracy.md."""
    lines = ["| " + " | ".join(cells) + " |" for cells in [HEADER, ["---"] * len(HEADER), *table_lines(rows)]]
    wrong = [f"- {row.id}: {row.outcome}, predicted to need {row.needed_gib:.1f} of {row.capacity_gib:.1f} GiB"
             for row in rows if row.outcome in {"ok", "oom"} and not row.right_verdict]  # fmt: skip
    missing = [f"- {line}" for line in problems] or ["none"]
    return "\n".join(
        [
            "# How far the plan is off",
            "",
            f"Made by `benchmarks/plan_accuracy.py --table {table}`: {len(rows)} published runs predicted. Errors are",
            "|predicted - measured| / measured; every family (source and model) weighs the same. \"memory\" is the",
            "figure the source printed, allocated or reserved. \"device under 5%\" is the share of rows whose",
            "nvidia-smi figure is under-predicted by more than 5%.",
            "",
            *lines,
            "",
            "![predicted against measured](plan_accuracy.svg)",
            "",
            verdict_line(rows),
            "",
            "Wrong verdicts:",
            "",
            *(wrong or ["none"]),
            "",
            "Rows that could not be predicted:",
            "",
            *missing,
            "",
            "Not validated by these runs: DDP, ZeRO-1/2/3, tensor parallel, layer split, offload of the optimizer,",
            "evaluation and generation, and device memory on anything but A100.",
            "",
        ]
    )  # fmt: skip


def scatter_points(rows: Sequence[Prediction]) -> list[Point]:
    """Device memory where measured, else what the source printed."""
    points = []
    for row in rows:
        for kind in ("allocated", "reserved", "device"):
            if kind in row.measured:
                points.append(Point(x=row.measured[kind], y=row.predicted[kind], series=kind, label=row.id))
    return points


def write_docs(folder: Path, rows: Sequence[Prediction], problems: Sequence[str], table: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "plan_accuracy.md").write_text(render_markdown(rows, problems, table), encoding="utf-8")
    svg = render_scatter(scatter_points(rows), x_label="measured, GiB a GPU", y_label="predicted, GiB a GPU")
    (folder / "plan_accuracy.svg").write_text(svg, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the plan with measured runs.")
    parser.add_argument("--table", type=Path, required=True, help="CSV in the columns of the measured runs")
    parser.add_argument("--json", type=Path, help="also write the figures and every row here")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the report (default: docs)")
    options = parser.parse_args(arguments)
    rows, problems = read_predictions(options.table)
    if not rows:
        print("no row could be predicted:", *problems[:10], sep="\n  ", file=sys.stderr)
        return 2
    print(render_text(table_lines(rows)))
    print(f"\n{verdict_line(rows)}\n{len(problems)} rows not predicted" + "".join(f"\n  {line}" for line in problems))
    write_docs(options.docs, rows, problems, options.table.name)
    if options.json:
        families = {family: figures([r for r in rows if r.family == family]) for family in {r.family for r in rows}}
        document = {
            "version": 1,
            "overall": figures(rows),
            "families": dict(sorted(families.items())),
            "not_predicted": problems,
            "rows": [{**asdict(row), "right_verdict": row.right_verdict} for row in rows],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
