"""TensorBoard beside a run: up before the first step, on a free port, and ended with the run that started it."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from sft_play.errors import EnvironmentProblem
from sft_play.launch.tied import tied

HOST = "127.0.0.1"
PORTS_TRIED = 20
START_SECONDS = 60.0
END_SECONDS = 5.0


@contextlib.contextmanager
def tensorboard(folder: Path, log: Path, first_port: int, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Serve `folder` on the first free port from `first_port` on, until the block ends.

    Yields:
        A function that waits until the server answers; it starts while the caller does other work.

    Raises:
        EnvironmentProblem: no port is free, or the server ends or does not answer.
    """
    port = free_port(first_port)
    if port != first_port:
        say(f"note: port {first_port} is taken; TensorBoard takes {port}")
    words = (sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", HOST, "--port", str(port))
    with log.open("ab") as output:
        server = subprocess.Popen(
            tied(signal.SIGTERM, *words), stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def ready() -> None:
        wait_until_up(server, port, log)
        say(f"TensorBoard: http://localhost:{port}")

    try:
        yield ready
    finally:
        server.terminate()
        try:
            server.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def free_port(first: int) -> int:
    """The first port from `first` on that nothing on this machine listens to.

    Raises:
        EnvironmentProblem: none of the next `PORTS_TRIED` is free.
    """
    for port in range(first, min(first + PORTS_TRIED, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                return port
    raise EnvironmentProblem(
        f"ports {first} to {first + PORTS_TRIED - 1} are taken", where="run.tensorboard_port", fix="name a free one"
    )


def wait_until_up(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return once the server answers.

    Raises:
        EnvironmentProblem: it ended, or does not answer in `START_SECONDS`.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy stands before this machine
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise EnvironmentProblem(f"TensorBoard ended with {server.returncode}", where=str(log))
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            direct.open(f"http://{HOST}:{port}/", timeout=2).close()
            return
        time.sleep(0.1)
    raise EnvironmentProblem(f"TensorBoard does not answer after {START_SECONDS:.0f} s", where=str(log))
