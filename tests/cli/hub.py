"""A small hub of models that listens on this machine: the few addresses that an upload asks for."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class Hub:
    """What was asked of it.

    Attributes:
        repositories: id -> whether it is private.
        files: id -> name -> content.
        tokens: of all requests' headers.
        asked: every line that was asked for, with its body.
        status: what every request gets, where it is not 200.
    """

    url: str = ""
    repositories: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    status: int = 200

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        self.asked.append(f"{method} {path} {body[:2000]!r}")
        if self.status != 200:
            return self.status, {"error": "no"}
        if path.startswith("/large/"):
            self.large[path.rpartition("/")[2]] = body
            return 200, {}
        asked = json.loads(body) if body and not path.endswith("/commit/main") else {}
        if path == "/api/repos/create":
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.repositories[name] = asked.get("private", asked.get("visibility") == "private")
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/info/lfs/objects/batch"):
            places = [
                {**one, "actions": {"upload": {"href": f"{self.url}/large/{one['oid']}"}}} for one in asked["objects"]
            ]
            return 200, {"transfer": "basic", "objects": places}
        name = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        if method == "GET":
            found = name in self.repositories
            return (200, {"id": name, "private": self.repositories[name]}) if found else (404, {"error": "none"})
        if "/preupload/" in path:
            kinds = {one["path"]: "lfs" if one["path"].endswith("safetensors") else "regular" for one in asked["files"]}
            return 200, {"files": [{"path": p, "uploadMode": k, "shouldIgnore": False} for p, k in kinds.items()]}
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files.setdefault(name, {})[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files.setdefault(name, {})[value["path"]] = self.large[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1", "success": True}


@contextmanager
def hub() -> Iterator[Hub]:
    """A hub, for as long as the block lasts."""
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if "/you/" in self.path:  # others ask for nothing of the user's
                state.tokens.add(self.headers.get("Authorization"))
            code, value = state.answer(self.command, self.path.partition("?")[0], body)
            text = json.dumps(value).encode()
            self.send_response(code)
            if code == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = serve

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
