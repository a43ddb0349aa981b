"""What a run came to: the figures at the head of its page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sft_play.report import numbers
from sft_play.report.figures import held_out_losses
from sft_play.report.read import RunFacts
from sft_play.report.state import RunState


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One figure of the outcome.

    Attributes:
        value: as record.json has it, for whoever reads the page by program.
        text: as it is shown.
        beside: what it is compared with.
    """

    label: str
    key: str
    value: Any
    text: str
    beside: str = ""


def tiles(run: RunFacts) -> list[Tile]:
    """The figures of the outcome; of a run without a record those of its last events."""
    record, summary = run.record, run.record.get("summary") or {}
    return [*_losses(run), *_progress(run), *_speed(record, summary), *_sizes(record, summary)]


def _losses(run: RunFacts) -> Iterator[Tile]:
    record, held_out = run.record, held_out_losses(run)
    after = record.get("eval_loss", held_out[-1][1] if held_out else None)
    before = record.get("eval_loss_before", held_out[0][1] if held_out and held_out[0][0] == 0 else None)
    if after is not None:
        change = f"{before:.4f} before, {after / before - 1:+.1%}" if before else ""
        yield Tile(label="Held-out loss", key="eval_loss", value=after, text=f"{after:.4f}", beside=change)
    last = record.get("train_loss", next((event.get("loss") for event in reversed(run.of("train"))), None))
    if last is not None:
        yield Tile(label="Training loss", key="train_loss", value=last, text=f"{last:.4f}", beside="of the last step")


def _progress(run: RunFacts) -> Iterator[Tile]:
    record, train = run.record, run.of("train")
    steps = record.get("steps", train[-1]["step"] if train else None)
    if steps is not None:
        best = record.get("best_step")
        beside = f"best at step {best:,}" if best else "" if run.state is RunState.DONE else "so far"
        yield Tile(label="Steps", key="steps", value=steps, text=f"{steps:,}", beside=beside)
    seconds = record.get("seconds", train[-1].get("time", 0) - train[0].get("time", 0) if train else None)
    if seconds is not None:
        inner = (record.get("summary") or {}).get("train_seconds")
        beside = f"{numbers.span(inner)} of it training" if inner else ""
        yield Tile(label="Time", key="seconds", value=seconds, text=numbers.span(seconds), beside=beside)


def _speed(record: dict[str, Any], summary: dict[str, Any]) -> Iterator[Tile]:
    rate = record.get("tokens_per_second")
    if rate is not None:
        planned = (record.get("predicted") or {}).get("tokens_per_second")
        beside = f"plan {planned:,.0f}" if planned else ""
        yield Tile(
            label="Tokens a second", key="tokens_per_second", value=rate, text=numbers.number(rate), beside=beside
        )
    tokens = summary.get("tokens")
    if tokens is not None:
        yield Tile(label="Tokens trained on", key="summary.tokens", value=tokens, text=f"{tokens:,.0f}")


def _sizes(record: dict[str, Any], summary: dict[str, Any]) -> Iterator[Tile]:
    measured, predicted = record.get("measured") or {}, record.get("predicted") or {}
    on_device = "device_bytes" if "device_bytes" in measured else "memory_bytes"
    if size := measured.get(on_device):
        planned = predicted.get("device_bytes" if on_device == "device_bytes" else "allocated_bytes")
        beside = f"plan {numbers.gib(planned)}" if planned else ""
        yield Tile(label="Memory", key=f"measured.{on_device}", value=size, text=numbers.gib(size), beside=beside)
    hours = summary.get("gpu_hours")
    if hours:
        yield Tile(label="GPU hours", key="summary.gpu_hours", value=hours, text=f"{hours:.3g}")
