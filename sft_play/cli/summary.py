"""What is said once at the end of a run, from its record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sft_play.facts.hardware import GIB
from sft_play.plan.build import Plan
from sft_play.record.live import clock

NAME_WIDTH = 9


def summary_lines(record: dict[str, Any], plan: Plan, folder: Path, report: Path | None) -> list[str]:
    """Outcome, losses, time, memory and speed beside the plan's, cost, where the result lies and what to do next.

    Args:
        folder: of the run.
        report: the page that was written, if it was.
    """
    rows = [
        ("done", outcome(record)),
        ("time", time_taken(record)),
        ("speed", beside(f"{record['tokens_per_second']:,.0f} tokens/s", planned_speed(plan))),
        ("memory", beside(f"{memory_bytes(record) / GIB:.2f} GiB", f"{memory_planned(plan) / GIB:.2f}")),
        ("cost", cost(record, plan)),
        ("careful", "; ".join(careful(record))),
        ("result", str(folder / record["result"])),
        ("report", str(report or "")),
        ("next", f"make infer RUN={folder}"),
        ("", f"make eval RUN={folder} ARGS=--compare"),
    ]
    return [f"{name:<{NAME_WIDTH}}{text}" for name, text in rows if text]


def outcome(record: dict[str, Any]) -> str:
    """Held-out loss before and after, where it was measured; else the last training loss."""
    before, after = record.get("eval_loss_before"), record.get("eval_loss")
    if after is None:
        return f"training loss {record['train_loss']:.4f}; nothing was held out"
    change = f"{before:.4f} -> {after:.4f} ({after / before - 1:+.1%})" if before else f"{after:.4f}"
    best = f", the model of step {record['best_step']}" if record.get("best_step") else ""
    return f"held-out loss {change}{best}"


def time_taken(record: dict[str, Any]) -> str:
    """Time, steps and tokens."""
    tokens = record.get("summary", {}).get("tokens")
    return f"{clock(record['seconds'])}, {record['steps']:,} steps" + (f", {tokens:,} tokens" if tokens else "")


def planned_speed(plan: Plan) -> str:
    """The plan's tokens/s; empty where it knows none."""
    return f"{plan.predicted['tokens_per_second']:,.0f}" if plan.predicted["tokens_per_second"] else ""


def memory_bytes(record: dict[str, Any]) -> int:
    """What the device held at its peak; on a CPU what the process grew by."""
    measured = record["measured"]
    return int(measured.get("device_bytes", measured["memory_bytes"]))


def memory_planned(plan: Plan) -> float:
    """What the plan says of the same figure."""
    return plan.predicted["device_bytes" if plan.device == "cuda" else "allocated_bytes"]


def beside(measured: str, planned: str) -> str:
    """A figure with the plan's."""
    return f"{measured} (planned {planned})" if planned else measured


def cost(record: dict[str, Any], plan: Plan) -> str:
    """Hours of all GPUs; empty on a CPU, and where they were not counted."""
    hours = record.get("summary", {}).get("gpu_hours")
    return f"{hours:,.4f} GPU hours" if plan.device == "cuda" and hours is not None else ""


def careful(record: dict[str, Any]) -> list[str]:
    """What somebody should look at."""
    found = []
    if (spikes := record.get("spikes", {})).get("found"):
        found.append(f"{spikes['found']} spikes of the gradient norm, {spikes['skipped']} steps skipped for them")
    if note := record.get("evaluation", {}).get("note"):
        found.append(str(note))
    if record.get("bottleneck"):
        found.append(str(record["bottleneck"]))
    if others := record.get("summary", {}).get("warnings_of_other_ranks"):
        found.append(f"warnings of other ranks in run.log: {others}")
    return found
