"""A folder's manifest: the size and sha256 of every file, signed and written last, so that its presence means whole.

It carries a checksum of itself, and is read only as it was written: a byte that changed anywhere is found.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from sft_play.record.digests import Digests, sha256
from sft_play.record.signature import sign

NAME = "manifest.json"
VERSION = 2


def write_manifest(folder: Path, about: dict[str, Any], digests: Digests | None = None) -> None:
    """Write the manifest of every file of `folder` beside them.

    Args:
        digests: those that were begun while the files were written: their owner waits for the disk, and calls
            `sync_manifest`. Without, everything is on the disk when this returns.
    """
    taken = digests or Digests()
    found = taken.finish(folder)
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": digest} for name, digest in found.items()}
    manifest = {**about, "version": VERSION, "files": files}
    manifest["signature"] = sign(manifest)
    manifest["checksum"] = _checksum(manifest)
    (folder / NAME).write_text(_text(manifest), encoding="utf-8")
    if digests is None:
        taken.settle()
        sync_manifest(folder)


def sync_manifest(folder: Path) -> None:
    """Bring the manifest and the names of all files of `folder` to the disk."""
    with (folder / NAME).open("rb") as stream:
        os.fsync(stream.fileno())
    for inside in [*(entry for entry in folder.rglob("*") if entry.is_dir()), folder]:
        sync_folder(inside)


def folder_problem(folder: Path) -> str:
    """The first thing that keeps a checkpoint from being used; empty when it is whole."""
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
        manifest = json.loads(text)
        files, version = manifest["files"], manifest["version"]
    except FileNotFoundError:
        return f"{NAME} is missing"
    except (ValueError, KeyError, TypeError, OSError):
        return f"{NAME} is damaged"
    if version not in (1, VERSION):
        return f"{NAME} has version {version}, this program reads up to {VERSION}"
    if version == VERSION and (text != _text(manifest) or manifest.get("checksum") != _checksum(manifest)):
        return f"{NAME} differs from its checksum"
    for name, wanted in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != wanted["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {wanted['bytes']}"
        if sha256(path) != wanted["sha256"]:
            return f"{name} differs from its checksum"
    return ""


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that `folder_problem` found whole."""
    manifest: dict[str, Any] = json.loads((folder / NAME).read_text(encoding="utf-8"))
    return manifest


def stamp_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The stamp inside a manifest; those of version 1 are the stamp themselves."""
    found: dict[str, Any] = manifest.get("stamp", manifest)
    return found


def _text(manifest: dict[str, Any]) -> str:
    return json.dumps(manifest, indent=1)


def _checksum(manifest: dict[str, Any]) -> str:
    said = json.dumps({key: value for key, value in manifest.items() if key != "checksum"}, sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
