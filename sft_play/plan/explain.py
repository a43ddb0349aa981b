"""A report as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sft_play.facts.hardware import GIB, Hardware, LinkKind
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.report import Report
from sft_play.plan.strategy import Candidate
from sft_play.plan.terms import Phase, total_bytes

JSON_VERSION = 1
BAR_WIDTH = 40
# Terms smaller than this share of a phase are summed up in one bar.
SMALL_SHARE = 0.01


def render_report(report: Report, command: str, launcher: str = "") -> str:
    """The whole page.

    Args:
        command: the make line that runs the plan.
        launcher: the command line behind it.
    """
    blocks = [_machine(report), _table(report)]
    if report.plan and report.chosen:
        blocks += [_decisions(report), _memory(report.chosen), _run(report, command, launcher)]
    else:
        blocks.append([f"does not fit: {report.refusal.line() if report.refusal else ''}"])
    blocks += [_scaling(report), _warnings(report), _validated(report)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def describe_machine(hardware: Hardware) -> str:
    """The machine in one line."""
    if not hardware.gpus:
        ram = f", {hardware.ram_bytes / GIB:.0f} GiB of memory" if hardware.ram_bytes else ", memory unknown"
        processes = f", {hardware.cpu_processes} processes" if hardware.cpu_processes > 1 else ""
        return f"CPU{f', {hardware.cpu_cores} cores' if hardware.cpu_cores else ''}{ram}{processes}"
    kinds = dict.fromkeys(gpu.name for gpu in hardware.gpus)
    count = f"{hardware.nodes} x " if hardware.nodes > 1 else ""
    amd = hardware.gpus[0].family.startswith("cdna")
    kind = "xGMI" if amd and hardware.link is LinkKind.NVLINK else hardware.link.value
    link = f", {kind} {hardware.link_bytes_per_second / 1e9:.0f} GB/s" if len(hardware.gpus) > 1 else ""
    size = f"{hardware.smallest_gpu_bytes / GIB:.1f} GiB usable each"
    origin = " (described, not probed)" if hardware.described else ""
    return f"{count}{len(hardware.gpus)} x {' and '.join(kinds)}, {size}{link}{origin}"


def describe_model(facts: ModelFacts) -> str:
    """The model in one line."""
    active = f", {facts.active_parameters / 1e9:.2f}B active a token" if facts.experts else ""
    return (
        f"{facts.name}: {facts.model_type}, {facts.parameters / 1e9:.2f}B parameters{active}, "
        f"{facts.num_layers} layers, hidden {facts.hidden_size}, vocabulary {facts.vocab_size:,}"
    )


def _machine(report: Report) -> list[str]:
    return [
        f"machine  {describe_machine(report.inputs.hardware)}",
        f"model    {describe_model(report.inputs.facts)}",
        f"method   {report.inputs.config.tuning.mode.value}",
    ]


def _table(report: Report) -> list[str]:
    size = _size(report)
    head = ("", "strategy", size, "shown", "fits", "batch", "tokens/s", "MFU", "host GiB", "")
    rows = [_row(one, report) for one in report.choice.candidates]
    lines = _columns([head, *rows])
    shown = "nvidia-smi" if report.inputs.hardware.gpus else "a process list"
    legend = f"{size}: the least it runs in; shown: what {shown} would show; batch: micro-batch x accumulation"
    if not report.inputs.only:
        lines += _not_possible(report.choice.illegal)
    speed = next((one.speed for one in report.choice.candidates if one.speed), None)
    return [*lines, legend, *([f"MFU counts {speed.formula}"] if speed else [])]


def _not_possible(illegal: dict[str, str]) -> list[str]:
    """One line a reason, with all that it rules out."""
    names: dict[str, list[str]] = {}
    for name, why in illegal.items():
        names.setdefault(why, []).append(name)
    return [f"  not possible: {', '.join(those)} ({why})" for why, those in names.items()]


def _row(one: Candidate, report: Report) -> tuple[str, ...]:
    speed, hardware = one.speed, report.inputs.hardware
    gpus = max(1, len(hardware.gpus))
    mark = ">" if report.chosen and one.layout == report.chosen.layout else ""
    return (
        mark,
        one.layout.name,
        f"{(one.memory.needed_bytes if hardware.gpus else one.memory.allocated_bytes) / GIB:.1f}",
        f"{one.memory.shown_device_bytes(hardware.smallest_gpu_bytes) / GIB:.1f}" if hardware.gpus else "-",
        "yes" if one.fits else "no",
        f"{one.batch.micro_batch} x {one.batch.grad_accum}",
        f"{speed.tokens_per_second:,.0f}" if speed else "-",
        f"{speed.mfu:.0%}" if speed and speed.mfu else "-",
        f"{one.memory.host_bytes * gpus / GIB:.0f}" if one.memory.host_bytes else "-",
        one.reason,
    )


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = set(range(2, len(widths) - 1)) - {4}
    lines = []
    for row in rows:
        cells = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _size(report: Report) -> str:
    return "GiB a GPU" if report.inputs.hardware.gpus else "GiB"


def _decisions(report: Report) -> list[str]:
    assert report.plan is not None
    return ["decided", *(f"  {reason}" for reason in report.plan.reasons)]


def _memory(chosen: Candidate) -> list[str]:
    lines = ["memory by phase, GiB on one device"]
    most = max(total_bytes(parts) for parts in chosen.memory.phases.values())
    for phase, parts in chosen.memory.phases.items():
        size = total_bytes(parts)
        lines.append(f"  {phase.value:<18} {size / GIB:>7.2f}  {'#' * round(BAR_WIDTH * size / max(1, most))}")
    peak = chosen.memory.peak_phase
    lines.append(f"at the peak, {peak.value}")
    return lines + [f"  {name:<34} {size / GIB:>7.2f}  {bar}" for name, size, bar in _bars(chosen, peak)]


def _bars(chosen: Candidate, phase: Phase) -> Iterator[tuple[str, int, str]]:
    parts = sorted(chosen.memory.phases[phase], key=lambda part: -part.bytes)
    whole = max(1, total_bytes(tuple(parts)))
    small = 0
    for part in parts:
        if part.bytes < SMALL_SHARE * whole:
            small += part.bytes
        else:
            yield part.name, part.bytes, "#" * max(1, round(BAR_WIDTH * part.bytes / whole))
    if small:
        yield "the rest", small, ""


def _run(report: Report, command: str, launcher: str) -> list[str]:
    length, chosen = report.length, report.chosen
    assert chosen is not None
    known = [f"{length.steps:,} steps" if length.steps else "steps unknown: the data is not prepared yet"]
    known += [f"{length.tokens:,} tokens"] if length.tokens else []
    known += (
        [f"{length.hours:.1f} hours" if length.hours >= 0.1 else f"{length.hours * 60:.1f} minutes"]
        if length.hours
        else []
    )
    return [
        f"run      {', '.join(known)}",
        f"disk     {report.disk_bytes / GIB:.1f} GiB for checkpoints, result and logs",
        f"command  {command}",
        *([f"         {launcher}"] if launcher else []),
    ]


def _scaling(report: Report) -> list[str]:
    if not report.scaling:
        return []
    lines = ["more of these GPUs in one machine"]
    for one in report.scaling:
        faster = f"{one.speedup:.1f}x one" if one.speedup and one.gpus > 1 else ""
        rate = f"{one.tokens_per_second:>9,.0f} tokens/s" if one.tokens_per_second else ""
        lines.append(f"  {one.gpus}  {one.strategy:<26} {rate}  {faster}".rstrip())
    return lines


def _warnings(report: Report) -> list[str]:
    return [f"warning: {text}" for text in report.warnings]


def _validated(report: Report) -> list[str]:
    if report.validated:
        return ["memory and speed of this strategy are checked against published measured runs: docs/plan_accuracy.md"]
    return ["no measured run stands behind these figures yet: docs/plan_accuracy.md says which are checked"]


def report_as_json(report: Report, command: str, launcher: str = "") -> dict[str, Any]:
    """The report for programs; docs/plan.md documents it."""
    inputs = report.inputs
    return {
        "version": JSON_VERSION,
        "machine": {
            "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in inputs.hardware.gpus],
            "nodes": inputs.hardware.nodes,
            "link": inputs.hardware.link.value,
            "ram_bytes": inputs.hardware.ram_bytes,
            "described": inputs.hardware.described,
        },
        "model": {"name": inputs.facts.name, "parameters": inputs.facts.parameters},
        "method": inputs.config.tuning.mode.value,
        "strategies": [_candidate_json(one, report) for one in report.choice.candidates],
        "not_possible": dict(report.choice.illegal),
        "plan": asdict(report.plan) if report.plan else None,
        "refusal": report.refusal.line() if report.refusal else None,
        "run": asdict(report.length),
        "disk_bytes": report.disk_bytes,
        "scaling": [asdict(one) for one in report.scaling],
        "warnings": list(report.warnings),
        "validated": report.validated,
        "command": command,
        "launcher": launcher,
    }


def _candidate_json(one: Candidate, report: Report) -> dict[str, Any]:
    speed = one.speed
    return {
        "strategy": one.layout.placement.value,
        "offload": one.layout.offload.value,
        "chosen": bool(report.chosen and one.layout == report.chosen.layout),
        "fits": one.fits,
        "reason": one.reason,
        "micro_batch": one.batch.micro_batch,
        "grad_accum": one.batch.grad_accum,
        "global_batch": one.batch.global_batch,
        "gradient_checkpointing": one.settings.checkpointing.value,
        "allocated_bytes": one.memory.allocated_bytes,
        "reserved_bytes": one.memory.reserved_bytes,
        "device_bytes": one.memory.device_bytes,
        "needed_bytes": one.memory.needed_bytes,
        "host_bytes": one.memory.host_bytes,
        "nvme_bytes": one.memory.nvme_bytes,
        "phases": {
            phase.value: {part.name: part.bytes for part in parts} for phase, parts in one.memory.phases.items()
        },
        "tokens_per_second": speed.tokens_per_second if speed else None,
        "mfu": speed.mfu if speed else None,
        "mfu_formula": speed.formula if speed else None,
        "step_seconds": speed.step_seconds if speed else None,
    }
