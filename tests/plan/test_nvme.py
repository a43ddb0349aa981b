"""Offload to a disk: host memory for buffers only, and a step that waits for the drive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sft_play.config.schema import Config
from sft_play.facts.hardware import parse_hardware
from sft_play.facts.model import read_model_facts
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.build import PlanInputs
from sft_play.plan.layouts import Layout
from sft_play.plan.memory import estimate
from sft_play.plan.report import make_report
from sft_play.plan.select import allowed_layouts
from sft_play.plan.settings import Dtype, Offload, Placement, Settings
from sft_play.plan.speed import estimate_speed
from tests.plan.conftest import run

MACHINE = parse_hardware("2xRTX4090")


def offloaded(offload: Offload) -> Settings:
    return run(
        "full", micro_batch=1, placement=Placement.ZERO3, gpus=2, offload=offload, master_weights=True, foreach=False
    )


@pytest.mark.parametrize("offload", [Offload.OPTIMIZER, Offload.PARAMS])
def test_the_disk_takes_what_the_host_held(mistral: ModelFacts, offload: Offload) -> None:
    in_host, on_disk = offloaded(offload), replace(offloaded(offload), nvme=True)
    host, disk = estimate(mistral, in_host), estimate(mistral, on_disk)
    share = mistral.parameters / 2
    assert host.nvme_bytes == 0
    assert disk.nvme_bytes == pytest.approx((12 if offload is Offload.OPTIMIZER else 14) * share)
    buffers = 4 * 4 * 1e9 + (2 * (5 * 1e8 + 1e9) if offload is Offload.PARAMS else 0)
    assert disk.host_bytes == pytest.approx(buffers + 2 * share)
    assert disk.allocated_bytes == host.allocated_bytes


def test_a_step_waits_for_the_drive_that_all_gpus_share(mistral: ModelFacts) -> None:
    one = offloaded(Offload.OPTIMIZER)
    host, disk = (estimate_speed(mistral, settings, MACHINE) for settings in (one, replace(one, nvme=True)))
    assert host
    assert disk
    assert disk.parts["NVMe"] == pytest.approx(2 * 12 * mistral.parameters / 3e9)
    assert disk.step_seconds - host.step_seconds == pytest.approx(disk.parts["NVMe"])


def config(**dist: object) -> Config:
    return Config.model_validate(
        {"model": {"name": "m"}, "data": {"train": "t"}, "tuning": {"mode": "full"}, "dist": dist}
    )


def test_offload_under_a_free_strategy_leaves_those_that_can() -> None:
    names = [one.name for one in allowed_layouts(config(cpu_offload="optimizer"))]
    assert names == ["zero2 + optimizer offload", "zero3 + optimizer offload"]
    only = allowed_layouts(config(cpu_offload="params", nvme_path="/nvme"))
    assert only == (Layout(placement=Placement.ZERO3, offload=Offload.PARAMS),)


def test_the_plan_says_how_much_disk_it_needs() -> None:
    made = config(cpu_offload="params", nvme_path="/nvme")
    facts = read_model_facts("meta-llama/Meta-Llama-3-8B")
    report = make_report(PlanInputs(config=made, hardware=MACHINE, facts=facts, only=allowed_layouts(made)))
    assert report.chosen
    assert report.chosen.settings.nvme
    assert report.chosen.settings.param_dtype is Dtype.BF16
    assert [text for text in report.warnings if "105 GiB are needed in dist.nvme_path" in text]
