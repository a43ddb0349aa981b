"""Several runs on one page: what they were told differently, what came out, and their curves over each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sft_play.config.values import show
from sft_play.record.run_dir import write_atomic
from sft_play.record.stamp import flat
from sft_play.report import numbers
from sft_play.report.curves import Curve, points_of
from sft_play.report.figures import Figure, lines
from sft_play.report.numbers import NOTHING
from sft_play.report.page import render
from sft_play.report.read import RunFacts, read_run

# Longer names of files than this are not taken everywhere.
NAME_CHARACTERS = 120
# A curve among several is thin enough to be read beside its neighbours when it is smooth.
CURVES = (
    ("train", "loss", "Training loss", "", False),
    ("eval", "eval_loss", "Held-out loss", "", False),
    ("eval", "eval_token_accuracy", "Token accuracy", "share", False),
    ("eval", "eval_rougeL", "ROUGE-L", "share", True),
    ("train", "learning_rate", "Learning rate", "", True),
    ("train", "grad_norm", "Gradient norm", "", True),
    ("train", "tokens_per_second", "Throughput", "tokens/s", True),
    ("train", "step_seconds", "Time of a step", "seconds", True),
    ("train", "memory_device_gib_gpu_0", "Memory in use, first device", "GiB", True),
)
RESULTS: tuple[tuple[str, Callable[[RunFacts], Any]], ...] = (
    ("state", lambda run: str(run.state)),
    ("held-out loss", lambda run: _four(run.record.get("eval_loss"))),
    ("before", lambda run: _four(run.record.get("eval_loss_before"))),
    ("training loss", lambda run: _four(run.record.get("train_loss"))),
    ("steps", lambda run: numbers.number(run.record.get("steps"))),
    ("time", lambda run: numbers.span(run.record.get("seconds"))),
    ("tokens/s", lambda run: numbers.number(run.record.get("tokens_per_second"))),
    ("memory", lambda run: numbers.gib((run.record.get("measured") or {}).get("device_bytes")
                                       or (run.record.get("measured") or {}).get("memory_bytes"))),
    ("trained parameters", lambda run: numbers.number(run.record.get("trainable_parameters"))),
)  # fmt: skip
# Where a run lies is no difference of what it does.
NOT_COMPARED = ("run.name", "run.output_dir", "run.tensorboard_port")


def write_comparison(folders: Sequence[Path]) -> Path:
    """Write the page beside the first run.

    Raises:
        OSError: it cannot be written.
    """
    runs = [read_run(folder) for folder in folders]
    names = "-".join(run.name for run in runs)
    if len(names) > NAME_CHARACTERS:
        names = f"{names[:NAME_CHARACTERS]}-{hashlib.sha256(names.encode()).hexdigest()[:8]}"
    path = folders[0].parent / f"compare-{names}.html"
    write_atomic(path, render_comparison(runs))
    return path


def render_comparison(runs: Sequence[RunFacts]) -> str:
    """The page as text."""
    names = names_of(runs)
    return render(
        "compare.html.jinja",
        title=f"Comparison of {', '.join(names)}",
        names=names,
        different=differences(runs),
        results=[(name, *(show(run) for run in runs)) for name, show in RESULTS],
        figures_=list(figures_of(runs, names)),
    )


def names_of(runs: Sequence[RunFacts]) -> list[str]:
    """The folders' names; their paths where two are called alike."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def differences(runs: Sequence[RunFacts]) -> list[tuple[str, ...]]:
    """(key, value of each run) of every setting, and part of plan and stamp, that they do not share."""
    told = [_compared(run) for run in runs]
    keys = dict.fromkeys(key for one in told for key in one)
    rows = [(key, *(_shown(one.get(key)) for one in told)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _compared(run: RunFacts) -> dict[str, Any]:
    settings = {key: value for key, value in flat(run.config).items() if key not in NOT_COMPARED}
    plan = ("strategy", "world_size", "device_name", "micro_batch", "grad_accum", "global_batch", "dtype", "autocast")
    stamp = ("sft_play", "base_identity", "data_fingerprint")
    versions = {f"version of {name}": value for name, value in (run.stamp.get("versions") or {}).items()}
    planned = {f"plan: {key}": run.plan.get(key) for key in plan}
    return {**settings, **planned, **{f"stamp: {key}": run.stamp.get(key) for key in stamp}, **versions}


def figures_of(runs: Sequence[RunFacts], names: Sequence[str]) -> Iterator[Figure]:
    """One chart a figure, one line a run."""
    for number, (kind, key, title, unit, from_zero) in enumerate(CURVES):
        curves = [Curve(name=name, points=points_of(run.of(kind), key)) for run, name in zip(runs, names, strict=True)]
        # A run without the figure keeps its colour: the others' do not shift.
        if any(len(one.points) > 1 for one in curves):
            yield from lines(f"chart-{number}", title, curves, unit=unit, from_zero=from_zero)


def _shown(value: Any) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, str) and len(value) == 64:  # a fingerprint
        return value[:12]
    return show(value)


def _four(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"
