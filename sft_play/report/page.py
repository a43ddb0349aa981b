"""The report of a run: one HTML file that needs nothing else, and runs nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sft_play.config.secrets import redacted
from sft_play.record.run_dir import write_atomic
from sft_play.report import numbers
from sft_play.report.figures import TIMES, held_out_losses, learning, lengths, memory, sensors, speed
from sft_play.report.read import RunFacts, read_run
from sft_play.report.state import RunState

REPORT = "report.html"
ANSWERS_SHOWN = 6
TEMPLATES = Path(__file__).parent / "templates"


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


@dataclass(frozen=True, kw_only=True)
class Happened:
    """Something that is worth a line: when (epoch seconds, 0 where that is not known), at which step, what."""

    time: float
    step: int | None
    kind: str
    text: str


def write_report(folder: Path) -> Path:
    """Write report.html into a run's folder.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / REPORT
    write_atomic(path, render_report(read_run(folder)))
    return path


def render_report(run: RunFacts) -> str:
    """The page as text. Secrets of the environment are taken out; everything read is escaped."""
    return render(
        "report.html.jinja",
        title=run.name,
        run=run,
        written=numbers.moment(time.time()),
        tiles=tiles(run),
        facts=what_was_trained(run),
        error=error_lines(run),
        learning=learning(run),
        speed=speed(run),
        times=times(run),
        memory=memory(run),
        sensors=sensors(run),
        lengths=lengths(run),
        splits=splits(run),
        proofs=((run.data.get("tokens") or {}).get("facts") or {}).get("proofs") or [],
        answers=answers(run),
        happened=happened(run),
        reasons=run.plan.get("reasons") or [],
        environment=environment(run),
    )


