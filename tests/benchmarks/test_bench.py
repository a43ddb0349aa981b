"""`make bench`: one case measured for real (in `make test-all`), its page, and the page that is committed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench
from benchmarks.bench_cases import CPU_CASES, GPU_CASES, TINY_CASE, case_named
from benchmarks.bench_page import merged, read_results, render_page, render_picture, write_page
from benchmarks.bench_sides import OURS, PLAIN, Bench, clean, summary
from benchmarks.measure import probe_device
from sft_play.facts.hardware import parse_hardware
from tests.tiny import ROOT

RESULTS = ROOT / "benchmarks/results"


def run_bench(arguments: str) -> subprocess.CompletedProcess[str]:
    """As the Makefile starts it: ARGS in the environment."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ARGS": arguments}
    command = [sys.executable, "-m", "benchmarks.bench"]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


def side(speed: float = 10_000.0, **more: Any) -> dict[str, Any]:
    numbers = {"tokens_per_second": speed, "first_step_seconds": 12.0, "peak_bytes": 2**34, "first_loss": 8.0}
    return {**numbers, **more}


def gpu_row(case: str, **sides: Any) -> dict[str, Any]:
    """A row of an H200 with the given sides, or skipped."""
    chosen = bench.options(["--quick"])
    bench.settle(chosen, on_gpu=True)
    row = bench.empty_row(case_named(case), chosen, parse_hardware("1xH200-141"))
    return {**row, **({"sides": sides} if sides else {})}


def a_plan(**rates: float) -> dict[str, Any]:
    words = ("dtype", "autocast", "attention", "loss", "kernels", "optimizer", "gradient_checkpointing", "mfu_formula")
    return {**dict.fromkeys(words, "x"), "flops_per_token": 5e10, "peak_flops_per_second": 1e15, **rates}


