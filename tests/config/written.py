"""The config that the tests here begin with, and the types of their fixtures."""

from __future__ import annotations

from collections.abc import Callable

from sft_play.config.origin import Resolved

BASE = "model: {name: some/model}\ndata: {train: a.jsonl, validation: b.jsonl}\n"
"""The first two lines of a config that needs nothing more."""

ResolveText = Callable[..., Resolved]
ErrorLines = Callable[..., list[str]]
