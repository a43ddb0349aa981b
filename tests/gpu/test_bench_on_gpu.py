"""`make bench` on a GPU: a case that every GPU of 24 GB holds, with its MFU, beside plain trl."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import bench
from benchmarks.bench_page import mfu_percent, read_results
from benchmarks.bench_sides import OURS, PLAIN, summary

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nvml")]
CASE = "llama-3.2-1b-lora-2048"


def test_a_case_has_its_mfu_and_is_not_slower_than_plain_trl(tmp_path: Path) -> None:
    assert bench.main(["--cases", CASE, "--steps", "8", "--output", str(tmp_path)]) == 0
    (machine,) = read_results(tmp_path)
    (row,) = machine["rows"]
    ours, plain = (summary(row["sides"][side]) for side in (OURS, PLAIN))
    assert machine["on_gpu"]
    assert "error" not in plain, plain
    assert ours["first_loss"] == pytest.approx(plain["first_loss"], rel=1e-2)
    assert ours["tokens_per_second"] > 0.97 * plain["tokens_per_second"]
    assert 5 < mfu_percent(ours) < 90
