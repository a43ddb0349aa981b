"""The line with which each preset says what the plan gives on its hardware, against the plan of today."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sft_play.cli.inputs import planning_facts
from sft_play.cli.presets import COMMAND, main, presets, with_plan_line
from sft_play.config.resolve import resolve
from sft_play.facts.hardware import GIB, parse_hardware
from sft_play.plan.build import PlanInputs
from sft_play.plan.derive import settings_variants
from sft_play.plan.select import allowed_layouts
from sft_play.plan.strategy import BatchRequest, Candidate, choose_strategy
from tests.tiny import ROOT

EVERY = presets(ROOT / "configs")


def test_every_config_but_the_demo_is_a_preset() -> None:
    """The demo runs on any machine; what it needs is printed when it starts."""
    assert {path.name for path in (ROOT / "configs").glob("*.yaml")} - {path.name for path in EVERY} == {"demo.yaml"}


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_the_plan_line_is_current(path: Path) -> None:
    """The figures move with the plan's constants; the command below writes them anew, the diff is for review."""
    shown, made = path.read_text(), with_plan_line(path)
    differing = "\n".join(
        f"- {old}\n+ {new}" for old, new in zip(shown.split("\n"), made.split("\n"), strict=False) if old != new
    )
    assert shown == made, f"run `{COMMAND}` (with .venv/bin/python) and review the change:\n{differing}"


def test_writing_changes_the_line_alone_and_only_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "rtx4090_sli.yaml"
    shutil.copy(ROOT / "configs" / copy.name, copy)
    before = copy.read_text()
    line = next(line for line in before.split("\n") if line.startswith("# plan there: "))
    copy.write_text(before.replace(line, "# plan there: anything"))
    assert main(tmp_path) == 0
    assert copy.read_text() == before
    copy.write_text(before.replace(line + "\n", ""))
    assert main(tmp_path) == 0
    assert copy.read_text() == before
    assert capsys.readouterr().out.count("wrote") == 2
    assert main(tmp_path) == 0
    assert capsys.readouterr().out == ""


def test_a_preset_that_does_not_fit_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.yaml"
    rest = "data: {train: rows.jsonl}\ndist: {strategy: single}\n"
    path.write_text("# hardware: 1xT4\nmodel: {name: meta-llama/Llama-3.1-70B}\n" + rest)
    assert main(tmp_path) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}: ")
    assert "does not fit" in said or "no strategy fits" in said
    assert said.count("\n") == 1


def needs(name: str, micro_batch: int, grad_accum: int) -> Candidate:
    """The preset under DDP at another batch, whether it fits or not."""
    path = ROOT / "configs" / f"{name}.yaml"
    config = resolve(path, {}).config
    hardware = parse_hardware(path.read_text().split("# hardware: ")[1].split()[0])
    inputs = PlanInputs(config=config, hardware=hardware, facts=planning_facts(config), only=allowed_layouts(config))
    variants = settings_variants(config, inputs.gpu, None)
    batch = BatchRequest(micro_batch=micro_batch, grad_accum=grad_accum)
    found = choose_strategy(inputs.facts, variants, hardware, batch, only=inputs.only).candidates
    return next(one for one in found if one.layout.name == "ddp")


def test_the_figures_in_the_comments_are_the_plans() -> None:
    assert "about 175 GiB a GPU under DDP" in (ROOT / "configs/h200_quad.yaml").read_text()
    assert needs("h200_quad", 16, 2).memory.needed_bytes / GIB == pytest.approx(175, abs=4)
    assert "over a third faster" in (ROOT / "configs/a100_pair.yaml").read_text()
    one, eight = (needs("a100_pair", *batch).speed for batch in ((1, 32), (8, 4)))
    assert one is not None
    assert eight is not None
    assert 1.3 < one.tokens_per_second / eight.tokens_per_second < 1.5
    assert "as fast to 2%" in (ROOT / "configs/rtx4090_sli.yaml").read_text()
    four, six = (needs("rtx4090_sli", *batch).speed for batch in ((4, 4), (6, 4)))
    assert four is not None
    assert six is not None
    assert six.tokens_per_second / four.tokens_per_second == pytest.approx(1, abs=0.02)
