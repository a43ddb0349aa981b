"""From a config to a plan: precision, device, batch, and the refusal of what does not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentProblem
from sft_play.facts.hardware import GIB, parse_hardware
from sft_play.facts.model import read_model_facts
from sft_play.plan.build import PlanInputs, make_plan
from sft_play.plan.layouts import Layout
from sft_play.plan.precision import choose_autocast, choose_dtype
from sft_play.plan.select import allowed_layouts, select_gpus
from sft_play.plan.settings import Placement

MODEL = "meta-llama/Llama-3.2-1B"
T4, A100 = parse_hardware("1xT4").gpus[0], parse_hardware("1xA100-80").gpus[0]


def config(**sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {"model": {"name": MODEL}, "data": {"train": "t"}}
    for section, keys in sections.items():
        base[section] = {**base.get(section, {}), **keys}
    return Config.model_validate(base)


def inputs(machine: str, name: str = MODEL, **sections: dict[str, Any]) -> PlanInputs:
    made = config(**sections)
    return PlanInputs(
        config=made, hardware=parse_hardware(machine), facts=read_model_facts(name), only=allowed_layouts(made)
    )


def test_a_cpu_gets_eight_rows_and_the_default_global_batch() -> None:
    plan = make_plan(inputs("cpu"))
    assert (plan.micro_batch, plan.grad_accum, plan.global_batch) == (8, 4, 32)
    assert (plan.device, plan.optimizer, plan.pin_memory) == ("cpu", "adamw_torch", False)


def test_the_product_is_exact_for_every_combination() -> None:
    for total, micro, accum, machine in product(
        [None, 6, 32, 37], ["auto", 1, 3, 8], ["auto", 1, 4], ["cpu", "2xA100-80", "8xA100-80"]
    ):
        try:
            plan = make_plan(
                inputs(machine, train={"global_batch_size": total, "batch_size": micro, "grad_accum": accum})
            )
        except ConfigError:
            continue
        ranks = 1 if plan.strategy in ("single", "tp", "layer_split") else plan.world_size
        assert micro in ("auto", plan.micro_batch)
        assert accum in ("auto", plan.grad_accum)
        assert plan.micro_batch * plan.grad_accum * ranks == plan.global_batch
        assert total in (None, plan.global_batch)


def test_batch_values_that_contradict_each_other_are_refused() -> None:
    for train in (
        {"batch_size": 3, "global_batch_size": 32},
        {"batch_size": 2, "grad_accum": 2, "global_batch_size": 8},
    ):
        with pytest.raises(ConfigError, match="train"):
            make_plan(inputs("cpu", train=train))


def test_a_gpu_without_bf16_gets_fp16_and_never_bf16() -> None:
    assert choose_dtype(config(), T4)[0] == "fp16"
    assert choose_autocast(config(), T4)[0] == "fp16"
    assert choose_autocast(config(), A100)[0] == "bf16"
    assert choose_dtype(config(tuning={"mode": "full"}), A100)[0] == "fp32"
    with pytest.raises(ConfigError, match=r"train\.bf16"):
        choose_autocast(config(train={"bf16": True}), T4)
    with pytest.raises(ConfigError, match=r"model\.dtype"):
        choose_dtype(config(model={"dtype": "bf16"}), T4)


def test_gpus_are_selected_by_count_by_id_or_all() -> None:
    machine = parse_hardware("4xA100-80")
    assert len(select_gpus(machine, None, default_count=1).gpus) == 1
    assert len(select_gpus(machine, None, default_count=None).gpus) == 4
    assert len(select_gpus(machine, "all", default_count=1).gpus) == 4
    assert [gpu.index for gpu in select_gpus(machine, (1, 3), default_count=1).gpus] == [1, 3]
    assert select_gpus(machine, 1, default_count=None).link_bytes_per_second == 0
    with pytest.raises(EnvironmentProblem, match="GPU 4 was asked for and 4 are there"):
        select_gpus(machine, 5, default_count=1)
    with pytest.raises(EnvironmentProblem, match="no GPU is seen"):
        select_gpus(parse_hardware("cpu"), (0,), default_count=None)
    assert select_gpus(parse_hardware("cpu"), 2, default_count=None).cpu_processes == 2


def test_an_automatic_run_on_a_cpu_machine_needs_no_gpu() -> None:
    assert select_gpus(parse_hardware("cpu"), None, default_count=1).gpus == ()


def test_a_27b_qlora_on_two_h200_takes_32_rows_a_step() -> None:
    made = inputs("2xH200", "google/gemma-3-27b-it", model={"max_seq_len": 2048}, tuning={"mode": "qlora"})
    assert make_plan(made).global_batch == 32


def test_checkpointing_is_switched_on_only_where_it_pays() -> None:
    assert not make_plan(inputs("1xH100-80", train={"batch_size": 4})).gradient_checkpointing
    tight = inputs("1xRTX4090", "meta-llama/Meta-Llama-3-8B", tuning={"mode": "lora"})
    assert make_plan(tight).gradient_checkpointing


def test_a_forced_strategy_that_cannot_fit_is_refused_with_figures_and_a_way_out() -> None:
    made = inputs("2xA100-80", "meta-llama/Meta-Llama-3-8B", tuning={"mode": "full"}, dist={"strategy": "ddp"})
    with pytest.raises(ConfigError) as refused:
        make_plan(made)
    said = refused.value.line()
    assert "strategy ddp does not fit meta-llama/Meta-Llama-3-8B: needs " in said
    assert "GiB" in said
    assert "DIST_STRATEGY=auto fits (" in said


def test_the_proposed_setting_really_fits() -> None:
    made = inputs("1xRTX4090", "meta-llama/Meta-Llama-3-70B", tuning={"mode": "qlora"}, dist={"strategy": "single"})
    with pytest.raises(ConfigError, match="nothing smaller fits"):
        make_plan(made)
    made = inputs("1xRTX4090", "meta-llama/Meta-Llama-3-8B", train={"batch_size": 64, "gradient_checkpointing": True})
    with pytest.raises(ConfigError) as refused:
        make_plan(made)
    words = dict(word.split("=") for word in refused.value.fix.split(" fits ")[0].split())
    rows = int(words["TRAIN_BATCH_SIZE"])
    again = inputs(
        "1xRTX4090", "meta-llama/Meta-Llama-3-8B", train={"batch_size": rows, "gradient_checkpointing": True}
    )
    assert make_plan(again).micro_batch == rows


def test_what_would_fit_is_said_in_memory_where_there_is_no_gpu() -> None:
    made = inputs("cpu", train={"batch_size": 64})
    made = replace(made, hardware=replace(made.hardware, ram_bytes=16 * GIB))
    with pytest.raises(ConfigError) as refused:
        make_plan(made)
    assert re.search(r"fits \(single, \d+\.\d GiB of memory\)", refused.value.fix)


def test_a_forced_layout_is_the_only_one() -> None:
    assert allowed_layouts(config()) == ()
    assert allowed_layouts(config(dist={"strategy": "zero2"})) == (Layout(placement=Placement.ZERO2),)


@pytest.mark.parametrize("strategy", ["fsdp", "tp", "zero1", "zero2", "zero3"])
def test_adafactor_is_refused_where_its_state_would_be_sharded(strategy: str) -> None:
    """On flat shards it takes other steps than on whole weights, and DTensors stop it in the middle."""
    settings: dict[str, Any] = {"train": {"optim": "adafactor"}, "tuning": {"mode": "full"}}
    with pytest.raises(ConfigError, match="adafactor"):
        make_plan(inputs("2xA100-80", dist={"strategy": strategy}, **settings))
    assert make_plan(inputs("2xA100-80", **settings)).strategy == "ddp"


def test_a_command_whose_every_layout_is_impossible_is_refused() -> None:
    made = inputs("2xA100-80", train={"optim": "adafactor"}, tuning={"mode": "full"})
    with pytest.raises(ConfigError, match="adafactor"):
        make_plan(replace(made, only=allowed_layouts(made.config, (Placement.ZERO1, Placement.ZERO2))))
