"""`make chat` against endpoints that answer anything: one line that says where, and no key in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sft_play.cli.chat import Remote, checked, first_model
from sft_play.cli.chat import main as chat_main
from sft_play.errors import EnvironmentProblem, UsageError

GOOD = b'{"data": [{"id": "tiny"}]}'


class Anything(BaseHTTPRequestHandler):
    """Answers every request with what the test has put into `answer`."""

    answer = GOOD

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Anything)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"null", b"\xff\x00", b'{"data": "abc"}', b'{"data": [{}]}', b""])
def test_lists_of_models_that_are_none(url: str, monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    monkeypatch.setattr(Anything, "answer", answer)
    with pytest.raises(EnvironmentProblem, match=r"no OpenAI-compatible endpoint|lists no model") as caught:
        first_model(url, "")
    assert caught.value.where == url


@pytest.mark.parametrize("event", [b"{not json", b"[1]", b"5", b'{"choices": [5]}', b'{"choices": 5}', b'{"error": 1}'])
def test_streams_that_are_none(url: str, monkeypatch: pytest.MonkeyPatch, event: bytes) -> None:
    monkeypatch.setattr(Anything, "answer", b"data: " + event + b"\n\n")
    with pytest.raises(EnvironmentProblem):
        list(Remote(url, "tiny").stream([], {}))


def test_comments_and_names_of_events_are_passed_over(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    event = b'data: {"choices": [{"delta": {"content": "fine"}}, {"delta": {"content": [1]}}]}'
    monkeypatch.setattr(Anything, "answer", b": ping\n\nevent: x\n" + event + b"\n\ndata: [DONE]\n\n")
    assert list(Remote(url, "tiny").stream([], {})) == ["fine"]


@pytest.mark.parametrize(
    "text", ["127.0.0.1:99999", "127.0.0.1:abc", "127.0.0.1:0", "[::1", "a b", "a/b c", "a\nb", "é"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="no http address"):
        checked(f"http://{text}")


@pytest.mark.parametrize("key", ["sk-ab\nX: y", "sk-ab€"])
def test_a_key_that_is_none_is_not_told(url: str, key: str) -> None:
    with pytest.raises(UsageError, match="OPENAI_API_KEY: has characters") as caught:
        chat_main([], {"URL": url, "OPENAI_API_KEY": key})
    assert "sk-ab" not in caught.value.line()
