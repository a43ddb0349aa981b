"""Find a model on disk or fetch it, and find what it lacks before anything is loaded."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sft_play.errors import (
    DiskFullError,
    EnvironmentProblem,
    ModelError,
    ModelUnreachableError,
    SeveralErrors,
    SftPlayError,
)

# Read from both ends of a weight file for its identity.
IDENTITY_BYTES = 1 << 20
# What training needs; other files of a repository (ONNX, GGUF, pickled weights) stay where they are.
WANTED_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
CODE_FILES = ["*.py"]
# What preparing data needs.
TOKENIZER_FILES = ["*.json", "*.jinja"]
# The same weights once more, in their maker's own layout, which is never loaded.
SECOND_COPIES = ["consolidated*", "original/*"]


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A complete model on this disk."""

    path: Path
    name: str
    weight_bytes: int

    def identity(self) -> str:
        """Hash of config.json and of each weight file's header, size and last bytes: another base gives another.

        Not of every byte: that would read a large model once more on each start.
        """
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for file in sorted(self.path.glob("*.safetensors")):
            with file.open("rb") as stream:
                digest.update(stream.read(IDENTITY_BYTES))
                size = stream.seek(0, 2)
                stream.seek(max(0, size - IDENTITY_BYTES))
                digest.update(stream.read() + str(size).encode())
        return digest.hexdigest()[:16]


def locate_model(name: str, revision: str | None, *, trust_remote_code: bool = False) -> ModelFolder:
    """The local folder of a model: `name` itself, the hub's cache, or a download.

    Args:
        trust_remote_code: fetch the model's Python files too.

    Raises:
        ModelError: the folder lacks a file or one is damaged; all of them are named. Or the hub has no such
            revision.
        ModelUnreachableError: a hub id that is neither cached nor reachable, or that one may not read.
        DiskFullError: the download does not fit.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return check_model_folder(folder, name)
    return check_model_folder(_fetch(_hub_id(name), revision, wanted_files(trust_remote_code)), name)


def wanted_files(trust_remote_code: bool) -> list[str]:
    """Patterns of the files that training needs."""
    return [*WANTED_FILES, *(CODE_FILES if trust_remote_code else ())]


def locate_tokenizer(name: str, revision: str | None) -> Path:
    """The local folder of a model's tokenizer; of a hub id only the small files are fetched.

    Raises:
        ModelError: `name` is neither a folder nor a hub id, or the hub has no such revision.
        ModelUnreachableError, DiskFullError: as `locate_model`.
    """
    folder = Path(name).expanduser()
    return folder.resolve() if folder.is_dir() else _fetch(_hub_id(name), revision, TOKENIZER_FILES)


def find_model(name: str, revision: str | None) -> Path | None:
    """The folder that `locate_model` would take, complete or not, where it is on this disk; nothing is fetched.

    Raises:
        ModelError: `name` is neither a folder nor a hub id.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        # Asked for everything, the client would miss the files that were never wanted.
        only = ["config.json"]
        return Path(snapshot_download(_hub_id(name), revision=revision, allow_patterns=only, local_files_only=True))
    except (OSError, ValueError):
        return None


def hub_cache() -> Path:
    """The folder of the hub's cache, as its library finds it, without loading that library."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub"))


def _hub_id(name: str) -> str:
    if Path(name).expanduser().is_file():
        raise ModelError(f"{name} is a file, not a model folder", where="model.name")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(f"no folder {name}, and it is no hub id (owner/name)", where="model.name")
    return name


def check_model_folder(folder: Path, name: str) -> ModelFolder:
    """Verify that config, tokenizer and every weight file are there and whole.

    Raises:
        ModelError: naming each file that is missing or damaged.
    """
    problems: list[str] = []
    if not (folder / "config.json").is_file():
        problems.append("config.json is missing")
    else:
        try:
            json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            problems.append(f"config.json is not JSON ({error})")
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model")):
        problems.append("tokenizer.json is missing")
    weights = _weight_files(folder, problems)
    problems += [reason for file in weights if (reason := weight_file_problem(file))]
    if problems:
        raise SeveralErrors([ModelError(problem, where=str(folder)) for problem in problems])
    return ModelFolder(path=folder.resolve(), name=name, weight_bytes=sum(file.stat().st_size for file in weights))


def weight_file_problem(file: Path) -> str:
    """Why a safetensors file cannot be whole: its header names bytes that are not there. Empty when it can."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        if len(head) < 8:
            return f"{file.name} is cut off ({size} bytes)"
        (header_bytes,) = struct.unpack("<Q", head)
        if header_bytes > size - 8:
            return f"{file.name} is cut off or no safetensors file ({size} bytes)"
        try:
            header = json.loads(stream.read(header_bytes))
            ends = [int(entry["data_offsets"][1]) for key, entry in header.items() if key != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return f"{file.name} has a damaged header"
    wanted = 8 + header_bytes + max(ends, default=0)
    return "" if wanted == size else f"{file.name} has {size} bytes where its header promises {wanted}"


def _weight_files(folder: Path, problems: list[str]) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError):
            problems.append(f"{index.name} is damaged")
            return []
        if outside := next((name for name in names if Path(name).name != name), None):
            problems.append(f"{index.name} names {outside}, which is no file of this folder")
            return []
        problems += [f"{name} is missing" for name in names if not (folder / name).is_file()]
        return [folder / name for name in names if (folder / name).is_file()]
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not files:
        pickled = any(folder.glob("pytorch_model*.bin"))
        problems.append("model.safetensors is missing" + (" (pickled weights are never loaded)" if pickled else ""))
    return files


