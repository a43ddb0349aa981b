"""From what the config names (files, folders, globs) to the list of files that are read, in a fixed order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sft_play.config.schema import DataFormat, DataSource, Sources
from sft_play.errors import DataError


class FileKind(StrEnum):
    """How a file's bytes are read."""

    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


SUFFIXES = {
    ".jsonl": FileKind.JSONL,
    ".ndjson": FileKind.JSONL,
    ".json": FileKind.JSON,
    ".csv": FileKind.CSV,
    ".parquet": FileKind.PARQUET,
}
_READABLE = ".jsonl, .json, .csv or .parquet, the first three also with .gz"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file to read.

    Attributes:
        shown: the path as the user would write it, for messages.
        format: the format the config gives, or `auto`.
        source: number of the source it came from, for limits that hold for a source as a whole.
    """

    path: Path
    shown: str
    kind: FileKind
    gzipped: bool
    format: DataFormat
    source: int


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """One source of the config with its files in reading order.

    Attributes:
        path: as the config names it.
        weight: its share of the mix relative to the others'; None where sources are put one after the other.
    """

    files: tuple[DataFile, ...]
    max_rows: int | None
    path: str
    weight: float | None


def resolve_sources(sources: Sources, *, key: str, default_format: DataFormat) -> tuple[SourceFiles, ...]:
    """The files of every source, folders and globs in sorted order.

    Args:
        key: the config key the sources stand under, named in errors.
        default_format: format of sources that give none of their own.

    Raises:
        DataError: nothing is there, or nothing readable.
    """
    listed = [_as_source(one) for one in ((sources,) if isinstance(sources, str) else sources)]
    if not listed:
        raise DataError("the list is empty", where=key, fix="name at least one file")
    return tuple(_resolve_one(one, number, key, default_format) for number, one in enumerate(listed))


def _as_source(source: str | DataSource) -> DataSource:
    return DataSource(path=source) if isinstance(source, str) else source


def _resolve_one(source: DataSource, number: int, key: str, default_format: DataFormat) -> SourceFiles:
    data_format = default_format if source.format == "auto" else source.format
    files = []
    for path in _paths(source.path, key):
        kind, gzipped = _kind_of(path, key)
        files.append(
            DataFile(path=path, shown=str(path), kind=kind, gzipped=gzipped, format=data_format, source=number)
        )
    return SourceFiles(files=tuple(files), max_rows=source.max_rows, path=source.path, weight=source.weight)


def _paths(name: str, key: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if _is_visible_data(p, path))
        if not found:
            raise DataError(f"no data file in the folder {name}", where=key, fix=f"put {_READABLE} files there")
        return found
    if path.exists():
        return [path]
    if any(sign in name for sign in "*?["):
        found = _matching(path)
        if not found:
            raise DataError(f"no file matches {name}", where=key, fix="quote the pattern and check it with ls")
        return found
    raise _missing(name, path, key)


def _matching(pattern: Path) -> list[Path]:
    root = Path(pattern.anchor)
    return sorted(path for path in root.glob(str(pattern.relative_to(root))) if path.is_file())


def _is_visible_data(path: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return not hidden and path.is_file() and _suffix(path)[0] in SUFFIXES


def _missing(name: str, path: Path, key: str) -> DataError:
    if _HUB_ID.fullmatch(name) and _suffix(path)[0] not in SUFFIXES:
        fix = f"download it first (hf download --repo-type dataset {name} --local-dir data) and name its files"
        return DataError(
            f"{name} is no file or folder here, and hub ids are not available yet for data", where=key, fix=fix
        )
    return DataError(
        f"no such file or folder: {name}", where=key, fix="check the path; it starts at the current folder"
    )


def _kind_of(path: Path, key: str) -> tuple[FileKind, bool]:
    suffix, gzipped = _suffix(path)
    kind = SUFFIXES.get(suffix)
    if kind is None or (gzipped and kind is FileKind.PARQUET):
        raise DataError(f"{path} is of no readable type", where=key, fix=f"give {_READABLE}")
    return kind, gzipped


def _suffix(path: Path) -> tuple[str, bool]:
    name = path.name.lower()
    gzipped = name.endswith(".gz")
    return Path(name.removesuffix(".gz")).suffix, gzipped
