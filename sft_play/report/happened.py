"""What happened in a run beside training: its starts, spikes, what ran out of memory, fallbacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sft_play.report.read import RunFacts


@dataclass(frozen=True, kw_only=True)
class Happened:
    """Something that is worth a line: when (epoch seconds, 0 where that is not known), at which step, what."""

    time: float
    step: int | None
    kind: str
    text: str


def happened(run: RunFacts) -> list[Happened]:
    """Starts, resumes, spikes, what ran out of memory, fallbacks, and what held the run back, in the order of time."""
    found = [*_starts(run), *_told(run)]
    kinds = {one.kind for one in found}
    found += [one for one in _from_record(run) if one.kind not in kinds]
    return sorted(found, key=lambda one: one.time or float("inf"))


def _starts(run: RunFacts) -> Iterator[Happened]:
    starts = run.of("start")
    for event in starts:
        text = f"went on from step {event['step']:,}" if event.get("resumed") else "began"
        yield Happened(time=event.get("time", 0), step=event["step"], kind="start", text=text)
    for number, when in enumerate(run.started if not starts else (), 1):
        yield Happened(time=when, step=None, kind="start", text=f"start {number}")


def _told(run: RunFacts) -> Iterator[Happened]:
    for event in run.of("event"):
        kind = str(event.get("kind", "event")).replace("_", " ")
        yield Happened(time=event.get("time", 0), step=event["step"], kind=kind, text=str(event.get("text", "")))


def _from_record(run: RunFacts) -> Iterator[Happened]:
    """What older runs keep only in their record."""
    record = run.record
    spikes = record.get("spikes") or {}
    if spikes.get("found"):
        text = f"{spikes['found']} spikes of the gradient norm, {spikes.get('skipped', 0)} steps skipped"
        yield Happened(time=0, step=None, kind="spike", text=text)
    for change in record.get("amendments") or []:
        if "micro_batch" in change:
            text = f"micro-batch {change['micro_batch']}, {change.get('grad_accum')} accumulated"
            yield Happened(time=0, step=change.get("step") or None, kind="out of memory", text=text)
        else:
            yield Happened(time=0, step=None, kind="fallback", text=str(change.get("reason", "")))
    evaluation = record.get("evaluation") or {}
    if evaluation.get("fallback_step") is not None:
        text = str(evaluation.get("reason", ""))
        yield Happened(time=0, step=evaluation["fallback_step"], kind="fallback", text=text)
    if record.get("bottleneck"):
        yield Happened(time=0, step=None, kind="bottleneck", text=str(record["bottleneck"]))
    for forced in run.stamp.get("forced") or []:
        yield Happened(time=0, step=None, kind="forced", text=str(forced))
