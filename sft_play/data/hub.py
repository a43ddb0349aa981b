"""Data sets of the hub: `owner/name`, `owner/name:split` and `owner/name:subset/split`, fetched or found in its cache.

Which files are a split's is read off their names, as the hub does: `train.jsonl`, `data/train-00000-of-00002.parquet`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sft_play.errors import DataError, DiskFullError, EnvironmentProblem, SftPlayError
from sft_play.facts.locate import causes_of, hub_cache, is_full_disk

_NUMBERED = re.compile(r"-\d{5}-of-(\d{5})")
_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?::([\w.-]+(?:/[\w.-]+)?))?")
_ROWS = ("jsonl", "ndjson", "json", "csv", "tsv", "parquet")
_WANTED = [f"*.{kind}{packed}" for kind in _ROWS for packed in ("", ".gz", ".zst") if kind != "parquet" or not packed]
_NO_DATA = ["dataset_info.json", "*/dataset_info.json", "dataset_infos.json", "dataset_dict.json", "*/state.json"]
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
_ROW_SUFFIXES = tuple(pattern[1:] for pattern in _WANTED)
_FILE_SUFFIXES = (*_ROW_SUFFIXES, ".txt", ".md", ".docx", ".pdf", ".gz", ".zst")


@dataclass(frozen=True, kw_only=True)
class HubSplit:
    """One split of a data set of the hub, on this disk.

    Attributes:
        commit: the revision that was read, whole.
        files: paths below `folder`, in sorted order.
    """

    name: str
    commit: str
    folder: Path
    files: tuple[str, ...]


def is_hub_id(name: str) -> bool:
    """Whether a name that is no file here may be one of the hub."""
    return _ID.fullmatch(name) is not None and not name.lower().endswith(_FILE_SUFFIXES)


def is_cached(name: str) -> bool:
    """Whether the hub's cache has something of a data set, by the cache's own layout; the hub is not asked."""
    matched = _ID.fullmatch(name)
    return matched is not None and any(hub_cache().glob(f"datasets--{matched[1].replace('/', '--')}/snapshots/*"))


def fetch_dataset(name: str, *, key: str, revision: str | None = None, fetch: bool = True) -> HubSplit:
    """The files of a split, downloaded where they are not in the hub's cache.

    Args:
        name: `owner/name`, with `:split` or `:subset/split` where another than the key's is meant.
        key: `data.train`, `data.validation` or `data.test`: whose split is taken where the name has none.
        revision: branch, tag or commit; None for the default branch as it is now.
        fetch: False: look into the cache only.

    Raises:
        DataError: the data set has no such revision or split, or several sets of files for it.
        EnvironmentProblem: it is neither cached nor reachable, or one may not read it; `DiskFullError`.
    """
    matched = _ID.fullmatch(name)
    if matched is None:
        raise DataError(f"{name} is no hub id (owner/name)", where=key)
    owner_name, split = matched.group(1), matched.group(2) or ""
    folder = _download(owner_name, revision, key, fetch)
    there = sorted(str(file.relative_to(folder).as_posix()) for file in folder.rglob("*") if file.is_file())
    rows = [file for file in there if file.lower().endswith(_ROW_SUFFIXES)]
    files = choose_files(owner_name, rows, split, key)
    return HubSplit(name=owner_name, commit=folder.name, folder=folder, files=tuple(files))


def choose_files(name: str, files: Sequence[str], split: str, key: str) -> list[str]:
    """The files of a split among those of a data set.

    Args:
        split: as the user names it, with its subset where the data set has several; empty: the key's.

    Raises:
        DataError: none is, or it is not clear which are.
    """
    if not files:
        fix = "download it and name files that can be read"
        raise DataError(f"{name} has no file of rows ({', '.join(_ROWS)})", where=key, fix=fix)
    subset, _, wanted = split.rpartition("/")
    if subset:
        files = [file for file in files if subset in PurePosixPath(file).parts[:-1] or _named(file, subset)]
    found = [file for file in files if _named(file, wanted or key.rpartition(".")[2])]
    if not found and key == "data.train" and not split:
        found = [file for file in files if not _splits_of([file])]
    if not found:
        there = ", ".join(_splits_of(files)) or "none told by file names"
        fix = f"name one as {name}:split, or download the files and name them"
        what = f"{name} has no files of the split {split or key.rpartition('.')[2]}; its splits: {there}"
        raise DataError(what, where=key, fix=fix)
    _check_one_set(name, found, key)
    return found


def _check_one_set(name: str, files: Sequence[str], key: str) -> None:
    """Refuse files that look like the same rows twice, like several data sets, or like a part of one."""
    folders = sorted({str(PurePosixPath(file).parent) for file in files})
    if len(folders) > 1:
        subset = PurePosixPath(folders[-1]).name
        fix = f"name one as {name}:{subset}/split, or list several under the key"
        raise DataError(f"{name} has this split in several folders: {', '.join(folders)}", where=key, fix=fix)
    kinds = sorted({next(end for end in _ROW_SUFFIXES if file.lower().endswith(end)) for file in files})
    if len(kinds) > 1:
        fix = "they may be the same rows twice: download the files and name those you want"
        raise DataError(f"{name} has this split in several kinds of file: {', '.join(kinds)}", where=key, fix=fix)
    numbered = Counter(_NUMBERED.sub(r"-*-of-\1", file) for file in files if _NUMBERED.search(file))
    for pattern, here in numbered.items():
        there = int(pattern.partition("-*-of-")[2][:5])
        if here != there:
            what = f"{here} of the {there} files of {pattern} {'is' if here == 1 else 'are'} here"
            raise DataError(f"{name} is not whole: {what}", where=key, fix="fetch it again with the hub in reach")


def _named(file: str, split: str) -> bool:
    """Whether a file's path has the split's name as a word."""
    words = _SPLITS.get(split, (split.lower(),))
    path = file.lower()
    return any(re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", path) for word in words)


def _splits_of(files: Sequence[str]) -> list[str]:
    return [split for split in _SPLITS if any(_named(file, split) for file in files)]


def _download(name: str, revision: str | None, key: str, fetch: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    try:
        folder = snapshot_download(
            name,
            repo_type="dataset",
            revision=revision,
            allow_patterns=_WANTED,
            ignore_patterns=_NO_DATA,
            local_files_only=not fetch,
        )
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        raise _explained(name, revision, key, error, fetch) from error
    return Path(folder)


def _explained(name: str, revision: str | None, key: str, error: Exception, fetch: bool) -> SftPlayError:
    """Why a download failed. The hub wraps what it met first, so the whole chain of causes is looked at."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    chain = list(causes_of(error))
    local = f"or download it elsewhere and give {key} the folder"
    if any(is_full_disk(one) for one in chain):
        fix = "free space, or point HF_HOME to another disk"
        return DiskFullError(f"the disk filled up while fetching {name}", where=key, fix=fix)
    if isinstance(error, HFValidationError):
        return DataError(f"{name} is no hub id (owner/name)", where=key)
    for one in chain:
        if isinstance(one, GatedRepoError):
            fix = "accept its terms on its page, then set HF_TOKEN"
            return EnvironmentProblem(f"{name} is gated", where=key, fix=fix)
        if isinstance(one, RevisionNotFoundError):
            what = f"{name} has no revision {revision or 'main'}"
            return DataError(what, where=key, fix="give a branch, tag or commit of that data set")
        if isinstance(one, RepositoryNotFoundError):
            what = f"{name} is no file or folder here, and the hub has no data set of that name that you may read"
            return EnvironmentProblem(what, where=key, fix="check the spelling; a private one needs an HF_TOKEN")
        if isinstance(one, HfHubHTTPError):
            return EnvironmentProblem(_refused(name, one.response.status_code), where=key, fix=f"try later, {local}")
        if isinstance(one, OfflineModeIsEnabled):
            what = f"{name} is not whole on this disk and HF_HUB_OFFLINE is set"
            return EnvironmentProblem(what, where=key, fix=f"unset HF_HUB_OFFLINE, {local}")
    if any(isinstance(one, PermissionError) for one in chain):
        what = f"the hub's cache cannot be written ({error})"
        return EnvironmentProblem(what, where=key, fix="set HF_HOME to a folder of yours")
    if not fetch:
        fix = "start the training, or hf download --repo-type dataset, which fetches it"
        return EnvironmentProblem(f"the data set {name} is not on this disk yet", where=key, fix=fix)
    what = f"{name} is no file or folder here, not whole in the hub's cache, and the hub cannot be reached"
    return EnvironmentProblem(what, where=key, fix=f"check the path and the network, {local}")


def _refused(name: str, status: int) -> str:
    reasons = {
        401: "the hub does not know your HF_TOKEN",
        403: f"the hub forbids you to read {name}",
        429: f"the hub has had too many requests (429) to send {name}",
    }
    return reasons.get(status, f"the hub failed ({status}) while sending {name}")
