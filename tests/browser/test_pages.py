"""The pages in a real Chromium: nothing is fetched, nothing is complained of, the figures are the record's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_play.launch.tensorboard import free_port
from sft_play.report.compare import write_comparison
from sft_play.report.page import write_report
from tests.browser.chrome import look, needs_chromium
from tests.report.made import made_run
from tests.tiny import Workplace

FIGURES = (
    "Object.fromEntries([...document.querySelectorAll('[data-value]')].map(e => [e.dataset.key, e.dataset.value]))"
)
SEEN = f"""({{
  figures: {FIGURES},
  charts: document.querySelectorAll('svg.pygal-chart').length,
  overflow: document.documentElement.scrollWidth - innerWidth,
  page: getComputedStyle(document.body).backgroundColor,
  line: getComputedStyle(document.querySelector('svg .series path')).stroke,
  unseen: [...document.querySelectorAll('svg .series path')].filter(e => e.getBBox().width === 0).length,
}})"""


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_report_in_a_browser(tmp_path: Path, width: int, dark: bool) -> None:
    folder = made_run(tmp_path / "run", answer="<script>document.title = 'taken'</script>")
    address = write_report(folder).as_uri()
    seen = look(address, f"report-{width}-{'dark' if dark else 'light'}.png", width=width, dark=dark, expression=SEEN)
    assert seen.requests == [address]
    assert seen.problems == []
    found, record = seen.value, json.loads((folder / "record.json").read_text())
    for key in ("eval_loss", "train_loss", "steps", "seconds", "tokens_per_second"):
        assert float(found["figures"][key]) == record[key]
    assert float(found["figures"]["summary.tokens"]) == record["summary"]["tokens"]
    assert found["charts"] >= 8
    assert found["overflow"] <= 0
    assert found["unseen"] == 0
    assert found["page"] == ("rgb(19, 22, 25)" if dark else "rgb(247, 247, 245)")
    assert found["line"] == ("rgb(123, 165, 245)" if dark else "rgb(47, 102, 207)")


@needs_chromium
def test_the_comparison_in_a_browser(tmp_path: Path) -> None:
    folders = [made_run(tmp_path / name, setting=name) for name in ("low", "high")]
    address = write_comparison(folders).as_uri()
    for width in (1280, 390):
        seen = look(address, f"compare-{width}.png", width=width, expression="document.body.innerText")
        assert seen.requests == [address]
        assert seen.problems == []
        assert seen.value.index("train.note") < seen.value.index("held-out loss")


@pytest.fixture
def shown_run(workplace: Workplace) -> Iterator[tuple[Path, str]]:
    """The folder of a run of two ranks that trains until it is told to stop, and the address of its TensorBoard."""
    workplace.write(
        train={"max_steps": 100_000, "eval_strategy": "steps", "eval_steps": 20, "batch_size": 2},
        dist={"gpus": 2, "strategy": "ddp"},
    )
    port = free_port(16106)
    with (workplace.path / "said.txt").open("wb") as said:
        run = subprocess.Popen(
            [sys.executable, "-m", "sft_play", "train-distributed-tb"],
            cwd=workplace.path,
            env=workplace.environ(CONFIG="tiny.yaml", RUN_TENSORBOARD_PORT=str(port)),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
        try:
            yield workplace.path / "runs/tiny", f"http://127.0.0.1:{port}"
            assert run.poll() is None, (workplace.path / "said.txt").read_text()[-2000:]
        finally:
            os.kill(run.pid, signal.SIGTERM)
            code = run.wait(120)
    assert code == 75, (workplace.path / "said.txt").read_text()[-2000:]


def fetched(address: str) -> Any:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(address, timeout=10) as answer:
        return json.load(answer)


def scalars(address: str) -> tuple[str, dict[str, Any]]:
    """The run's name and its tags; empty while TensorBoard has not read any."""
    try:
        tags = fetched(f"{address}/data/plugin/scalars/tags")
    except OSError:
        return "", {}
    return next(iter(tags.items()), ("", {}))


@needs_chromium
def test_tensorboard_shows_the_curves_while_the_run_trains(shown_run: tuple[Path, str]) -> None:
    folder, address = shown_run
    wanted = {"train/loss", "train/learning_rate", "train/grad_norm", "train/tokens_per_second", "eval/loss"}
    wanted |= {"train/loss_rank_0", "train/loss_rank_1", "train/step_seconds", "train/memory_device_gib_gpu_1"}
    deadline, name, tags = time.monotonic() + 150, "", {}
    while not wanted <= tags.keys():
        assert time.monotonic() < deadline, f"missing: {sorted(wanted - tags.keys())}"
        time.sleep(1)
        name, tags = scalars(address)
    curve = fetched(f"{address}/data/plugin/scalars/scalars?tag=train%2Floss&run={name}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()[:-1]
    losses = {event["step"]: event["loss"] for event in map(json.loads, lines) if event["event"] == "train"}
    same = [(value, losses[step]) for _, step, value in curve if step in losses]
    assert len(same) >= 10
    for value, loss in same:
        assert value == pytest.approx(loss, rel=1e-6)
    ready = "document.querySelectorAll('svg, canvas').length > 3"
    place = f"{address}/?tagFilter=train%2Floss#timeseries"
    seen = look(
        place,
        "tensorboard.png",
        width=1280,
        wait_for=ready,
        whole=False,
        seconds=60,
        settle=6,
        expression="document.body.textContent",
    )
    assert "RunSmoothedValue" in seen.value  # the curve is there, with its last value under it
    assert {request.split("/")[2] for request in seen.requests if request.startswith("http")} == {address.split("/")[2]}
