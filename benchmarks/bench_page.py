"""docs/benchmarks.md and its picture, from the files of benchmarks/results alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pygal
from pygal.etree import etree
from pygal.style import CleanStyle

from benchmarks.bench_sides import OURS, PLAIN, UNSLOTH, summary
from sft_play.report.charts import ticks_of

GIB = 2**30
# Share of the processors that other work may take before the figures are no longer worth much.
MOST_BUSY = 0.2
LOOK = CleanStyle(
    background="#ffffff",
    plot_background="#ffffff",
    colors=("#1f6fb2", "#c2571a"),
    value_colors=("#ffffff", "#ffffff"),
    opacity="1",
    font_family="sans-serif",
    value_font_family="sans-serif",
    title_font_family="sans-serif",
    title_font_size=14,
    legend_font_size=12,
    label_font_size=12,
    value_font_size=12,
)
INTRODUCTION = """# Benchmarks

`make bench` measures the machine it runs on, and writes this page and its picture. `make bench ARGS="--cases NAME,..."`
measures some rows again, `ARGS=--list` names them, `ARGS=--quick` takes few steps, `ARGS="--output FOLDER"` writes
elsewhere. The figures of all machines are in `benchmarks/results/`; a row is replaced when it is measured again.

Every figure comes from a process of its own: `make train` of this toolkit, and a script of transformers, peft and trl's
`SFTTrainer` alone (`benchmarks/bench_plain.py`) on the same rows, in turn, in one run; in every second round the other
side begins. Plain trl is given the precision, attention, optimizer, checkpointing and batch that our plan chose; loss,
kernels and padding are its own defaults. Weights are random: speed and memory depend on shapes and lengths. Rows of
plain cases fill their length, so that nothing is padded. Those of packed cases are an eighth to all of it; plain trl
takes as many of them a step as hold about the same tokens, and pads them.

- **tokens/s**: tokens of rows, padding not counted, from the end of the first step to the end of the last; the median
  of the rounds. **times** is ours over plain trl.
- **MFU** = tokens/s x FLOPs a token / the GPU's dense 16-bit FLOP/s. FLOPs a token (`sft_play/plan/speed.py`): full 6N,
  adapters 4N + 6 x adapter weights, and 6 x layers x length x query width for causal attention; N are the weights that
  multiply a token, and recomputation is not counted. Documents in a pack are counted as if they were one. A CPU has no
  such rate that could be looked up, so its rows show `-`.
- **peak**: the most that torch allocated on a GPU; on a CPU the largest resident set, with Python and its libraries.
- **first step**: from the start of the process to the end of the first optimizer step, in seconds. Both read and
  tokenise their rows; ours also checks them, plans, and writes the run's record.
