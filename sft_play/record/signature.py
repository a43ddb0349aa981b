"""This user's signature under a checkpoint, for engines that insist on unpickling their own files.

A pickle can run any program, so another's is never loaded unasked. The key lies outside every run folder.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from pathlib import Path
from typing import Any

KEY_BYTES = 32
# What is put into a manifest after it was signed.
_LATER = ("signature", "checksum")


def key_file() -> Path:
    """Where this user's key lies."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "sft-play" / "key"


def read_or_make_key() -> bytes:
    """The key, made at the first call; readable by this user alone.

    Raises:
        OSError: it can be neither read nor written.
    """
    path = key_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_bytes()
    key = secrets.token_bytes(KEY_BYTES)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(key)
    return key


def sign(manifest: dict[str, Any]) -> str:
    """HMAC-SHA256 of everything a manifest says, hex; empty where there is no place for a key."""
    said = json.dumps({key: value for key, value in manifest.items() if key not in _LATER}, sort_keys=True)
    try:
        key = read_or_make_key()
    except OSError:
        return ""
    return hmac.new(key, said.encode(), hashlib.sha256).hexdigest()


def is_signed(manifest: dict[str, Any]) -> bool:
    """Whether this user's key signed the manifest as it stands."""
    given, wanted = manifest.get("signature") or "", sign(manifest)
    return bool(wanted) and hmac.compare_digest(str(given), wanted)
