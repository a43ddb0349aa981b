"""The report of a run: one HTML file that needs nothing else, and runs nothing."""

from __future__ import annotations

import re
import time
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sft_play.config.secrets import redacted
from sft_play.record.run_dir import write_atomic
from sft_play.record.shapes import Proof, Split
from sft_play.report import numbers
from sft_play.report.figures import TIMES, learning, lengths, memory, sensors, speed
from sft_play.report.happened import happened
from sft_play.report.outcome import tiles
from sft_play.report.read import RunFacts, read_run
from sft_play.report.state import RunState
from sft_play.report.trained import environment, what_was_trained

REPORT = "report.html"
ANSWERS_SHOWN = 6
TEMPLATES = Path(__file__).parent / "templates"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


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
        proofs=proofs(run),
        answers=answers(run),
        happened=happened(run),
        reasons=run.plan.get("reasons") or [],
        environment=environment(run),
    )


def render(template: str, **values: Any) -> str:
    """A template of this folder with values; every text is redacted and escaped on its way into the page.

    Halves of characters, which no file holds as UTF-8, become question marks.
    """
    text: str = _environment().get_template(template).render(**values)
    return text.encode(errors="replace").decode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_presentable,
    )
    environment.filters |= {
        "moment": numbers.moment,
        "number": numbers.number,
        "gib": numbers.gib,
        "span": numbers.span,
    }
    return environment


def _presentable(value: Any) -> Any:
    """A text without secrets, and without the control characters that make a page binary to other programs."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", redacted(value))


def error_lines(run: RunFacts) -> list[str]:
    """Why the run stopped or failed, or what is shown without."""
    if run.damaged:
        return [f"left out, as the file is damaged: {line}" for line in run.damaged]
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
    names = sorted(facts, key=lambda name: order.get(name, 3))
    return [{**dict.fromkeys(Split.model_fields), **(facts[name] or {}), "name": name} for name in names]


def proofs(run: RunFacts) -> list[dict[str, Any]]:
    """What was proved on the rows."""
    facts = (run.data.get("tokens") or {}).get("facts") or {}
    return [{**dict.fromkeys(Proof.model_fields), **one} for one in facts.get("proofs") or []]


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
