"""From what the config names (files, folders, globs) to the list of files that are read, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath

from sft_play.config.schema import Config, DataFormat, DataSource, Sources
from sft_play.data.hub import fetch_dataset, is_cached, is_hub_id
from sft_play.errors import DataError, SeveralErrors, SftPlayError


class FileKind(StrEnum):
    """How a file's bytes are read."""

    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    TSV = "tsv"
    PARQUET = "parquet"
    TEXT = "text"
    DOCX = "docx"
    PDF = "pdf"


class Compression(StrEnum):
    """How a file is packed; `NONE` is false."""

    NONE = ""
    GZIP = "gz"
    ZSTD = "zst"


ROW_SUFFIXES = {
    ".jsonl": FileKind.JSONL,
    ".ndjson": FileKind.JSONL,
    ".json": FileKind.JSON,
    ".csv": FileKind.CSV,
    ".tsv": FileKind.TSV,
    ".parquet": FileKind.PARQUET,
}
DOCUMENT_SUFFIXES = {
    ".txt": FileKind.TEXT,
    ".md": FileKind.TEXT,
    ".docx": FileKind.DOCX,
    ".pdf": FileKind.PDF,
}
SUFFIXES = ROW_SUFFIXES | DOCUMENT_SUFFIXES
_READABLE = ".jsonl, .json, .csv, .tsv, .parquet, .txt, .md, .docx or .pdf, all but .parquet also with .gz or .zst"
# What lies beside data in a folder and is none: descriptions, and the notes of the datasets library.
_PROSE = ("readme", "license", "licence", "notice", "changelog", "contributing", "citation")
_BESIDE = {f"{name}{suffix}" for name in _PROSE for suffix in (".md", ".txt")} | {
    "requirements.txt",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
}


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file to read.

    Attributes:
        shown: the path as the user would write it, for messages.
        format: the format the config gives, or `auto`.
        compression: `gz`, `zst` or none.
        source: number of the source it came from, for limits that hold for a source as a whole.
    """

    path: Path
    shown: str
    kind: FileKind
    compression: Compression
    format: DataFormat
    source: int


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """One source of the config with its files in reading order.

    Attributes:
        path: as the config names it.
        weight: its share of the mix relative to the others'; None where sources are put one after the other.
        origin: of a hub id, the commit that was read, as `owner/name@commit`; to be said.
    """

    files: tuple[DataFile, ...]
    max_rows: int | None
    path: str
    weight: float | None
    origin: str = ""


def resolve_sources(
    sources: Sources, *, key: str, default_format: DataFormat, fetch: bool = True
) -> tuple[SourceFiles, ...]:
    """The files of every source, folders and globs in sorted order.

    Args:
        key: the config key the sources stand under, named in errors; it also tells which split of a hub id is meant.
        default_format: format of sources that give none of their own.
        fetch: whether a hub id that is not on this disk is downloaded.

    Raises:
        DataError: nothing is there, or nothing readable.
        EnvironmentProblem: a hub id cannot be fetched.
    """
    listed = _listed(sources, key)
    return tuple(_resolve_one(one, number, key, default_format, fetch) for number, one in enumerate(listed))


def given_sources(config: Config) -> dict[str, Sources]:
    """What the config names for each split that it names files for."""
    data = config.data
    given = {"train": data.train, "validation": data.validation, "test": data.test}
    return {name: one for name, one in given.items() if one is not None}


def check_sources(config: Config) -> list[str]:
    """Look whether the data of a config are on this disk, without reading or fetching any.

    Returns:
        A line for each hub id that is not in the hub's cache.

    Raises:
        DataError: a file or folder is not there, or is none that can be read; `SeveralErrors` of several splits.
    """
    said: list[str] = []
    errors: list[SftPlayError] = []
    for name, sources in given_sources(config).items():
        try:
            said += _not_fetched(sources, f"data.{name}")
        except DataError as error:
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else SeveralErrors(errors)
    return said


def _not_fetched(sources: Sources, key: str) -> Iterator[str]:
    for source in _listed(sources, key):
        local = _local(source, key)
        for path in local:
            _kind_of(path, key)
        if local or is_cached(source.path):
            continue
        if not is_hub_id(source.path):
            raise _not_there(source.path, key)
        yield f"{key}: {source.path} is no file or folder here; a run fetches it from the hub"


def stamps_of(sources: Mapping[str, Sequence[SourceFiles]]) -> dict[str, list[tuple[int, ...]]]:
    """Size, time and identity of each file of each split: what another content leaves different.

    Raises:
        DataError: a file is gone.
    """
    stamps: dict[str, list[tuple[int, ...]]] = {}
    for name, listed in sources.items():
        try:
            found = [file.path.stat() for source in listed for file in source.files]
        except OSError as error:
            what = f"{error.filename} cannot be read: {error.strerror}"
            raise DataError(what, where=f"data.{name}", fix="start again when it is complete") from error
        stamps[name] = [(one.st_size, one.st_mtime_ns, one.st_ino) for one in found]
    return stamps


def _listed(sources: Sources, key: str) -> list[DataSource]:
    listed = [sources] if isinstance(sources, str) else sources
    if not listed:
        raise DataError("the list is empty", where=key, fix="name at least one file")
    return [DataSource(path=one) if isinstance(one, str) else one for one in listed]


def _not_there(path: str, key: str) -> DataError:
    fix = "check the path; it starts at the current folder"
    return DataError(f"no such file or folder: {path}", where=key, fix=fix)


def _resolve_one(source: DataSource, number: int, key: str, default_format: DataFormat, fetch: bool) -> SourceFiles:
    data_format = default_format if source.format == "auto" else source.format
    origin = ""
    if local := _local(source, key):
        named = [(path, str(path)) for path in local]
    elif is_hub_id(source.path):
        snapshot = fetch_dataset(source.path, key=key, revision=source.revision, fetch=fetch)
        origin = f"{snapshot.name}@{snapshot.commit}"
        named = [(snapshot.folder / file, f"{snapshot.name}/{file}") for file in snapshot.files]
    else:
        raise _not_there(source.path, key)
    files = []
    for path, shown in named:
        kind, compression = _kind_of(path, key)
        file = DataFile(path=path, shown=shown, kind=kind, compression=compression, format=data_format, source=number)
        files.append(file)
    return SourceFiles(
        files=tuple(files), max_rows=source.max_rows, path=source.path, weight=source.weight, origin=origin
    )


def _local(source: DataSource, key: str) -> list[Path]:
    """The files here that a source stands for; none where nothing here has its name."""
    found = _paths(source.path, key)
    if found and source.revision is not None:
        what = f"revision {source.revision} for {source.path}, which is here: a file or folder has none"
        raise DataError(what, where=key, fix="remove it, or give a hub id that is no folder here")
    return found


def _paths(name: str, key: str) -> list[Path]:
    """The files here that a name stands for; none where nothing here has it."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(path, name, key)
    if path.exists():
        return [path]
    if any(sign in name for sign in "*?["):
        found = _matching(path)
        if not found:
            raise DataError(f"no file matches {name}", where=key, fix="quote the pattern and check it with ls")
        return found
    return []


