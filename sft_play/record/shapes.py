"""The shapes of the files that a run keeps of itself, and reading them by it.

A file may be torn, or have been edited by hand: what only shows a run leaves out what does not fit and says so, what
acts on it refuses the file.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sft_play.errors import DataError
from sft_play.plan.build import Plan

Figures = dict[str, float | None]
# Kinds of errors that are none in a file of an older or newer version.
_OF_OTHER_VERSIONS = ("missing", "unexpected_keyword_argument")
SHOWN_CHARACTERS = 40


class Shape(BaseModel):
    """An object of JSON. Every key may be missing or null, and others be there."""

    model_config = ConfigDict(extra="allow", strict=True)


class Source(Shape):
    """A source of rows, as the config has it."""

    path: str | None = None
    revision: str | None = None


class Lora(Shape):
    """`tuning.lora`."""

    r: int | None = None
    alpha: float | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None


class Tuning(Shape):
    """`tuning`."""

    mode: str | None = None
    lora: Lora | None = None


class Model(Shape):
    """`model`."""

    name: str | None = None
    revision: str | None = None


class Data(Shape):
    """`data`."""

    train: str | list[str | Source] | None = None


class Settings(Shape):
    """The config, as far as it is shown by name."""

    model: Model | None = None
    tuning: Tuning | None = None
    data: Data | None = None
    train: dict[str, Any] | None = None
    dist: dict[str, Any] | None = None
    run: dict[str, Any] | None = None


class Stamp(Shape):
    """What made a run."""

    sft_play: str | None = None
    mode: str | None = None
    base_identity: str | None = None
    data_fingerprint: str | None = None
    python: str | None = None
    versions: dict[str, str | None] | None = None
    settings: dict[str, Any] | None = None
    forced: list[str] | None = None


class Told(Shape):
    """run.json: what the worker was told."""

    run: str | None = None
    node: int | None = None
    config: Settings | None = None
    plan: Plan | None = None
    stamp: Stamp | None = None
    model_path: str | None = None
    splits: dict[str, str] | None = None
    longest_first: bool | None = None
    resume_from: str | None = None


class Change(Shape):
    """An amendment."""

    step: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    reason: str | None = None


class Evaluation(Shape):
    """How the run was evaluated."""

    reason: str | None = None
    fallback_step: int | None = None
    metrics: dict[str, Any] | None = None


class Record(Shape):
    """record.json: what a run came to."""

    outcome: str | None = None
    error: list[str] | None = None
    result: str | None = None
    train_loss: float | None = None
    eval_loss: float | None = None
    eval_loss_before: float | None = None
    steps: int | None = None
    best_step: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    trainable_parameters: int | None = None
    parameters: int | None = None
    spikes: dict[str, int] | None = None
    amendments: list[Change] | None = None
    predicted: Figures | None = None
    measured: Figures | None = None
    summary: Figures | None = None
    device_names: list[str] | None = None
    bottleneck: str | None = None
    evaluation: Evaluation | None = None
    stamp: Stamp | None = None


class Proof(Shape):
    """Something that was proved of the rows."""

    name: str | None = None
    holds: int | None = None
    of: int | None = None
    words: str | None = None


class Split(Shape):
    """Counts of a split."""

    rows_read: int | None = None
    rows_kept: int | None = None
    tokens: int | None = None
    loss_tokens: int | None = None
    longest: int | None = None
    truncated: int | None = None
    dropped: dict[str, int] | None = None
    histogram: list[tuple[int, int]] | None = None


class Facts(Shape):
    """What preparation found."""

    splits: dict[str, Split] | None = None
    proofs: list[Proof] | None = None


class Tokens(Shape):
    """What tokenising found."""

    facts: Facts | None = None
    histogram: list[tuple[int, int]] | None = None


class DataReport(Shape):
    """data/report.json."""

    tokens: Tokens | None = None


class Event(Shape):
    """A line of metrics.jsonl; figures have any name."""

    event: str | None = None
    step: int | None = None
    time: float | None = None
    devices: list[str] | None = None
    bytes: Figures | None = None


class Answer(Shape):
    """A line of eval/step-N.jsonl."""

    row: int | None = None
    prompt: str | None = None
    reference: str | None = None
    prediction: str | None = None
    rougeL: float | None = None


def read_fitting(path: Path, shape: type[Shape]) -> tuple[dict[str, Any], list[str]]:
    """The object in a file without what does not fit, and what that is, a line each; empty where there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError) as error:
        return {}, [f"{path.name}: it cannot be read ({type(error).__name__})"]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}, [f"{path.name}: it is no JSON"]
    if not isinstance(value, dict):
        return {}, [f"{path.name}: it holds no object"]
    return fitting(value, shape, path.name)


def fitting(value: dict[str, Any], shape: type[Shape], name: str) -> tuple[dict[str, Any], list[str]]:
    """The value without what does not fit its shape, changed in place, and a line for each such thing.

    Args:
        name: of the file, for those lines.
    """
    with contextlib.suppress(ValidationError):
        shape.model_validate(value)
        return value, []
    try:  # as JSON: there a list is a tuple's form too; half a character, as a file's name may have, is a character
        shape.model_validate_json(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except ValidationError as error:
        places = [one["loc"] for one in error.errors() if one["type"] not in _OF_OTHER_VERSIONS]
    else:
        return value, []
    ways = dict.fromkeys(_way(value, place) for place in places)
    outermost = [way for way in ways if way and not any(way[:n] in ways for n in range(1, len(way)))]
    lines = [f"{name}: {'.'.join(map(str, way))} cannot be {_shown(_at(value, way))}" for way in outermost]
    for way in reversed(outermost):
        del _at(value, way[:-1])[way[-1]]
    return value, lines


def _way(value: Any, place: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The keys and numbers of a validator's place: where several forms are allowed, it names the form too."""
    way: list[int | str] = []
    for part in place:
        inside = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if inside:
            way.append(part)
            value = value[part]
    return tuple(way)


def _at(value: Any, way: Sequence[int | str]) -> Any:
    for part in way:
        value = value[part]
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def refuse_misfits(path: Path, wrong: list[str], fix: str) -> None:
    """Refuse a file that was not read as a whole.

    Raises:
        DataError: with the first thing that does not fit.
    """
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        what = f"the file is damaged: {wrong[0].removeprefix(f'{path.name}: ')}{more}"
        raise DataError(what, where=str(path), fix=fix)