- **published**: figures of others, as they published them, on their GPU. They were not measured here.
"""
SMALL_WORDS = (
    "These cases are small, so that two cores need half a second a step: they show what the toolkit costs beside\n"
    "plain trl, and say nothing about GPUs."
)


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Machines with their rows, the newest of each case; a file is one machine on one day."""
    machines: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("bench-*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        kept = machines.get(found["device"], {"rows": []})["rows"]
        machines[found["device"]] = {**found, "rows": merged(kept, found["rows"])}
    return sorted(machines.values(), key=lambda one: (not one["on_gpu"], one["device"]))


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Old rows, each replaced by a new one of its case, and the others after them."""
    rows = {row["case"]: row for row in (*old, *new)}
    return list(rows.values())


def write_page(results: Path, page: Path) -> None:
    """Render the page and the picture beside it."""
    machines = read_results(results)
    page.parent.mkdir(parents=True, exist_ok=True)
    picture = page.with_suffix(".svg")
    page.write_text(render_page(machines, picture.name), encoding="utf-8")
    picture.write_text(render_picture(machines), encoding="utf-8")


def render_page(machines: Sequence[dict[str, Any]], picture: str) -> str:
    """The whole page."""
    parts = [INTRODUCTION, f"![ours over plain trl]({picture})\n"]
    if not any(machine["on_gpu"] for machine in machines):
        parts.append("No GPU has been measured yet: `make bench` on one adds its rows here.\n")
    return "\n".join([*parts, *(section(machine) for machine in machines)])


def section(machine: dict[str, Any]) -> str:
    """One machine: figures, then what the plan chose and how to measure a row again."""
    rows = machine["rows"]
    busy = max((row.get("busy", 0.0) for row in rows), default=0.0)
    unsloth = any(UNSLOTH in row.get("sides", {}) for row in rows)
    heads = ["case", "tokens/s", "plain trl", "times", *(["unsloth"] if unsloth else []), "MFU", "peak GiB",
             "plain trl", "first step", "plain trl", "published"]  # fmt: skip
    lines = [f"## {machine['device']}\n", *([] if machine["on_gpu"] else [SMALL_WORDS + "\n"])]
    lines += [table(heads, [figures_of(row, unsloth=unsloth) for row in rows]), ""]
    if busy > MOST_BUSY:
        lines.append(
            f"Other work took up to {100 * busy:.0f}% of the processors when this was measured: the ratios are off.\n"
        )
    lines += [table(["case", "what", "the plan chose", "measured"], [settings_of(row) for row in rows]), ""]
    lines += [f"- `{row['command']}`" for row in rows if "sides" in row]
    said = dict.fromkeys(f"{row['date']}, commit {row['commit'] or 'unknown'}: {row['versions']}" for row in rows)
    return "\n".join([*lines, "", *(f"{one}\n" for one in said)])


def figures_of(row: dict[str, Any], *, unsloth: bool) -> list[str]:
    """The cells of the first table."""
    if "sides" not in row:
        return [f"`{row['case']}`", f"not run: {row['skipped']}", *[""] * (8 + unsloth), published_text(row)]
    ours, plain = (summary(row["sides"].get(side, [])) for side in (OURS, PLAIN))
    other = [speed_text(summary(row["sides"].get(UNSLOTH, [])))] if unsloth else []
    times = ratio(ours, plain)
    mfu = mfu_percent(ours)
    return [
        f"`{row['case']}`", speed_text(ours), speed_text(plain), f"{times:.2f}" if times else "-", *other,
        f"{mfu:.1f}%" if mfu else "-", *(figure(one, "peak_bytes", GIB, 2) for one in (ours, plain)),
        *(figure(one, "first_step_seconds", 1, 1) for one in (ours, plain)), published_text(row),
    ]  # fmt: skip


def settings_of(row: dict[str, Any]) -> list[str]:
    """The cells of the second table."""
    plan = summary(row.get("sides", {}).get(OURS, [])).get("plan")
    rows = "packs" if row["packing"] else "rows"
    what = f"{row['shape']}, {row['method']}, {row['micro_batch']} {rows} of {row['seq_len']:,} tokens"
    words = "-"
    if plan:
        checkpointing = "checkpointing" if plan["gradient_checkpointing"] else "no checkpointing"
        precision = f"weights {plan['dtype']}, autocast {plan['autocast']}"
        words = f"{precision}, {plan['attention']}, loss {plan['loss']}, kernels {plan['kernels']}, {plan['optimizer']}"
        words += f", {checkpointing}"
    rounds = max((len(one) for one in row.get("sides", {}).values()), default=0)
    return [
        f"`{row['case']}`",
        what,
        words,
        f"{row['date']}, {rounds} x {row['steps']} steps, {row['threads']} threads",
    ]


def published_text(row: dict[str, Any]) -> str:
    return row["published"]["text"] if row["published"] else ""


def speed_text(found: dict[str, Any]) -> str:
    return f"failed: {found['error']}" if "error" in found else f"{found['tokens_per_second']:,.0f}"


def figure(found: dict[str, Any], key: str, unit: float, digits: int) -> str:
    return f"{found[key] / unit:.{digits}f}" if key in found else "-"


def ratio(ours: dict[str, Any], other: dict[str, Any]) -> float:
    """How many times as fast; 0 where one failed."""
    if "error" in ours or "error" in other:
        return 0.0
    return float(ours["tokens_per_second"] / other["tokens_per_second"])


def mfu_percent(found: dict[str, Any]) -> float:
    """0 where it failed, or where the device's rate is unknown."""
    plan = found.get("plan", {})
    if not plan.get("peak_flops_per_second"):
        return 0.0
    return float(100 * found["tokens_per_second"] * plan["flops_per_token"] / plan["peak_flops_per_second"])


def over_published(row: dict[str, Any], ours: dict[str, Any]) -> float:
    """Ours over the published figure; 0 where there is none, or ours failed."""
    told = row["published"]
    if not told or "error" in ours:
        return 0.0
    return float(ours["tokens_per_second"]) / float(told["value"])


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "/") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def render_picture(machines: Sequence[dict[str, Any]]) -> str:
    """Bars of ours over plain trl and over what is published, 1 being as fast; SVG text, the same for the same rows."""
    rows = [(machine, row) for machine in machines for row in machine["rows"] if "sides" in row][::-1]
    found = [(row, *(summary(row["sides"].get(side, [])) for side in (OURS, PLAIN))) for _, row in rows]
    chart = pygal.HorizontalBar(
        style=LOOK,
        js=[], width=760, height=130 + 34 * max(1, len(rows)), margin=12, disable_xml_declaration=True,
        title="speed: times plain trl in the same run", legend_at_bottom=True, truncate_label=-1, truncate_legend=-1,
        print_values=True, include_x_axis=True, value_formatter=lambda value: f"{value:.2f}" if value else "",
    )  # fmt: skip
    chart.uuid = "benchmarks"
    speeds = [ratio(ours, plain) for _, ours, plain in found]
    published = [over_published(row, ours) for row, ours, _ in found]
    chart.y_labels = ticks_of(0.0, max([1.0, *speeds, *published]))
    chart.x_labels = [f"{row['case']}, {'GPU' if machine['on_gpu'] else 'CPU'}" for machine, row in rows]
    chart.add("times plain trl", [speed or None for speed in speeds])
    if any(published):
        chart.add("times the published figure", [one or None for one in published])
    root = chart.render_tree()
    for parent in list(root.iter()):
        for child in list(parent):
            if not isinstance(child.tag, str) or child.tag.endswith("}script") or child.tag == "script":
                parent.remove(child)
    return str(etree.tostring(root, encoding="unicode")) + "\n"