def render(template: str, **values: Any) -> str:
    """A template of this folder with values; every text is redacted and escaped on its way into the page."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_without_secrets,
    )
    environment.filters |= {
        "moment": numbers.moment,
        "number": numbers.number,
        "gib": numbers.gib,
        "span": numbers.span,
    }
    text: str = environment.get_template(template).render(**values)
    return text


def _without_secrets(value: Any) -> Any:
    return redacted(value) if isinstance(value, str) and not isinstance(value, Markup) else value


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


def what_was_trained(run: RunFacts) -> list[tuple[str, str]]:
    """Model, method, data, devices: one line each; what is not known is left out."""
    config, plan, record = run.config, run.plan, run.record
    lines = {
        "Model": _model(run),
        "Method": _method(config),
        "Parameters": _parameters(record),
        "Data": ", ".join(_sources(config)),
        "Batch": _batch(plan),
        "Length": f"up to {plan['seq_len']:,} tokens" if plan.get("seq_len") else "",
        "Devices": _devices(run),
        "Precision": _precision(plan),
        "Result": str(run.path / record["result"]) if record.get("result") else "",
    }
    return [(name, text) for name, text in lines.items() if text]


def _model(run: RunFacts) -> str:
    model = run.config.get("model") or {}
    return " @ ".join(str(part) for part in (model.get("name"), model.get("revision")) if part)


def _method(config: dict[str, Any]) -> str:
    tuning = config.get("tuning") or {}
    mode, lora = tuning.get("mode"), tuning.get("lora") or {}
    if not mode:
        return ""
    if mode == "full":
        return "full: every weight"
    kinds = [name for key, name in (("use_dora", "DoRA"), ("use_rslora", "rsLoRA")) if lora.get(key)]
    words = {"lora": "LoRA", "qlora": "QLoRA"}.get(mode, mode)
    return ", ".join([f"{words} r {lora.get('r')}", f"alpha {numbers.number(lora.get('alpha'))}", *kinds])


def _parameters(record: dict[str, Any]) -> str:
    trained, all_ = record.get("trainable_parameters"), record.get("parameters")
    return f"{trained:,} of {all_:,} trained ({trained / all_:.2%})" if trained and all_ else ""


def _sources(config: dict[str, Any]) -> Iterator[str]:
    train = (config.get("data") or {}).get("train") or []
    for one in [train] if isinstance(train, str) else train:
        yield one if isinstance(one, str) else str(one.get("path"))


def _batch(plan: dict[str, Any]) -> str:
    if not plan.get("global_batch"):
        return ""
    micro, accumulated = plan.get("micro_batch"), plan.get("grad_accum")
    return f"{plan['global_batch']} rows a step ({micro} at once on a device, {accumulated} accumulated)"


def _devices(run: RunFacts) -> str:
    plan, names = run.plan, run.record.get("device_names")
    if not plan.get("device_name"):
        return ""
    starts = run.of("start")
    many = max(plan.get("world_size") or 1, len(plan.get("device_uuids") or []))
    listed = names or (starts[-1].get("devices") if starts else None) or []
    told = f"{many} x {plan['device_name']}, {plan.get('strategy')}"
    machines = f" on {plan['nodes']} machines" if (plan.get("nodes") or 1) > 1 else ""
    distinct = {str(name).partition(": ")[2].partition(" (")[0] or str(name) for name in listed}
    return told + machines + (f" ({', '.join(sorted(distinct))})" if len(distinct) > 1 else "")


def _precision(plan: dict[str, Any]) -> str:
    parts = [f"weights {plan['dtype']}" if plan.get("dtype") else "", f"computed in {plan.get('autocast') or 'that'}"]
    return ", ".join(filter(None, parts)) if parts[0] else ""


def error_lines(run: RunFacts) -> list[str]:
    """Why the run stopped or failed."""
    if run.state in (RunState.DONE, RunState.RUNNING):
        return []
    if run.record.get("error"):
        return [str(line) for line in run.record["error"]]
    if run.state is RunState.NOT_STARTED:
        return ["no worker was started in this folder"]
    return ["the run ended without a word: its processes were killed, or the machine went down"]


def times(run: RunFacts) -> list[tuple[str, str, float]]:
    """(part, seconds, share) of the mean step, from the record."""
    summary = run.record.get("summary") or {}
    whole = summary.get("step_seconds")
    if not whole:
        return []
    parts = [(name, summary.get(key)) for key, name in TIMES.items()]
    return [(name, numbers.span(seconds), seconds / whole) for name, seconds in parts if seconds]


def splits(run: RunFacts) -> list[dict[str, Any]]:
    """Counts of each split."""
    facts = ((run.data.get("tokens") or {}).get("facts") or {}).get("splits") or {}
    order = {"train": 0, "validation": 1, "test": 2}
    return [{"name": name, **facts[name]} for name in sorted(facts, key=lambda name: order.get(name, 3))]


def answers(run: RunFacts) -> list[dict[str, Any]]:
    """Rows with their answers at the first and the last evaluation that generated some."""
    if not run.answers:
        return []
    first, last = run.answers[0], run.answers[-1]
    rows = [row for row in last.by_row if row in first.by_row][:ANSWERS_SHOWN]
    shown = []
    for row in rows:
        one, before = last.by_row[row], first.by_row[row] if first is not last else None
        pairs = [(f"at step {first.step}", before), (f"at step {last.step}", one)] if before else [("answer", one)]
        shown.append(
            {
                "row": row,
                "prompt": one.get("prompt", ""),
                "reference": one.get("reference", ""),
                "answers": [(name, found.get("prediction", ""), found.get("rougeL")) for name, found in pairs if found],
            }
        )
    return shown


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


def environment(run: RunFacts) -> list[tuple[str, str]]:
    """Versions, and what the run's data and model are known by."""
    stamp = run.stamp
    versions = {"sft-play": stamp.get("sft_play"), "Python": stamp.get("python"), **(stamp.get("versions") or {})}
    known = {"base model": stamp.get("base_identity"), "data": str(stamp.get("data_fingerprint") or "")[:16]}
    return [(name, str(value)) for name, value in {**versions, **known}.items() if value]
