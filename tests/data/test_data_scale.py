"""A hundred thousand rows: checked, prepared and found again within the times that docs and users count on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sft_play.data.report import check_rows
from tests.data.test_data_prepare import Bench

ROWS = 100_000
CHECK_SECONDS, CACHED_SECONDS = 20.0, 1.0


@pytest.mark.slow
def test_a_hundred_thousand_rows(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.train.open("w") as stream:
        for n in range(ROWS):
            stream.write(
                f'{{"prompt": "What is {n} times {n % 97}?", "completion": "It is {n * (n % 97)}, of course."}}\n'
            )
        stream.write("broken\n")
    config = bench.config(on_bad_row="skip")
    started = time.monotonic()
    report = check_rows(config, 100, lambda line: None)
    assert time.monotonic() - started < CHECK_SECONDS
    assert report.bad == 1
    first = bench.prepare(config)
    assert first.facts.splits["train"].rows_kept == ROWS
    started = time.monotonic()
    again = bench.prepare(config)
    assert time.monotonic() - started < CACHED_SECONDS
    assert again.hit
