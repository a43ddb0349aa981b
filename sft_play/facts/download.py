"""What a model on the hub consists of, and its weights file by file, each going on where it was cut off."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sft_play.errors import ModelUnreachableError
from sft_play.facts.locate import SECOND_COPIES, explained, wanted_files

# Larger ones are only sent by the hub client's own transfer, which is left to it.
LARGEST_BYTES = 40 * 2**30


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file of the repository.

    Attributes:
        sha256: of large files; what the cache calls them. Empty for the small ones.
        here: whether the cache has it.
    """

    name: str
    size_bytes: int
    sha256: str
    here: bool


@dataclass(frozen=True, kw_only=True)
class RemoteModel:
    """The files of a model that training needs.

    Attributes:
        commit: what the revision stands for now.
        licence: as its card says; empty where it says none.
        cache: the folder of this model in the hub's cache, there or not yet.
    """

    name: str
    commit: str
    licence: str
    gated: bool
    files: tuple[RemoteFile, ...]
    cache: Path

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def missing_bytes(self) -> int:
        """Bytes still to come; the begun part of a file is not."""
        return sum(
            file.size_bytes - (part.stat().st_size if (part := self.part_of(file)).is_file() else 0)
            for file in self.files
            if not file.here
        )

    def part_of(self, file: RemoteFile) -> Path:
        """Where the beginning of a large file lies until it is whole."""
        return self.cache / "blobs" / f"{file.sha256 or 'none'}.part"


def look_up(name: str, revision: str | None, *, trust_remote_code: bool) -> RemoteModel:
    """Ask the hub for files, sizes, commit and licence; nothing is fetched.

    Raises:
        SftPlayError: as `locate_model`; also where the licence has to be accepted first.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import filter_repo_objects

    api = HfApi()
    try:
        info = api.model_info(name, revision=revision, files_metadata=True)
        if info.gated:
            api.auth_check(name)
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        raise explained(name, revision, error) from error
    commit = str(info.sha)
    files = filter_repo_objects(
        info.siblings or (),
        allow_patterns=wanted_files(trust_remote_code),
        ignore_patterns=SECOND_COPIES,
        key=lambda file: file.rfilename,
    )
    card = info.card_data
    return RemoteModel(
        name=name,
        commit=commit,
        licence=str((card.get("license_name") or card.get("license") or "") if card else ""),
        gated=bool(info.gated),
        files=tuple(
            RemoteFile(
                name=file.rfilename,
                size_bytes=file.size or 0,
                sha256=file.lfs.sha256 if file.lfs else "",
                here=isinstance(try_to_load_from_cache(name, file.rfilename, revision=commit), str),
            )
            for file in files
        ),
        cache=Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model"),
    )


def fetch_large(model: RemoteModel, say: Callable[[str], None]) -> None:
    """Put each large file that is missing into the cache, after what an earlier try left of it.

    Args:
        say: told each file that goes on.

    Raises:
        SftPlayError: as `locate_model`; also where a file is not what the hub says it is.
    """
    from huggingface_hub.errors import HTTPError

    for file in model.files:
        if file.here or not file.sha256 or file.size_bytes > LARGEST_BYTES:
            continue
        try:
            _fetch(model, file, say)
        except (OSError, ValueError, RuntimeError, HTTPError) as error:
            raise explained(model.name, model.commit, error) from error


def _fetch(model: RemoteModel, file: RemoteFile, say: Callable[[str], None]) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    part = model.part_of(file)
    whole = part.with_name(file.sha256)
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # another download of the same file is waited for
        if whole.is_file():
            return
        begun = stream.tell()
        if begun > file.size_bytes:
            stream.truncate(begun := 0)
        if begun:
            say(f"{file.name} goes on after {begun / 2**20:,.1f} MiB")
        http_get(
            hf_hub_url(model.name, file.name, revision=model.commit),
            stream,
            resume_size=begun,
            headers=build_hf_headers(),
            expected_size=file.size_bytes,
            displayed_filename=file.name,
        )
        stream.flush()
        os.fsync(stream.fileno())
        with part.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        if digest != file.sha256:
            part.unlink()
            what = f"{file.name} is not what the hub says it is (its sha256 differs); it was removed"
            raise ModelUnreachableError(what, where=model.name, fix="start the download again")
        part.rename(whole)
