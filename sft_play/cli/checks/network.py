"""Ports, the hub, and the clock."""

from __future__ import annotations

import email.utils
import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from sft_play.cli.checks.finding import Finding, Scope, fail, failed, ok, warning
from sft_play.errors import EnvironmentProblem
from sft_play.launch.tensorboard import HOST, free_port

HUB = "https://huggingface.co"
HUB_SECONDS = 6.0
# Beyond the first, logs and tokens are off; beyond the second, every TLS certificate may look expired.
CLOCK_OFF_SECONDS, CLOCK_WRONG_SECONDS = 300.0, 86_400.0
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
SET_CLOCK = "set it: timedatectl set-ntp true, or date -s; in a container, on its host"


@dataclass(frozen=True, kw_only=True)
class HubAnswer:
    """What the hub said to a question without a token.

    Attributes:
        status: HTTP status; 0 where there was no answer, and then `problem` says why.
        seconds_ahead: its clock minus ours; None where it told no date.
    """

    status: int = 0
    problem: str = ""
    seconds_ahead: float | None = None


def check_network(scope: Scope) -> Iterator[Finding]:
    """Ports that a run takes, the hub, and the clock against it."""
    yield check_tensorboard_port(scope.config.run.tensorboard_port)
    yield check_rendezvous(scope.config.dist.main_port, node_rank=scope.config.dist.node_rank)
    if scope.config.dist.num_nodes > 1 and scope.config.dist.main_address:
        yield check_address(scope.config.dist.main_address)
    offline = offline_by(scope.environ)
    answer = HubAnswer() if offline else ask_hub(hub_of(scope.environ))
    yield check_hub(answer, hub_of(scope.environ), offline, scope.environ)
    yield check_clock(time.time(), newest_change(Path(__file__).parents[2]), answer.seconds_ahead)


def check_tensorboard_port(port: int) -> Finding:
    """TensorBoard takes the next free one, so that only a whole row of taken ports stops it."""
    try:
        free = free_port(port)
    except EnvironmentProblem as error:
        (found,) = failed("TensorBoard", error)
        return replace(found, cure="name a free one with RUN_TENSORBOARD_PORT")
    if free != port:
        return warning("TensorBoard", f"port {port} is taken, {free} will be used", "or name one: RUN_TENSORBOARD_PORT")
    return ok("TensorBoard", f"port {port} is free")


def check_rendezvous(port: int | str, *, node_rank: int = 0) -> Finding:
    """Where the ranks meet: a port that the config names, or any. Machine 0 alone listens."""
    if node_rank:
        return ok("rendezvous", f"port {port} of machine 0, which is not this one")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if isinstance(port, int) else HOST, port if isinstance(port, int) else 0))
            probe.listen()
        except OSError as error:
            where = f"port {port}" if isinstance(port, int) else f"no port of {HOST}"
            return fail("rendezvous", f"{where}: {error.strerror}", "name a free one: MAIN_PORT, the same everywhere")
        taken = probe.getsockname()[1]
    return ok("rendezvous", f"port {port} is free" if isinstance(port, int) else f"a free port is to be had ({taken})")


def check_address(address: str) -> Finding:
    """Whether this machine knows where machine 0 is."""
    try:
        found = socket.getaddrinfo(address, None)[0][4][0]
    except OSError as error:
        return fail("machine 0", f"{address}: {error.strerror}", "give MAIN_ADDRESS as an IP address")
    return ok("machine 0", f"{address} is {found}")


def offline_by(environ: Mapping[str, str]) -> str:
    """The variable that keeps the hub out; empty where none does."""
    return next((name for name in OFFLINE if environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), "")


def hub_of(environ: Mapping[str, str]) -> str:
    """The hub's address as huggingface_hub takes it, without the credentials that it may hold."""
    parts = urlsplit(environ.get("HF_ENDPOINT", "").rstrip("/") or HUB)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def ask_hub(address: str, seconds: float = HUB_SECONDS) -> HubAnswer:
    """Ask for the first page's header, without a token. A thread asks: looking up a name has no timeout of its own."""
    found: list[HubAnswer] = []
    thread = threading.Thread(target=lambda: found.append(_ask(address, seconds)), daemon=True)
    thread.start()
    thread.join(seconds + 1)
    return found[0] if found else HubAnswer(problem=f"no answer in {seconds:.0f} s")


def _ask(address: str, seconds: float) -> HubAnswer:
    try:
        request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "sft-play-doctor"})
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return HubAnswer(status=response.status, seconds_ahead=_ahead(response.headers["Date"]))
    except urllib.error.HTTPError as error:
        return HubAnswer(status=error.code, seconds_ahead=_ahead(error.headers["Date"]))
    except urllib.error.URLError as error:
        reason = error.reason
        return HubAnswer(problem=getattr(reason, "strerror", None) or str(reason))
    except (OSError, ValueError, http.client.HTTPException) as error:
        return HubAnswer(problem=getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _ahead(date: str | None) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(date or "").timestamp() - time.time()
    except ValueError:
        return None


def check_hub(answer: HubAnswer, address: str, offline: str, environ: Mapping[str, str]) -> Finding:
    """Whether models and data can be fetched; the token itself is neither sent nor shown."""
    if offline:
        return ok("hub", f"left alone: {offline} is set; local folders and the cache do")
    token = "HF_TOKEN is set" if environ.get("HF_TOKEN") else "no HF_TOKEN, so no gated models"
    if answer.status and answer.status < 500:
        return ok("hub", f"{address} answers; {token}")
    proxy = next((f", through {name}" for name in _PROXIES if environ.get(name)), "")
    what = f"answers {answer.status}" if answer.status else f"cannot be reached ({answer.problem})"
    cure = "check the network, the proxy and HF_ENDPOINT; with local folders or a filled cache, HF_HUB_OFFLINE=1"
    return warning("hub", f"{address} {what}{proxy}", cure)


def newest_change(folder: Path) -> float:
    """When the newest source file of this program was written: no clock can rightly be before it."""
    return max(file.stat().st_mtime for file in folder.rglob("*.py"))


def check_clock(now: float, newest: float, ahead: float | None) -> Finding:
    """The date against this program's own files, and against the hub's clock where that was told."""
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if now < newest - CLOCK_WRONG_SECONDS:
        written = time.strftime("%Y-%m-%d", time.gmtime(newest))
        return fail("clock", f"{date}, before this program's files were written ({written})", SET_CLOCK)
    if ahead is None:
        return ok("clock", f"{date}, after this program's files; not compared with the hub's")
    found = f"{date}, {abs(ahead):,.0f} s {'behind' if ahead > 0 else 'ahead of'} the hub's"
    if abs(ahead) > CLOCK_WRONG_SECONDS:
        return fail("clock", found, SET_CLOCK)
    return warning("clock", found, SET_CLOCK) if abs(ahead) > CLOCK_OFF_SECONDS else ok("clock", found)
