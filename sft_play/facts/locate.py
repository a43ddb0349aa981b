"""Find a model on disk or fetch it, and find what it lacks before anything is loaded."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

from sft_play.errors import ModelError, ModelUnreachableError, SeveralErrors

# Read from both ends of a weight file for its identity.
IDENTITY_BYTES = 1 << 20
# What training needs; other files of a repository (ONNX, GGUF, pickled weights) stay where they are.
WANTED_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt", "*.py"]


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


def locate_model(name: str, revision: str | None) -> ModelFolder:
    """The local folder of a model: `name` itself, the hub's cache, or a download.

    Raises:
        ModelError: the folder lacks a file or one is damaged; all of them are named.
        ModelUnreachableError: a hub id that is neither cached nor reachable, or gated.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return check_model_folder(folder, name)
    if folder.is_file():
        raise ModelError(f"{name} is a file, not a model folder", where="model.name")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(f"no folder {name}, and it is no hub id (owner/name)", where="model.name")
    return check_model_folder(_fetch(name, revision), name)


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
        except ValueError:
            return f"{file.name} has a damaged header"
    ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    wanted = 8 + header_bytes + max(ends, default=0)
    return "" if wanted == size else f"{file.name} has {size} bytes where its header promises {wanted}"


def _weight_files(folder: Path, problems: list[str]) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        problems += [f"{name} is missing" for name in names if not (folder / name).is_file()]
        return [folder / name for name in names if (folder / name).is_file()]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("pytorch_model*.bin"))
        problems.append("model.safetensors is missing" + (" (pickled weights are never loaded)" if pickled else ""))
    return files


def _fetch(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED_FILES))
    except GatedRepoError as error:
        raise ModelUnreachableError(
            f"{name} is gated", where="model.name", fix="accept its licence on its page, then set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelUnreachableError(f"the hub has no model {name} that you may read", where="model.name") from error
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelUnreachableError(
            f"{name} is not on this disk and the hub cannot be reached", where="model.name"
        ) from error
