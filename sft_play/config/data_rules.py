"""Rules of the `data` section."""

from __future__ import annotations

from collections.abc import Iterator

from sft_play.config.findings import Finding, Rule, ignored, needs, said
from sft_play.config.origin import Resolved
from sft_play.config.schema import DataSource, Sources


def split_used(resolved: Resolved) -> Iterator[Finding]:
    data = resolved.config.data
    if data.split.validation + data.split.test >= 1:
        what = "data.split.validation and data.split.test leave no rows to train on"
        yield Finding(keys=("data.split.validation", "data.split.test"), what=what, fix="their sum must be below 1")
    for name in ("validation", "test"):
        if getattr(data, name):
            fix = f"remove data.split.{name} or data.{name}"
            yield from ignored(resolved, [f"data.split.{name}"], by=f"data.{name}", fix=fix)


def has_training_data(resolved: Resolved) -> Iterator[Finding]:
    for key in ("model.name", "data.train", "data.validation", "data.test"):
        value = resolved.value(key)
        if value is not None and (not value or (isinstance(value, str) and not value.strip())):
            yield Finding(keys=(key,), what=f"{key} is empty", fix="give it a path or hub id")


def weights_of_all_or_none(resolved: Resolved) -> Iterator[Finding]:
    """A share of a mix means something beside other shares only."""
    data = resolved.config.data
    given = _weights(data.train)
    if any(weight is not None for weight in given) and None in given:
        what = "some sources of data.train have a weight and some have none"
        yield Finding(keys=("data.train",), what=what, fix="give every source a weight, or none")
    for name in ("validation", "test"):
        if any(weight is not None for weight in _weights(getattr(data, name))):
            what = f"data.{name} has a weight: held-out rows are all taken, each once"
            yield Finding(keys=(f"data.{name}",), what=what, fix="remove the weights; max_rows limits a source")


def _weights(sources: Sources | None) -> list[float | None]:
    if sources is None or isinstance(sources, str):
        return []
    return [one.weight if isinstance(one, DataSource) else None for one in sources]


def texts_of_cpt(resolved: Resolved) -> Iterator[Finding]:
    data, by = resolved.config.data, "data.task"
    if data.task == "cpt":
        fix = "set data.task: cpt_mixed or remove it"
        yield from ignored(resolved, ["data.loss_on"], by=by, fix=fix, always=True)
        if data.format not in ("auto", "text"):
            what = f"{said(resolved, 'data.format')} with data.task: cpt, which learns texts"
            yield Finding(keys=("data.format", by), what=what, fix="set data.task: sft or cpt_mixed")
    if data.task == "sft":
        fix = "set data.task: cpt or remove it"
        yield from ignored(resolved, ["data.cross_documents"], by=by, fix=fix)
    elif data.cross_documents:
        fix = "remove one of them: blocks that run on across documents have no row that is too long"
        if data.task == "cpt":
            yield from ignored(resolved, ["data.on_overlong"], by="data.cross_documents", fix=fix)


def endless_streams(resolved: Resolved) -> Iterator[Finding]:
    """A stream has no length, is read by one process, and cannot be drawn from."""
    if not resolved.config.data.streaming:
        return
    by = "data.streaming"
    if resolved.config.train.max_steps is None:
        fix = "set train.max_steps: an endless stream has no epochs"
        yield needs(resolved, by, "train.max_steps", "train.max_steps", fix=fix)
    for key in ("data.split.validation", "data.split.test"):
        yield from ignored(resolved, [key], by=by, fix=f"give a file: data.{key.rpartition('.')[2]}")
    fix = "remove it; train.max_steps ends the run, and max_rows of a source takes its first rows"
    yield from ignored(resolved, ["data.max_rows"], by=by, fix=fix)
    if resolved.config.train.dataloader_num_workers > 1:
        what = f"{said(resolved, 'train.dataloader_num_workers')}: one worker reads a stream ahead of training"
        yield Finding(keys=("train.dataloader_num_workers", by), what=what, fix="remove it")


DATA_RULES: tuple[Rule, ...] = (split_used, has_training_data, weights_of_all_or_none, texts_of_cpt, endless_streams)