@pytest.mark.slow
def test_a_case_is_measured_on_both_sides_over_the_same_rows(tmp_path: Path) -> None:
    done = run_bench(f"--quick --steps 2 --cases tiny --output {tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    (machine,) = read_results(tmp_path)
    (row,) = machine["rows"]
    ours, plain = (summary(row["sides"][name]) for name in (OURS, PLAIN))
    assert ours["first_loss"] == pytest.approx(plain["first_loss"], rel=1e-5)
    for found in (ours, plain):
        assert found["tokens_per_second"] > 0
        assert found["peak_bytes"] > 2**28
        assert found["first_step_seconds"] > 1
    assert not machine["on_gpu"]
    page = (tmp_path / "benchmarks.md").read_text()
    assert "These cases are small" in page
    assert "`tiny`" in page
    assert (tmp_path / "benchmarks.svg").read_text().startswith("<svg")
    assert "times plain trl" in done.stdout


def test_the_committed_page_is_that_of_the_committed_results(tmp_path: Path) -> None:
    write_page(RESULTS, tmp_path / "benchmarks.md")
    for name in ("benchmarks.md", "benchmarks.svg"):
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text(), "make bench ARGS=--render"


def test_every_cpu_case_is_in_the_page() -> None:
    (machine, *_) = [one for one in read_results(RESULTS) if not one["on_gpu"]]
    assert {case.name for case in CPU_CASES} <= {row["case"] for row in machine["rows"]}


@pytest.mark.parametrize("case", [*CPU_CASES, TINY_CASE, *GPU_CASES], ids=lambda case: case.name)
def test_every_case_can_be_planned(case: Any) -> None:
    assert case.why_not(parse_hardware("1xH200-141")) == ""


def test_a_case_that_does_not_fit_is_not_run(tmp_path: Path) -> None:
    small, case = parse_hardware("1xRTX4090"), case_named("llama-3-8b-full-8192")
    chosen = bench.options([])
    bench.settle(chosen, on_gpu=True)
    rows = {case.name: bench.empty_row(case, chosen, small)}
    made = Bench(folder=tmp_path, steps=2, limit=1)
    assert list(bench.measured(made, [case], rows, chosen, on_gpu=True)) == [case]
    assert list(tmp_path.iterdir()) == []
    assert "not run: needs" in bench.said(rows[case.name])
    assert "23.6 are there" in render_page([{"device": "x", "on_gpu": True, "rows": list(rows.values())}], "x.svg")


def test_a_side_that_fails_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    made = Bench(folder=tmp_path, steps=2, limit=0.2)
    found = made.measure(TINY_CASE, OURS, 0)
    assert found == {"error": "over its limit of 0 s"}
    row = gpu_row("llama-3-8b-lora-4096", ours=[side(plan=a_plan())], plain=[found])
    page = render_page([{"device": "x", "on_gpu": True, "rows": [row]}], "x.svg")
    assert "| 10,000 | failed: over its limit of 0 s | - |" in page


def test_gpu_rows_have_mfu_unsloth_and_the_published_figure() -> None:
    row = gpu_row("llama-3-8b-lora-4096", ours=[side(plan=a_plan())], plain=[side(8_000)], unsloth=[side(11_000)])
    page = render_page([{"device": "H200", "on_gpu": True, "rows": [row]}], "x.svg")
    cells = "| 10,000 | 8,000 | 1.25 | 11,000 | 50.0% | 16.00 | 16.00 | 12.0 | 12.0 | 12,473 tokens/s, H100, NeMo"
    assert cells in page
    assert "no GPU" not in page.lower()


def test_the_picture_shows_both_ratios_and_is_always_the_same() -> None:
    row = gpu_row("llama-3-8b-full-8192", ours=[side(plan=a_plan())], plain=[side(8_000)])
    machines = [{"device": "H200", "on_gpu": True, "rows": [row]}]
    picture = render_picture(machines)
    assert picture == render_picture(machines)
    assert "1.25" in picture
    assert "1.5" in picture  # 10,000 over 6,667
    assert "<script" not in picture


def test_a_row_measured_again_replaces_the_older_one(tmp_path: Path) -> None:
    older, newer = ({"case": "a", "steps": steps} for steps in (1, 2))
    assert merged([older, {"case": "b"}], [newer]) == [newer, {"case": "b"}]
    for day, row in (("2030-01-02", newer), ("2030-01-01", older)):
        told = {"device": "x", "on_gpu": False, "rows": [row]}
        (tmp_path / f"bench-{day}-cpu.json").write_text(json.dumps(told))
    assert read_results(tmp_path)[0]["rows"] == [newer]
    bench.write_results(tmp_path, probe_device(), [newer])
    bench.write_results(tmp_path, probe_device(), [{"case": "c"}])
    assert [row["case"] for row in read_results(tmp_path)[0]["rows"]] == ["a", "c"]


def test_rounds_are_medians_and_one_that_failed_is_left_out() -> None:
    rounds = [side(100), {"error": "no"}, side(200), side(400)]
    assert summary(rounds)["tokens_per_second"] == 200
    assert summary([{"error": "no"}]) == {"error": "no"}


def test_a_second_round_is_left_out_where_no_time_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = bench.options(["--total", "300"])
    bench.settle(chosen, on_gpu=False)
    rows = {case.name: bench.empty_row(case, chosen, parse_hardware("cpu")) for case in CPU_CASES[:2]}
    clock = iter(range(0, 10_000, 50))
    monkeypatch.setattr(bench.time, "monotonic", lambda: float(next(clock)))
    sides: list[str] = []
    made = Bench(folder=tmp_path, steps=2, limit=1)
    monkeypatch.setattr(made, "measure", lambda case, side, number: sides.append(side) or {"error": "no"})
    assert len(list(bench.measured(made, CPU_CASES[:2], rows, chosen, on_gpu=False))) == 2 + 1
    assert sides == [OURS, PLAIN, OURS, PLAIN, PLAIN, OURS]
    assert "qlora: no time for round 2" in capsys.readouterr().out


def test_an_unknown_case_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--cases", "lora,nothing"]) == 2
    assert capsys.readouterr().err == "error: --cases: no case is called 'nothing' -> ARGS=--list names them\n"


def test_processes_get_one_gpu_and_nothing_of_make() -> None:
    given = clean({"ARGS": "--quick", "CUDA_VISIBLE_DEVICES": "2,3", "HOME": "/h"})
    assert (given["CUDA_VISIBLE_DEVICES"], given["HOME"], "ARGS" in given) == ("2", "/h", False)


def test_other_work_is_seen_and_told() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            assert bench.busy_share(0.5) > 0.5 / (os.cpu_count() or 1)
        finally:
            other.kill()
    row = {**gpu_row("llama-3-8b-lora-4096", ours=[side(plan=a_plan())], plain=[side()]), "busy": 0.9}
    assert "Other work took up to 90%" in render_page([{"device": "x", "on_gpu": True, "rows": [row]}], "x.svg")
    row["busy"] = 0.01
    assert "Other work" not in render_page([{"device": "x", "on_gpu": True, "rows": [row]}], "x.svg")
