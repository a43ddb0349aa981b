"""`make download` from a hub on this machine: killed and resumed, gated, too large; then planning without a network."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import Workplace

NAME, COMMIT, TOKEN = "owner/tiny", "c0ffee" + "0" * 34, "hf_" + "s3cret" * 5
WEIGHTS = "model.safetensors"
# The hub's client writes pieces of 10 MiB.
STALLS_AFTER, PIECE = 14 * 2**20, 10 * 2**20


@dataclass
class FilesOfAHub:
    """One model, served by the addresses that a download asks for.

    Attributes:
        claimed: sizes that are told instead of the real ones.
        denied: what a gated file gets.
        stalls: whether weights stop coming after `STALLS_AFTER` bytes.
        ranges: of each request for the weights.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    claimed: dict[str, int] = field(default_factory=dict)
    gated: bool = False
    stalls: bool = False
    url: str = ""
    ranges: list[str | None] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)
    over: Event = field(default_factory=Event)

    def entry(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        size, digest = self.claimed.get(name, len(data)), hashlib.sha256(data).hexdigest()
        large = {"oid": digest, "sha256": digest, "size": size, "pointerSize": 130} if name == WEIGHTS else None
        return {"size": size, "oid": digest[:40], "blobId": digest[:40], **({"lfs": large} if large else {})}


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FilesOfAHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.tokens.add(self.headers.get("Authorization"))
        if path.endswith("/auth-check") or "/resolve/" in path:
            if hub.gated:
                return self.send(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            if path.endswith("/auth-check"):
                return self.send(200, b"{}")
        if path.startswith(f"/api/models/{NAME}/tree/"):
            return self.send_json([{"type": "file", "path": name, **hub.entry(name)} for name in hub.files])
        if path == f"/api/models/{NAME}" or path.startswith(f"/api/models/{NAME}/revision/"):
            if path.endswith("/v9"):
                return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": name, **hub.entry(name)} for name in hub.files]
            about = {"id": NAME, "sha": COMMIT, "siblings": siblings, "cardData": {"license": "apache-2.0"}}
            return self.send_json({**about, "gated": "manual" if hub.gated else False})
        if path.startswith(f"/{NAME}/resolve/"):
            return self.send_file(path.rpartition("/")[2])
        return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def send_json(self, value: Any) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send_file(self, name: str) -> None:
        entry, data = self.hub.entry(name), self.hub.files[name]
        asked = self.headers.get("Range")
        if self.command == "GET":
            self.hub.fetched.append(name)
            if name == WEIGHTS:
                self.hub.ranges.append(asked)
        first = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        headers = {"ETag": f'"{entry.get("lfs", entry)["oid"]}"', "X-Repo-Commit": COMMIT}
        headers |= {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if first else {}
        self.send(206 if first else 200, data[first:], headers, stalls=self.hub.stalls and name == WEIGHTS)

    def send(self, status: int, data: bytes, headers: dict[str, str] | None = None, *, stalls: bool = False) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if stalls:
            self.wfile.write(data[:STALLS_AFTER])
            self.wfile.flush()
            self.hub.over.wait(60)
            return
        self.wfile.write(data)


@pytest.fixture
def hub(tiny_model: Path, tmp_path: Path) -> Iterator[FilesOfAHub]:
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir() if path.is_file()}
    tensors = load_file(tiny_model / WEIGHTS)
    torch.manual_seed(0)
    save_file({**tensors, "more": torch.randn(6 * 2**20)}, tmp_path / "more.safetensors", metadata={"format": "pt"})
    files[WEIGHTS] = (tmp_path / "more.safetensors").read_bytes()
    files |= {"pytorch_model.bin": b"pickle", "model.gguf": b"gguf", "onnx/model.onnx": b"onnx", "code.py": b"raise"}
    served = FilesOfAHub(files)
    handler = type("Bound", (Answers,), {"hub": served})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    Thread(target=server.serve_forever, daemon=True).start()
    yield served
    served.over.set()
    server.shutdown()


def variables(hub: FilesOfAHub, workplace: Workplace, **more: str) -> dict[str, str]:
    home = str(workplace.path / "home")
    return {"HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN, **more}


def test_killed_and_gone_on_with_then_planned_without_a_network(hub: FilesOfAHub, workplace: Workplace) -> None:
    hub.stalls = True
    process = workplace.start("download", **variables(hub, workplace, MODEL=NAME))
    blobs = workplace.path / f"home/hub/models--{NAME.replace('/', '--')}/blobs"
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size >= PIECE for path in blobs.glob("*.part")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    out, errors = process.communicate()
    size = len(hub.files[WEIGHTS])
    assert f"{NAME} at {COMMIT}: licence apache-2.0" in out
    assert "6 files, 0.02 GiB" in out, out
    assert "0.00 GiB are here, 0.02 GiB to fetch into " in out

    hub.stalls = False
    workplace.write(model={"name": NAME})
    done = workplace.run("download", **variables(hub, workplace, CONFIG="tiny.yaml"))
    assert done.code == 0, done.err
    assert "model.safetensors goes on after 10.0 MiB" in done.out
    assert f"to stay with it: model.revision: {COMMIT}" in done.out
    assert hub.ranges == [None, f"bytes={PIECE}-"]
    assert not list(blobs.glob("*.part"))
    assert {path.stat().st_size for path in blobs.iterdir()} >= {size}
    assert set(hub.fetched) <= {name for name in hub.files if name.endswith((".json", ".jinja", ".safetensors"))}
    assert TOKEN not in out + errors + done.out + done.err
    assert f"Bearer {TOKEN}" in hub.tokens

    count = len(hub.fetched)
    again = workplace.run("download", **variables(hub, workplace, MODEL=NAME))
    assert "0.02 GiB are here, 0.00 GiB to fetch" in again.out
    assert len(hub.fetched) == count
    home = str(workplace.path / "home")
    look = f"from sft_play.facts.locate import find_model; print(find_model({NAME!r}, None))"
    found = subprocess.check_output(
        [sys.executable, "-c", look], env=workplace.environ(HF_HOME=home), cwd=workplace.path, text=True
    )
    assert found.strip().endswith(f"snapshots/{COMMIT}")
    plan = workplace.run("plan", CONFIG="tiny.yaml", HF_HOME=home)
    assert plan.code == 0, plan.err
    offline = workplace.run("download", MODEL=NAME, HF_HOME=home)
    assert offline.code == 0, offline.err
    assert "HF_HUB_OFFLINE is set; taken from this disk as it is" in offline.err


def test_why_nothing_is_fetched(hub: FilesOfAHub, workplace: Workplace) -> None:
    """A licence to accept, a disk too small, a revision that is not there, no safetensors: a line, and no byte."""
    hub.gated = True
    gated = workplace.run("download", **variables(hub, workplace, MODEL=NAME))
    assert gated.code == 4
    assert gated.error_lines == [
        f"error: MODEL: {NAME} is gated -> accept its licence on its page, {hub.url}/{NAME}, then set HF_TOKEN"
    ]
    hub.gated, hub.claimed[WEIGHTS] = False, 10**15
    full = workplace.run("download", **variables(hub, workplace, MODEL=NAME))
    free = shutil.disk_usage(workplace.path).free
    assert full.code == 4
    assert "931322.6 GiB are still to come and " in full.error_lines[0]
    assert free < 10**15
    hub.claimed.clear()
    no_such = workplace.run("download", "--revision", "v9", **variables(hub, workplace, MODEL=NAME))
    assert (no_such.code, f"{NAME} has no revision v9" in no_such.error_lines[0]) == (2, True)
    hub.files.pop(WEIGHTS)
    pickled = workplace.run("download", **variables(hub, workplace, MODEL=NAME))
    assert (pickled.code, "has no safetensors weights" in pickled.error_lines[0]) == (2, True)
    assert not hub.fetched


def test_a_folder_needs_no_download_and_both_names_are_refused(workplace: Workplace) -> None:
    done = workplace.run("download", CONFIG="tiny.yaml")
    assert (done.code, done.out) == (0, f"{workplace.model} is a folder; nothing is fetched\n")
    both = workplace.run("download", CONFIG="tiny.yaml", MODEL=NAME)
    assert both.error_lines == [
        "error: name either MODEL or CONFIG -> make download MODEL=owner/name, or CONFIG=configs/mine.yaml"
    ]


@pytest.mark.parametrize(
    "endpoint", ["http://[::1", "htp:/hub", "hub.example", "http://a\nb", "http://a b", f"https://me:{TOKEN}@hub:99999"]
)
def test_an_endpoint_that_is_no_address(endpoint: str, workplace: Workplace) -> None:
    """Of every command: the hub's library does not import with some of them."""
    done = workplace.run("runs", HF_ENDPOINT=endpoint)
    (line,) = done.error_lines
    shown = endpoint.replace(f"me:{TOKEN}", "***")
    assert (done.code, line) == (
        2,
        f"error: HF_ENDPOINT: {shown!r} is no address -> https://host[:port], or unset it",
    )
