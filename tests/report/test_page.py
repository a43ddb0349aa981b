"""The page of a run: what it shows of every kind of run, and what it never lets through."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sft_play.record.run_dir import RunDir, locked
from sft_play.report.compare import differences, figures_of, write_comparison
from sft_play.report.curves import MOST_POINTS, Curve, numbered, points_of, thinned
from sft_play.report.page import render_report, write_report
from sft_play.report.read import read_run
from sft_play.report.state import RunState
from tests.report.made import made_run

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}</pre></style>"


def shown(page: str) -> dict[str, str]:
    """The figures of the page by their place in record.json."""
    return dict(re.findall(r'data-key="([^"]+)" data-value="([^"]+)"', page))


def test_the_figures_are_those_of_the_record(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    record = json.loads((folder / "record.json").read_text())
    figures = shown(write_report(folder).read_text())
    assert figures.keys() >= {"eval_loss", "train_loss", "steps", "seconds", "tokens_per_second", "summary.tokens"}
    for key, value in figures.items():
        expected: Any = record
        for part in key.split("."):
            expected = expected[part]
        assert float(value) == expected


def test_nothing_that_was_read_becomes_markup(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", answer=HOSTILE, error=HOSTILE, setting=HOSTILE)
    page = render_report(read_run(folder))
    assert "<script" not in page
    assert "<img" not in page
    assert "alert(1)" in page  # it is shown, as text
    assert page.count("</style>") == 1
    other = made_run(tmp_path / "other", setting="plain")
    assert "<script" not in write_comparison([folder, other]).read_text()


def test_control_characters_do_not_make_the_page_binary(tmp_path: Path) -> None:
    page = write_report(made_run(tmp_path / "r", answer="\0\x1b[31mred\u4e2d")).read_bytes()
    assert "[31mred\u4e2d".encode() in page
    assert not {0, 27} & set(page)


def test_secrets_do_not_reach_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_veryverysecret")
    folder = made_run(tmp_path / "run", answer="it is hf_veryverysecret", setting="hf_veryverysecret")
    page = render_report(read_run(folder))
    assert "veryverysecret" not in page
    assert "it is ***" in page


def test_the_page_may_load_and_run_nothing(tmp_path: Path) -> None:
    page = render_report(read_run(made_run(tmp_path / "run")))
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)\s*=|@import|url\(", page)
    assert set(re.findall(r"https?://[^\"'\s<]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_an_empty_an_unfinished_and_a_damaged_run_have_a_page(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    facts = read_run(run.path)
    assert facts.state is RunState.NOT_STARTED
    assert "no worker was started" in render_report(facts)
    run.run_json.write_text("{ half")
    run.record.write_text("[]")
    run.metrics.write_text('{"event": "train", "step": 1, "loss": NaN}\n{"event": "train"}\nnull\n{"eve')
    assert "no curve" in render_report(read_run(run.path))


def test_the_state_follows_lock_record_and_start(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    assert read_run(folder).state is RunState.DONE
    with locked(RunDir(folder)):
        assert read_run(folder).state is RunState.RUNNING
    for outcome, state in (("Preempted", RunState.STOPPED), ("OutOfMemoryError", RunState.FAILED)):
        (folder / "record.json").write_text(json.dumps({"outcome": outcome, "error": ["it is so"]}))
        assert read_run(folder).state is state
        assert "it is so" in render_report(read_run(folder))
    (folder / "record.json").unlink()
    assert read_run(folder).state is RunState.STOPPED
    assert "killed" in render_report(read_run(folder))


def test_before_and_after_are_the_same_row_of_the_first_and_last_evaluation(tmp_path: Path) -> None:
    page = render_report(read_run(made_run(tmp_path / "run")))
    for text in ("at step 0", "at step 10", "answer of 0 to row 3", "answer of 10 to row 3", "reference 3"):
        assert text in page
    assert "answer of 5 to" not in page


def test_events_of_all_kinds_are_told_in_the_order_of_time(tmp_path: Path) -> None:
    page = render_report(read_run(made_run(tmp_path / "run")))
    told = [page.index(text) for text in ("began", "norm far above", "went on from step 5")]
    assert told == sorted(told)


def test_a_long_curve_keeps_its_ends_and_its_spikes() -> None:
    points = [(float(step), 1.0) for step in range(10_000)]
    points[4321] = (4321.0, 99.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert points[4321] in kept


def test_a_step_that_was_done_again_counts_once_and_nothing_infinite_is_drawn() -> None:
    events = [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}, {"step": 2, "a": 3.0}, {"step": 3, "a": float("inf")}]
    assert points_of(events, "a") == [(1, 1.0), (2, 3.0)]


def test_many_devices_are_drawn_as_lowest_median_and_highest() -> None:
    events = [{"step": step, **{f"m_gpu_{n}": float(n) for n in range(64)}} for step in (1, 2)]
    curves = numbered(events, "m_gpu", "GPU")
    assert [curve.points[0][1] for curve in curves] == [63.0, 31.5, 0.0]
    assert numbered(events[:1], "m_gpu_1", "GPU") == []
    few = [{"step": 1, "m_gpu_0": 1.0, "m_gpu_1": 2.0}]
    assert numbered(few, "m_gpu", "GPU")[1] == Curve(name="GPU 1", points=[(1, 2.0)])


def test_a_comparison_shows_the_differences_and_nothing_else(tmp_path: Path) -> None:
    folders = [made_run(tmp_path / name, setting=name) for name in ("a", "b")]
    runs = [read_run(folder) for folder in folders]
    assert differences(runs) == [("train.note", "a", "b")]
    path = write_comparison(folders)
    assert path == tmp_path / "compare-a-b.html"
    assert path.read_text().count("<svg") >= 3


def test_a_run_without_a_figure_is_not_named_in_its_chart_and_keeps_its_colour(tmp_path: Path) -> None:
    folders = [made_run(tmp_path / name) for name in ("a", "b", "c")]
    lines = (folders[0] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folders[0] / "metrics.jsonl").write_text("".join(line for line in lines if '"eval"' not in line))
    charts = {one.title: one for one in figures_of([read_run(folder) for folder in folders], ["a", "b", "c"])}
    assert [name for name, _ in charts["Training loss"].legend] == ["a", "b", "c"]
    assert charts["Held-out loss"].legend == charts["Training loss"].legend[1:]
    drawn = re.findall(r'class="series (c\d) line"', charts["Held-out loss"].svg)
    assert set(drawn) >= {"c1", "c2"}
    (alone,) = [
        one for one in figures_of([read_run(folder) for folder in folders[:2]], ["a", "b"]) if "Held" in one.title
    ]
    assert [name for name, _ in alone.legend] == ["b"]
