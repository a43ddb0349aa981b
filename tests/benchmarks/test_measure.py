"""benchmarks/measure.py: its CPU list run for real, the rows it writes, and the ways in which a case can end."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import measure  # noqa: E402
from cases import CPU_CASES, GPU_CASES, WIDE_CASES, Case, case_named, chosen_cases  # noqa: E402
from plan_accuracy import predict, read_predictions  # noqa: E402
from table import read_rows, read_run  # noqa: E402

from sft_play.facts.hardware import GIB, parse_hardware  # noqa: E402

PATTERN = "lora-2x128-plain"
SOME_CASES = chosen_cases(on_gpu=False, pattern=PATTERN)


def run_measure(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / "measure.py"), *map(str, words)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(table, printed text) of some cases of the CPU list, and one case appended in a second run."""
    out = tmp_path_factory.mktemp("measure") / "runs.csv"
    first = run_measure("--out", out, "--steps", "3", "--cases", PATTERN)
    assert first.returncode == 0, first.stdout + first.stderr
    second = run_measure("--out", out, "--steps", "3", "--case", "tiny-full-2x128-plain")
    assert second.returncode == 0, second.stdout + second.stderr
    return out, first.stdout


def test_every_cpu_case_is_a_row_with_its_figures(measured: tuple[Path, str]) -> None:
    rows = read_rows(measured[0])
    names = [row["notes"].split(";")[0] for row in rows]
    assert names == [f"case {case.name}" for case in (*SOME_CASES, case_named("tiny-full-2x128-plain"))]
    assert [row["id"] for row in rows] == [f"measured-cpu-{number:03d}" for number in range(1, len(rows) + 1)]
    for row in rows:
        assert row["outcome"] == "ok", row["notes"]
        assert 0 < float(row["measured_gib_per_gpu"]) < 2
        assert float(row["tokens_per_second"]) > 0
        assert float(row["predicted_allocated_gib"]) > 0
        assert "CPU" in row["mem_kind"]
        assert row["tokens_scope"] == "one CPU process"
        assert (row["allocated_gib"], row["mfu_percent"]) == ("", "")
        assert "torch " in row["versions"]


def test_the_table_printed_last_holds_every_case(measured: tuple[Path, str]) -> None:
    table = measured[1].split("\n\n")[-2]
    assert table.startswith("case ")
    assert all(case.name in table for case in SOME_CASES)
    assert "tiny cases, memory as growth of the resident set" in measured[1]


def test_cpu_rows_are_named_and_not_judged(measured: tuple[Path, str]) -> None:
    found, problems = read_predictions(measured[0])
    assert found == []
    assert all("unknown model" in problem for problem in problems)


def ended(case: Case, **figures: Any) -> measure.Result:
    return measure.Result(case=case, figures=figures)


@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_a_gpu_row_is_read_back_as_the_run_it_was(case: Case) -> None:
    """plan_accuracy must predict from the row what the row says was predicted."""
    hardware = parse_hardware("1xH200-141")
    figures = {"allocated_bytes": 40 * GIB, "reserved_bytes": 44 * GIB, "device_bytes": 45 * GIB}
    result = ended(case, outcome="ok", tokens_per_second=1000.0, build_seconds=9.0, **figures)
    row = measure.row_of(result, hardware, number=7, steps=8)
    assert set(read_rows_header()) <= set(row)
    prediction = predict(read_run(row))
    assert prediction.predicted["allocated"] == pytest.approx(float(row["predicted_allocated_gib"]), abs=0.01)
    assert prediction.predicted["device"] == pytest.approx(float(row["predicted_device_gib"]), abs=0.01)
    assert prediction.measured["allocated"] == 40
    assert prediction.measured["tokens/s"] == 1000
    assert float(row["mfu_percent"]) > 0


def read_rows_header() -> list[str]:
    """Columns that the table of published runs has."""
    return list(measure.COLUMNS[: measure.COLUMNS.index("notes") + 1])


def test_names_are_unique_and_found_again() -> None:
    every = (*CPU_CASES, *GPU_CASES, *WIDE_CASES)
    assert len({case.name for case in every}) == len(every)
    assert all(case_named(case.name) is case for case in every)
    assert {case.name for case in chosen_cases(on_gpu=True, pattern="32b-qlora")} == {
        "qwen-32b-qlora-1x2048-ckpt", "qwen-32b-qlora-4x2048-ckpt", "qwen-32b-qlora-4x4096-ckpt",
    }  # fmt: skip


