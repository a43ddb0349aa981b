"""`make chat`: talk to what `make serve` serves, or to any OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sft_play.cli.infer import chat
from sft_play.cli.options import Options, positive, temperature
from sft_play.cli.serve import HOST, port_of
from sft_play.config.inputs import INPUTS_OF, MAKE_VARIABLES, check_inputs
from sft_play.errors import EnvironmentProblem, ExitCode, UsageError
from sft_play.launch.processes import tie_to_parent

START_SECONDS, LOOK_SECONDS, ANSWER_SECONDS = 600.0, 0.2, 600.0
KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Remote:
    """A model behind an endpoint; streams like `runtime/generate.Speaker`.

    Attributes:
        url: up to and with `/v1`.
        key: sent where it is not empty.
    """

    url: str
    model: str
    key: str = ""

    def stream(self, messages: Sequence[dict[str, str]], sampling: Mapping[str, Any]) -> Iterator[str]:
        """The answer in pieces.

        Raises:
            EnvironmentProblem: the endpoint refuses, fails or goes away.
        """
        body = {"model": self.model, "messages": list(messages), "stream": True, **sampling}
        with answered(self.url, "/chat/completions", self.key, body) as response:
            for line in response:
                text = line.decode("utf-8", "replace").strip()
                data = text.removeprefix("data:").strip()
                if data != text and data != "[DONE]":  # comments and names of events are no data
                    yield from pieces(parsed(data, self.url), self.url)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Chat with URL, else with a server of its own for RUN, else with what listens on PORT.

    Raises:
        UsageError: URL is none, or URL and RUN are both given.
        EnvironmentProblem: nothing answers there.
    """
    options = parser().parse_args(argv)
    check_inputs(environ, INPUTS_OF["chat"])
    url, run = environ.get("URL"), environ.get("RUN")
    if url and run:
        raise UsageError("name either RUN or URL", fix="RUN=runs/NAME serves it itself, URL=http://... is elsewhere")
    key = environ.get(KEY, "").strip() if url else ""
    if not key.isascii() or not key.isprintable():
        raise UsageError("has characters that no key has", where=KEY, fix="copy it again")
    if "MAKELEVEL" in environ:
        tie_to_parent()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sampling = {"temperature": options.temperature, "max_tokens": options.max_new_tokens}
    with contextlib.suppress(KeyboardInterrupt), served(environ, run, url) as address:
        remote = Remote(address, options.model or first_model(address, key), key)
        return chat(remote, sampling, options.system)
    print()
    return ExitCode.DONE


def parser() -> argparse.ArgumentParser:
    """The options that ARGS may hold."""
    result = Options(prog="make chat", description=__doc__)
    result.add_argument("--system", help="system message put before everything")
    result.add_argument("--model", help="name of the model, where the endpoint has several")
    result.add_argument("--max-new-tokens", type=positive, default=256)
    result.add_argument("--temperature", type=temperature, default=0.0, help="0 takes the likeliest token")
    return result


@contextlib.contextmanager
def served(environ: Mapping[str, str], run: str | None, url: str | None) -> Iterator[str]:
    """The endpoint's address; of a run, a server beside this process for as long as the chat lasts."""
    if not run:
        yield checked(url or f"http://{HOST}:{port_of(environ)}/v1")
        return
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    given = {name: value for name, value in environ.items() if name not in ("ARGS", MAKE_VARIABLES, "URL")}
    words = (sys.executable, "-m", "sft_play", "serve")
    environment = {**given, "PORT": str(port), "MAKELEVEL": "1"}  # the server ends with this process
    server = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    address = f"http://{HOST}:{port}/v1"
    try:
        wait_until_up(server, address)
        yield address
    finally:
        server.terminate()
        server.wait()


def checked(url: str) -> str:
    """The address without a slash at its end.

    Raises:
        UsageError: it is no http address.
    """
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        right = False
    if not right or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(f"{url!r} is no http address", where="URL", fix=f"such as http://{HOST}:8000/v1")
    return url.rstrip("/")


def wait_until_up(server: subprocess.Popen[bytes], address: str) -> None:
    """Return once the server answers.

    Raises:
        EnvironmentProblem: it ended (its own lines say why), or does not answer in `START_SECONDS`.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise EnvironmentProblem(f"the server ended with {server.returncode}", where="make serve", fix="see above")
        with contextlib.suppress(EnvironmentProblem):
            first_model(address, "")
            return
        time.sleep(LOOK_SECONDS)
    raise EnvironmentProblem(f"the server does not answer after {START_SECONDS:.0f} s", where="make serve")


def first_model(url: str, key: str) -> str:
    """The name of the first model that the endpoint lists.

    Raises:
        EnvironmentProblem: nothing answers, or it lists none.
    """
    with answered(url, "/models", key) as response:
        listed = parsed(response.read().decode("utf-8", "replace"), url).get("data")
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict) or "id" not in listed[0]:
        raise EnvironmentProblem("the endpoint lists no model", where=url, fix="ARGS='--model NAME' names one")
    return str(listed[0]["id"])


def parsed(text: str, url: str) -> dict[str, Any]:
    """A JSON object that the endpoint sent.

    Raises:
        EnvironmentProblem: it is something else.
    """
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    what = f"what answers is no OpenAI-compatible endpoint: {text.strip()[:80]!r}"
    raise EnvironmentProblem(what, where=url, fix=f"URL= ends in /v1, such as http://{HOST}:8000/v1")


@contextlib.contextmanager
def answered(url: str, path: str, key: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
    """The response to a request, of which no proxy is asked.

    Raises:
        EnvironmentProblem: nothing answers, or it refuses; with what it said.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_SECONDS)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        data = json.dumps(body) if body is not None else None
        connection.request("POST" if data else "GET", parts.path + path, data, headers)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            said = response.read(500).decode("utf-8", "replace")
            raise EnvironmentProblem(f"the endpoint refuses ({response.status}): {said}", where=url, fix="see there")
        yield response
    except (OSError, http.client.HTTPException) as error:
        fix = "make serve RUN=runs/NAME in another terminal, or make chat RUN=runs/NAME"
        raise EnvironmentProblem(f"nothing answers ({type(error).__name__})", where=url, fix=fix) from error
    finally:
        connection.close()


def pieces(event: Mapping[str, Any], url: str) -> Iterator[str]:
    """The text that one event of a stream brings.

    Raises:
        EnvironmentProblem: the event is an error.
    """
    if "error" in event:
        raise EnvironmentProblem(f"the endpoint fails: {event['error']}", where=url, fix="see the server's lines")
    try:
        texts = [(choice.get("delta") or {}).get("content") for choice in event.get("choices") or []]
    except (AttributeError, TypeError) as error:
        raise EnvironmentProblem("the endpoint's stream is not understood", where=url, fix="see there") from error
    yield from (text for text in texts if text and isinstance(text, str))
