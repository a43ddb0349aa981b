"""Finished models that a merge wrote: told by their manifest, so that nothing else is ever replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sft_play.errors import ModelError
from sft_play.record.digests import sha256
from sft_play.record.manifest import NAME

MERGED = "merged"
"""Key of a manifest that a merge wrote."""


def noted(folder: Path, key: str) -> dict[str, Any]:
    """What a folder's manifest holds under `key`; empty where there is no manifest, or no such object in it."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8")).get(key)
    except (OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def merged_about(folder: Path) -> dict[str, Any]:
    """What a merge noted of its result; empty for anything else."""
    return noted(folder, MERGED)


def is_ours(folder: Path) -> bool:
    """Whether this program wrote a folder: its manifest lists digests, as no other program's of that name does."""
    files = noted(folder, "files").values()
    return bool(files) and all(isinstance(one, dict) and "sha256" in one for one in files)


def is_merged_from(folder: Path, weights: Path) -> bool:
    """Whether a folder is what a merge of the adapter in the file `weights` has written."""
    return (about := merged_about(folder)) != {} and about.get("adapter") == sha256(weights)


def refuse_overlap(output: Path, *sources: Path) -> None:
    """What is read must not be replaced by what is written, nor hold it.

    Raises:
        ModelError: the output is one of the sources, or one lies within the other.
    """
    place = output.resolve()
    for source in (source.resolve() for source in sources):
        if place.is_relative_to(source) or source.is_relative_to(place):
            what = f"the result would lie in {source}, which it is made from"
            raise ModelError(what, where=str(output), fix="choose another place: ARGS='--output folder'")


def refuse_output(output: Path, *, force: bool) -> None:
    """Nothing is replaced but what a merge wrote; under `--force` also other results of this program.

    Raises:
        ModelError: something else is there.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    ours = is_ours(output)
    if merged_about(output) or (ours and force):
        return
    what = "a result of a training is there" if ours else "something is there that no merge has written"
    raise ModelError(what, where=str(output), fix="choose another place: ARGS='--output folder'")