def _in_folder(folder: Path, name: str, key: str) -> list[Path]:
    """A folder's data files: rows, or documents where there are no rows."""
    found = sorted(path for path in folder.rglob("*") if _is_visible_data(path, folder))
    if not found:
        raise DataError(f"no data file in the folder {name}", where=key, fix=f"put {_READABLE} files there")
    documents = [path for path in found if suffix_of(path.name)[0] in DOCUMENT_SUFFIXES]
    if documents and len(documents) < len(found):
        other = documents[0].relative_to(folder)
        fix = f"name them by pattern, as {name.rstrip('/')}/**/*.jsonl"
        raise DataError(f"the folder {name} holds both rows and documents ({other})", where=key, fix=fix)
    return found


def _matching(pattern: Path) -> list[Path]:
    root = Path(pattern.anchor)
    return sorted(path for path in root.glob(str(pattern.relative_to(root))) if path.is_file())


def _is_visible_data(path: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return not hidden and path.is_file() and suffix_of(path.name)[0] in SUFFIXES and path.name.lower() not in _BESIDE


def _kind_of(path: Path, key: str) -> tuple[FileKind, Compression]:
    suffix, compression = suffix_of(path.name)
    kind = SUFFIXES.get(suffix)
    if kind is None or (compression and kind is FileKind.PARQUET):
        raise DataError(f"{path} is of no readable type", where=key, fix=f"give {_READABLE}")
    return kind, compression


def suffix_of(name: str) -> tuple[str, Compression]:
    """A file name's suffix in small letters without that of its packing, and its packing."""
    name = name.lower()
    for compression in (Compression.GZIP, Compression.ZSTD):
        if name.endswith(f".{compression}"):
            return PurePath(name.removesuffix(f".{compression}")).suffix, compression
    return PurePath(name).suffix, Compression.NONE
