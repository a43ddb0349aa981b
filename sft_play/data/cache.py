"""The token cache: one folder a preparation, named by the hash of all that goes in.

A folder is written under another name, its manifest last, and then renamed, so an entry is whole or not there.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from sft_play.config.schema import Config
from sft_play.data.sources import SourceFiles
from sft_play.data.template import read_template_source
from sft_play.errors import DiskFullError, EnvironmentProblem, SftPlayError
from sft_play.facts.data import DataFacts

CODE_VERSION = 3
"""Raised with every change that makes other tokens or labels of the same rows."""
MANIFEST = "manifest.json"
_MARKER = ".sft-play-token-cache"
_STALE_SECONDS = 24 * 3600
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_READ_BYTES = 1 << 20
_SETTINGS = (
    "task", "format", "columns", "loss_on", "on_bad_row", "on_overlong", "cross_documents", "max_rows", "packing",
)  # fmt: skip

Parts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A finished preparation on disk."""

    folder: Path
    facts: DataFacts

    @property
    def splits(self) -> dict[str, Path]:
        """The Arrow file of each split."""
        return {name: self.folder / f"{name}.arrow" for name in self.facts.splits}

    @property
    def rejects(self) -> Path | None:
        """The rejected rows, where there are any."""
        file = self.folder / "rejects.jsonl"
        return file if file.is_file() else None


def key_parts(config: Config, sources: Mapping[str, tuple[SourceFiles, ...]], tokenizer_dir: Path) -> Parts:
    """All that decides which tokens come out, by the name a user knows it under; file contents as hashes, no paths.

    Raises:
        EnvironmentProblem: a file cannot be read.
    """
    data = config.data
    parts: Parts = {f"data.{name}": _source_parts(files) for name, files in sources.items()}
    parts |= {f"the tokenizer's {name}": _file_hash(tokenizer_dir / name) for name in _TOKENIZER_FILES}
    template = read_template_source(tokenizer_dir, config.model.chat_template)
    parts["the chat template"] = None if template is None else sha256(template[0].encode()).hexdigest()
    parts["model.max_seq_len"] = config.model.max_seq_len
    for name in _SETTINGS:
        parts[f"data.{name}"] = getattr(data, name)
    parts["data.split"] = data.split.model_dump()
    limits = [data.max_rows, data.split.validation, data.split.test]
    limits += [source.max_rows for files in sources.values() for source in files]
    weights = [source.weight for source in sources.get("train", ())]
    parts["train.seed"] = config.train.seed if any(limits) or any(weights) or data.packing else None
    parts["this program"] = [CODE_VERSION, tokenizers.__version__, jinja2.__version__]
    return parts


def key_of(parts: Parts) -> str:
    """The name of a preparation with these parts."""
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_entry(cache_dir: Path, key: str) -> Entry | None:
    """The finished entry of this name; None where there is none, or it is damaged."""
    folder = cache_dir / key[:32]
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        facts = DataFacts.from_json(manifest["facts"])
        sizes = manifest["bytes"]
        whole = manifest["key"] == key and all((folder / name).stat().st_size == sizes[name] for name in sizes)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Entry(folder=folder, facts=facts) if whole else None


def reason_of_miss(cache_dir: Path, key: str, parts: Parts) -> str:
    """Why there is no entry: what differs from the entry that is most like it."""
    if (cache_dir / key[:32]).exists():
        return "the entry is damaged"
    now: Parts = json.loads(json.dumps(parts))
    differences = sorted((_differences(before, now) for before in _earlier_parts(cache_dir)), key=len)
    if not differences:
        return "nothing is prepared yet"
    return ", ".join(differences[0]) or "other data"


def _differences(before: Parts, now: Parts) -> list[str]:
    return [_difference(name, before.get(name), now.get(name)) for name in now if before.get(name) != now[name]]


def _difference(name: str, before: object, now: object) -> str:
    short = all(isinstance(value, str | int | None) and len(str(value)) < 40 for value in (before, now))
    return f"{name} {before} -> {now}" if short else f"{name} changed"


def _earlier_parts(cache_dir: Path) -> Iterator[Parts]:
    for file in sorted(cache_dir.glob(f"*/{MANIFEST}")):
        try:
            parts = json.loads(file.read_text(encoding="utf-8"))["parts"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(parts, dict):
            yield parts


@contextmanager
def new_entry(cache_dir: Path) -> Iterator[Path]:
    """A folder to write an entry into; dropped on leaving where `finish_entry` has not renamed it.

    Raises:
        EnvironmentProblem: the cache folder cannot be written.
        DiskFullError: the disk ran full.
    """
    folder = cache_dir / f"new-{os.getpid()}-{time.time_ns()}"
    try:
        _drop_stale(cache_dir)
        folder.mkdir(parents=True)
        (folder / _MARKER).touch()
        yield folder
    except OSError as error:
        raise _cannot_write(cache_dir, error) from error
    finally:
        _drop(folder)


def finish_entry(folder: Path, cache_dir: Path, key: str, parts: Parts, facts: DataFacts) -> Entry:
    """Write the manifest and give the folder its name; where another process was first, its entry is used."""
    files = [file for file in sorted(folder.iterdir()) if file.name != _MARKER]
    for file in files:
        _sync(file)
    sizes = {file.name: file.stat().st_size for file in files}
    manifest = {"key": key, "parts": parts, "bytes": sizes, "facts": facts.to_json()}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _sync(folder / MANIFEST)
    target = cache_dir / key[:32]
    if target.exists() and (entry := read_entry(cache_dir, key)):
        return entry
    _set_aside(target)
    try:
        folder.rename(target)
    except OSError:
        if entry := read_entry(cache_dir, key):
            return entry
        raise
    return Entry(folder=target, facts=facts)


def _set_aside(target: Path) -> None:
    """Move a damaged entry out of the way; dropped if it is ours, else it stays under another name."""
    if target.exists():
        aside = target.with_name(f"damaged-{os.getpid()}-{time.time_ns()}")
        target.rename(aside)
        _drop(aside)


def _drop_stale(cache_dir: Path) -> None:
    """Remove what processes that were killed left behind a day ago or more."""
    for folder in cache_dir.glob("new-*"):
        if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
            _drop(folder)


def _drop(folder: Path) -> None:
    if (folder / _MARKER).exists():
        shutil.rmtree(folder, ignore_errors=True)


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _cannot_write(cache_dir: Path, error: OSError) -> SftPlayError:
    if error.errno == 28:
        return DiskFullError("the disk is full", where=str(cache_dir))
    fix = "make the folder writable, or set run.output_dir"
    return EnvironmentProblem(
        f"the token cache cannot be written: {error.strerror or error}", where=str(cache_dir), fix=fix
    )


def _source_parts(sources: tuple[SourceFiles, ...]) -> list[Any]:
    return [
        [
            source.max_rows,
            source.weight,
            [[file.kind, file.compression, file.format, _file_hash(file.path)] for file in source.files],
        ]
        for source in sources
    ]


def _file_hash(file: Path) -> str | None:
    """sha256 of a file's content; None where there is no such file."""
    digest = sha256()
    try:
        with file.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
    except FileNotFoundError:
        return None
    except OSError as error:
        fix = "check that you may read it"
        raise EnvironmentProblem(f"cannot be read: {error.strerror or error}", where=str(file), fix=fix) from error
    return digest.hexdigest()
