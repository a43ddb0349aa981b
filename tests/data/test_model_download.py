"""Why a model could not be fetched, told apart; the hub's own exceptions come from a patched download."""

from __future__ import annotations

import errno
import json
import struct
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors as hub
from huggingface_hub.utils import filter_repo_objects, hf_raise_for_status

from sft_play.errors import DiskFullError, EnvironmentProblem, ModelError, ModelUnreachableError, SftPlayError
from sft_play.facts.locate import check_model_folder, locate_model

URL = "https://huggingface.co/api/models/some/model"
HEADER = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
WEIGHTS = struct.pack("<Q", len(HEADER)) + HEADER + b"x"


def answer(status: int, **headers: str) -> Exception:
    """What the hub's client raises for an answer."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    response = httpx2.Response(status, headers=given, request=httpx2.Request("GET", URL))
    with pytest.raises(hub.HfHubHTTPError) as caught:
        hf_raise_for_status(response)
    return caught.value


def wrapped(cause: Exception) -> Exception:
    """What the client makes of an answer or a lost connection when nothing is cached either."""
    try:
        raise hub.LocalEntryNotFoundError("no snapshot here") from cause
    except hub.LocalEntryNotFoundError as error:
        return error


def told(monkeypatch: pytest.MonkeyPatch, error: Exception, revision: str | None = None) -> SftPlayError:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(SftPlayError) as caught:
        locate_model("some/model", revision)
    assert caught.value.__cause__ is error
    return caught.value


BAD_TOKEN = answer(401, X_Error_Message="Invalid credentials in Authorization header")
FULL = OSError(errno.ENOSPC, "No space left on device")
CASES = [
    (answer(404, X_Error_Code="RevisionNotFound"), ModelError, "model.revision: some/model has no revision v9"),
    (answer(403, X_Error_Code="GatedRepo"), ModelUnreachableError, "some/model is gated -> accept its licence"),
    (answer(404, X_Error_Code="RepoNotFound"), ModelUnreachableError, "the hub has no model some/model"),
    (answer(401), ModelUnreachableError, "the hub has no model some/model that you may read -> check the spelling"),
    (BAD_TOKEN, ModelUnreachableError, "the hub does not know your token"),
    (answer(403), ModelUnreachableError, "the hub forbids you to read some/model"),
    (wrapped(answer(403)), ModelUnreachableError, "the hub forbids you to read some/model"),
    (answer(403, X_Error_Message="Access to this resource is disabled."), ModelUnreachableError, "is not disabled"),
    (answer(429), ModelUnreachableError, "too many requests (429)"),
    (answer(500), ModelUnreachableError, "the hub failed (500)"),
    (wrapped(answer(504)), ModelUnreachableError, "the hub failed (504)"),
    (answer(400), ModelUnreachableError, "the hub refused to send some/model (400)"),
    (FULL, DiskFullError, "the disk filled up while fetching some/model -> free space, or point HF_HOME"),
    (wrapped(FULL), DiskFullError, "the disk filled up"),
    (RuntimeError("Data processing error: I/O error: No space left on device (os error 28)"), DiskFullError, "filled"),
    (PermissionError(errno.EACCES, "Permission denied", "/cache"), EnvironmentProblem, "cache cannot be written"),
    (wrapped(hub.OfflineModeIsEnabled("offline")), ModelUnreachableError, "HF_HUB_OFFLINE is set"),
    (wrapped(httpx2.ConnectError("no route")), ModelUnreachableError, "the hub cannot be reached"),
    (httpx2.ProxyError("proxy"), ModelUnreachableError, "the hub cannot be reached"),
    (httpx2.ReadTimeout("slow"), ModelUnreachableError, "the hub cannot be reached"),
    (hub.HFValidationError("bad"), ModelError, "some/model is no hub id"),
]


@pytest.mark.parametrize(("error", "kind", "said"), CASES, ids=lambda part: str(part)[:40] if part else "")
def test_each_cause_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[SftPlayError], said: str
) -> None:
    found = told(monkeypatch, error, "v9")
    assert type(found) is kind
    assert said in found.line()
    assert found.fix


def test_a_fault_of_the_program_is_not_called_the_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda: "no arguments")
    with pytest.raises(TypeError):
        locate_model("some/model", None)


@pytest.mark.parametrize(("trusted", "code"), [(False, []), (True, ["modeling.py"])])
def test_only_what_is_loaded_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trusted: bool, code: list[str]
) -> None:
    there = ["config.json", "tokenizer.json", "model.safetensors", "modeling.py"]
    there += ["consolidated.safetensors", "consolidated.00.safetensors", "original/params.json", "model.gguf", "a.bin"]
    fetched = []

    def download(_: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        fetched.extend(filter_repo_objects(there, **patterns))
        for name in fetched:
            (tmp_path / name).write_bytes(WEIGHTS if name.endswith(".safetensors") else b"{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = locate_model("some/model", None, trust_remote_code=trusted)
    assert fetched == [*there[:3], *code]
    assert found.weight_bytes == len(WEIGHTS)


def test_a_second_copy_of_the_weights_is_none(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "consolidated.safetensors").write_bytes(WEIGHTS)
    with pytest.raises(SftPlayError, match=r"model\.safetensors is missing"):
        check_model_folder(tmp_path, "m")
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    assert check_model_folder(tmp_path, "m").weight_bytes == len(WEIGHTS)
