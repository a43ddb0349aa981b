"""Every config that ships is planned on the hardware that it names, and fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sft_play.config.resolve import resolve
from sft_play.config.rules import refuse_unavailable
from sft_play.facts.hardware import GIB, parse_hardware
from sft_play.facts.model import read_model_facts
from sft_play.plan.build import PlanInputs, make_plan
from sft_play.plan.derive import settings_variants
from sft_play.plan.report import make_report
from sft_play.plan.select import allowed_layouts
from sft_play.plan.strategy import BatchRequest, choose_strategy
from tests.tiny import ROOT

PRESETS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.name != "demo.yaml")


def hardware_of(path: Path) -> str:
    (named,) = re.findall(r"^# hardware: (\S+)$", path.read_text(), re.M)
    return named


def inputs_of(path: Path) -> PlanInputs:
    config = resolve(path, {}).config
    return PlanInputs(
        config=config,
        hardware=parse_hardware(hardware_of(path)),
        facts=read_model_facts(config.model.name),
        only=allowed_layouts(config),
    )


def test_the_presets_that_users_look_for_are_there() -> None:
    names = {path.stem for path in PRESETS}
    assert names >= {"run_bnb", "run_unsloth", "multi_gpu_config", "rtx4090_sli", "a100_pair", "h200_quad"}
    assert names >= {"full_1b", "full_8b", "lora_8b_24gb", "qlora_70b_2x24gb", "domain_adaptation"}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_fits_its_hardware_and_warns_of_nothing_it_could_mend(path: Path) -> None:
    report = make_report(inputs_of(path))
    assert report.refusal is None, report.refusal
    assert not [text for text in report.warnings if "learning_rate" in text or "global_batch_size" in text]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_opens_with_what_it_is_for_and_how_to_run_it(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n# ")
    assert f"#   make plan CONFIG=configs/{path.name} HARDWARE={hardware_of(path)}\n" in text


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_no_preset_waits_for_a_later_version(path: Path) -> None:
    refuse_unavailable(resolve(path, {}))


@pytest.mark.parametrize(
    ("name", "micro_batch", "grad_accum", "fits"),
    [("rtx4090_sli", 6, 4, True), ("rtx4090_sli", 4, 4, True), ("a100_pair", 8, 4, True), ("h200_quad", 16, 2, False)],
)
def test_whether_the_batches_of_the_guides_fit(name: str, micro_batch: int, grad_accum: int, fits: bool) -> None:
    """Under DDP, the strategy that the preset takes."""
    inputs = inputs_of(ROOT / f"configs/{name}.yaml")
    choice = choose_strategy(
        inputs.facts,
        settings_variants(inputs.config, inputs.gpu, None),
        inputs.hardware,
        BatchRequest(micro_batch=micro_batch, grad_accum=grad_accum),
    )
    (ddp,) = [one for one in choice.candidates if one.layout.name == "ddp"]
    assert ddp.fits == fits, ddp.reason


def test_the_figures_in_the_presets_comments() -> None:
    assert "leaves 2.6 GiB more free" in (ROOT / "configs/rtx4090_sli.yaml").read_text()
    inputs = inputs_of(ROOT / "configs/rtx4090_sli.yaml")
    needed = []
    for rows in (4, 6):
        variants = settings_variants(inputs.config, inputs.gpu, None)
        choice = choose_strategy(inputs.facts, variants, inputs.hardware, BatchRequest(micro_batch=rows, grad_accum=4))
        needed.append(next(one.memory.needed_bytes for one in choice.candidates if one.layout.name == "ddp") / GIB)
    assert needed[1] - needed[0] == pytest.approx(2.6, abs=0.06)
    offloaded = make_report(inputs_of(ROOT / "configs/qlora_70b_2x24gb.yaml")).chosen
    assert offloaded is not None
    assert offloaded.memory.host_bytes * 2 / GIB == pytest.approx(74, abs=1)
    assert make_plan(inputs_of(ROOT / "configs/a100_pair.yaml")).micro_batch == 1