def test_list_runs_nothing(tmp_path: Path) -> None:
    done = run_measure("--list", "--out", tmp_path / "runs.csv")
    assert done.returncode == 0, done.stderr
    assert all(case.name in done.stdout for case in CPU_CASES)
    assert not (tmp_path / "runs.csv").exists()


def test_a_case_over_its_limit_is_a_failed_row() -> None:
    hardware = parse_hardware("cpu")
    result = measure.run_case(CPU_CASES[0], hardware, steps=3, limit_seconds=0.2)
    row = measure.row_of(result, hardware, number=1, steps=3)
    assert row["outcome"] == "failed"
    assert "over its limit" in row["notes"]
    assert row["tokens_per_second"] == ""


@pytest.mark.parametrize(("code", "outcome"), [(1, "failed"), (-11, "failed"), (-9, "oom")])
def test_a_crash_is_a_row(monkeypatch: pytest.MonkeyPatch, code: int, outcome: str) -> None:
    monkeypatch.setattr(measure, "run_limited", lambda *args: (code, "RuntimeError: no"))
    result = measure.run_case(CPU_CASES[0], parse_hardware("cpu"), steps=3, limit_seconds=9)
    assert result.outcome == outcome
    assert "RuntimeError: no" in result.figures["error"]


def test_out_of_memory_is_told_by_the_process_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import trial

    def no_memory(case: Case, steps: int) -> dict[str, Any]:
        raise MemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")

    monkeypatch.setattr(trial, "measure", no_memory)
    assert trial.main("tiny-full-2x128-plain", 3, tmp_path / "result.json") == 0
    assert "oom" in (tmp_path / "result.json").read_text()
    assert trial.is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert not trial.is_out_of_memory(RuntimeError("expected scalar type Float"))
    assert not trial.is_out_of_memory(ValueError("out of memory of things to say"))


def test_a_list_ends_in_time_and_goes_on_where_it_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "probe_device", lambda: parse_hardware("cpu"))
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(measure.time, "monotonic", lambda: float(next(clock)))
    limits = []

    def run_case(case: Case, hardware: Any, *, steps: int, limit_seconds: float) -> measure.Result:
        limits.append(limit_seconds)
        return ended(case, outcome="failed", error="no")

    monkeypatch.setattr(measure, "run_case", run_case)
    words = ["--out", str(tmp_path / "runs.csv"), "--cases", "full,qlora", "--resume"]
    assert measure.main([*words, "--total", "250", "--limit", "120"]) == 0
    said = capsys.readouterr().out
    assert limits == [120, 50]
    assert "2 left: tiny-qlora-2x128-plain, tiny-qlora-2x128-ckpt" in said
    assert said.startswith("4 cases")
    assert measure.main(words) == 0
    assert capsys.readouterr().out.startswith("2 cases")
    assert len(read_rows(tmp_path / "runs.csv")) == 4


def test_killing_the_measuring_kills_its_case(tmp_path: Path) -> None:
    environ = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / "measure.py"), "--out", str(tmp_path / "a.csv")]
    running = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert "cases on" in running.stdout.readline()
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    deadline = time.monotonic() + 60
    while not children.read_text().split() and time.monotonic() < deadline:
        time.sleep(0.05)
    (child,) = children.read_text().split()
    running.terminate()
    assert running.wait(30) == 128 + 15
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize(
    ("told", "name", "gib", "flops"),
    [
        (f"NVIDIA H200\t{int(139.7 * GIB)}\t9\t0", "NVIDIA H200", 139.7, 989e12),
        (f"NVIDIA Future 9000\t{48 * GIB}\t13\t0", "NVIDIA Future 9000", 48, 0),
    ],
)
def test_a_gpu_that_only_torch_sees(
    monkeypatch: pytest.MonkeyPatch, told: str, name: str, gib: float, flops: float
) -> None:
    monkeypatch.setattr(measure, "probe_hardware", lambda: parse_hardware("cpu"))
    (gpu,) = measure.probe_device(lambda: told).gpus
    assert (gpu.name, gpu.flops, gpu.bf16) == (name, flops, True)
    assert gpu.memory_bytes / GIB == pytest.approx(gib, abs=0.5)
    assert measure.probe_device(lambda: "").gpus == ()


def test_a_table_of_other_columns_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerow(["a", "b"])
    done = run_measure("--out", path, "--case", "tiny-full-2x128-plain", "--steps", "3")
    assert done.returncode != 0
    assert "other columns" in done.stderr
    assert path.read_text().splitlines() == ["a,b"]