def _fetch(name: str, revision: str | None, wanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=SECOND_COPIES))
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        raise explained(name, revision, error) from error


def explained(name: str, revision: str | None, error: Exception) -> SftPlayError:
    """Why a download failed. The hub wraps what it met first, so the whole chain of causes is looked at."""
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    chain = list(causes_of(error))
    if any(is_full_disk(one) for one in chain):
        fix = "free space, or point HF_HOME to another disk"
        return DiskFullError(f"the disk filled up while fetching {name}", where="model.name", fix=fix)
    if isinstance(error, HFValidationError):
        return ModelError(f"{name} is no hub id (owner/name)", where="model.name")
    for one in chain:
        if isinstance(one, GatedRepoError):
            fix = f"accept its licence on its page, {ENDPOINT}/{name}, then set HF_TOKEN"
            return ModelUnreachableError(f"{name} is gated", where="model.name", fix=fix)
        if isinstance(one, RevisionNotFoundError):
            what = f"{name} has no revision {revision or 'main'}"
            return ModelError(what, where="model.revision", fix="give a branch, tag or commit of that model")
        if isinstance(one, RepositoryNotFoundError):
            fix = "check the spelling; a private model needs an HF_TOKEN that may read it"
            return ModelUnreachableError(f"the hub has no model {name} that you may read", where="model.name", fix=fix)
        if isinstance(one, HfHubHTTPError):
            return _refused(name, one.response.status_code)
        if isinstance(one, OfflineModeIsEnabled):
            fix = "unset HF_HUB_OFFLINE, or give model.name a local folder"
            return ModelUnreachableError(
                f"{name} is not on this disk and HF_HUB_OFFLINE is set", where="model.name", fix=fix
            )
    if any(isinstance(one, PermissionError) for one in chain):
        what = f"the hub's cache cannot be written ({error})"
        return EnvironmentProblem(what, where="model.name", fix="set HF_HOME to a folder of yours")
    return ModelUnreachableError(f"{name} is not whole on this disk and the hub cannot be reached", where="model.name")


def _refused(name: str, status: int) -> ModelUnreachableError:
    """What an answer of the hub means that has no class of its own."""
    if status == 401:
        fix = "set HF_TOKEN to a new one from its settings page; a public model needs none"
        return ModelUnreachableError("the hub does not know your token", where="model.name", fix=fix)
    if status == 403:
        fix = "set an HF_TOKEN that may read it, and check that the model is not disabled"
        return ModelUnreachableError(f"the hub forbids you to read {name}", where="model.name", fix=fix)
    if status == 429:
        fix = "wait a while, or set HF_TOKEN, which has a limit of its own"
        return ModelUnreachableError(
            f"the hub has had too many requests (429) to send {name}", where="model.name", fix=fix
        )
    if status >= 500:
        fix = "try again later, or give model.name a local folder"
        return ModelUnreachableError(f"the hub failed ({status}) while sending {name}", where="model.name", fix=fix)
    return ModelUnreachableError(f"the hub refused to send {name} ({status})", where="model.name")


def is_full_disk(error: BaseException) -> bool:
    """The hub's own downloader, which is not Python, says it in words only."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or f"(os error {errno.ENOSPC})" in str(error)


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
