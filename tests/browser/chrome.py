"""A headless Chromium that opens one page and tells what it asked for, said and showed (DevTools protocol)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.tiny import ROOT

PICTURES = ROOT / ".artifacts"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
START_SECONDS = 60.0


@dataclass
class Seen:
    """What a page did.

    Attributes:
        requests: every address it asked for.
        problems: console errors and warnings, exceptions, and failed requests.
        value: what the expression gave.
    """

    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    value: Any = None


def look(
    address: str, picture: str, *, width: int, dark: bool = False, expression: str = "null", wait_for: str = "true",
    height: int = 900, whole: bool = True, seconds: float = 30.0, settle: float = 0.0,
) -> Seen:  # fmt: skip
    """Open an address, wait until `wait_for` is true there, keep a picture in .artifacts, and evaluate an expression.

    Args:
        settle: seconds between that and the picture, for what is drawn later.

    Raises:
        AssertionError: `wait_for` does not become true in time.
    """
    PICTURES.mkdir(exist_ok=True)
    with _chromium() as port:
        return asyncio.run(
            _look(port, address, PICTURES / picture, width, height, dark, expression, wait_for, whole, seconds, settle)
        )


@contextlib.contextmanager
def _chromium() -> Any:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = (
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
            "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "--remote-debugging-port=0",
            "--no-proxy-server", f"--user-data-dir={profile}", "about:blank",
        )  # fmt: skip
        browser = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield _port(Path(profile) / "DevToolsActivePort", browser)
        finally:
            browser.terminate()
            try:
                browser.wait(10)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait()


def _port(told: Path, browser: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and browser.poll() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(told.read_text().splitlines()[0])
        time.sleep(0.1)
    raise AssertionError(f"Chromium did not start (code {browser.poll()})")


class _Page:
    """One tab: commands and their answers; events are put into `seen`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, seen: Seen) -> None:
        self.socket, self.seen, self.number = socket, seen, 0
        self.answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.loaded = asyncio.Event()

    async def listen(self) -> None:
        async for message in self.socket:
            told = json.loads(message.data)
            if "id" in told:
                self.answers.pop(told["id"]).set_result(told)
            else:
                self._event(told["method"], told["params"])

    def _event(self, name: str, told: dict[str, Any]) -> None:
        seen = self.seen
        if name == "Network.requestWillBeSent":
            seen.requests.append(told["request"]["url"])
        elif name == "Network.loadingFailed" and not told.get("canceled"):
            seen.problems.append(f"failed: {told['errorText']}")
        elif name == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            seen.problems.append(told["entry"]["text"])
        elif name == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            seen.problems.append(json.dumps(told["args"])[:500])
        elif name == "Runtime.exceptionThrown":
            seen.problems.append(json.dumps(told["exceptionDetails"])[:500])
        elif name == "Page.loadEventFired":
            self.loaded.set()

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        answer = self.answers[self.number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": self.number, "method": method, "params": params})
        told = await asyncio.wait_for(answer, 60)
        assert "error" not in told, told
        return told["result"]

    async def evaluate(self, expression: str) -> Any:
        told = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")


async def _look(
    port: int, address: str, picture: Path, width: int, height: int, dark: bool, expression: str, wait_for: str,
    whole: bool, seconds: float, settle: float,
) -> Seen:  # fmt: skip
    seen = Seen()
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            tab = next(one for one in await answer.json() if one["type"] == "page")
        async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=1 << 28) as socket:
            page = _Page(socket, seen)
            listener = asyncio.create_task(page.listen())
            for domain in ("Page", "Network", "Runtime", "Log"):
                await page.ask(f"{domain}.enable")
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            await page.ask("Emulation.setDeviceMetricsOverride", **metrics)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            await page.ask("Emulation.setEmulatedMedia", features=[scheme])
            await page.ask("Page.navigate", url=address)
            await asyncio.wait_for(page.loaded.wait(), seconds)
            deadline = time.monotonic() + seconds
            while not await page.evaluate(wait_for):
                assert time.monotonic() < deadline, f"{wait_for} does not become true"
                await asyncio.sleep(0.2)
            await asyncio.sleep(settle)
            shot = await page.ask("Page.captureScreenshot", captureBeyondViewport=whole)
            picture.write_bytes(base64.b64decode(shot["data"]))
            seen.value = await page.evaluate(expression)
            listener.cancel()
    return seen
