"""Loss, kernels, attention, fp8, offloading and compiling: what the plan chooses, says, counts and refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentProblem, ExitCode, SftPlayError
from sft_play.facts.data import DataFacts
from sft_play.facts.hardware import Hardware, parse_hardware
from sft_play.facts.model import read_model_facts
from sft_play.facts.packages import KERNEL_PACKAGES, installed_packages
from sft_play.plan.build import Plan, PlanInputs, choose, make_plan
from sft_play.plan.fast import choose_kernels, choose_loss
from sft_play.plan.layouts import Layout
from sft_play.plan.report import make_report
from sft_play.plan.settings import Placement
from sft_play.plan.strategy import Candidate
from tests.plan.test_lengths import inputs as lengths_inputs

MODEL = "meta-llama/Llama-3.2-1B"
EVERYTHING = frozenset(KERNEL_PACKAGES)


def machine(text: str, packages: frozenset[str] | None = EVERYTHING) -> Hardware:
    """A described machine on which these packages are installed; None: nobody knows."""
    made = parse_hardware(text)
    return replace(made, gpus=tuple(replace(gpu, packages=packages) for gpu in made.gpus))


def inputs(where: Hardware, only: tuple[Layout, ...] = (), **sections: dict[str, Any]) -> PlanInputs:
    values = {"model": {"name": MODEL}, "data": {"train": "t"}}
    for name, keys in sections.items():
        values[name] = {**values.get(name, {}), **keys}
    config = Config.model_validate(values)
    return PlanInputs(config=config, hardware=where, facts=read_model_facts(MODEL), only=only)


def plan(text: str, packages: frozenset[str] | None = EVERYTHING, **sections: dict[str, Any]) -> Plan:
    return make_plan(inputs(machine(text, packages), **sections))


def chosen(text: str, **sections: dict[str, Any]) -> Candidate:
    found = choose(inputs(machine(text), **sections)).chosen
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "packages", "wanted"),
    [
        ("1xH100-80", EVERYTHING, ("fused", "liger")),
        ("1xH100-80", EVERYTHING - {"liger_kernel"}, ("fused", "none")),
        ("1xH100-80", frozenset(), ("chunked", "none")),
        ("1xH100-80", None, ("fused", "none")),
        ("cpu", None, ("chunked", "none")),
    ],
)
def test_auto_takes_what_is_there_and_says_so(
    text: str, packages: frozenset[str] | None, wanted: tuple[str, str]
) -> None:
    made = plan(text, packages)
    assert (made.loss, made.kernels) == wanted
    assert any(line.startswith(f"kernels {wanted[1]}: ") for line in made.reasons)
    assert any("logits are never held whole" in line for line in made.reasons)


def test_each_is_off_with_one_key() -> None:
    made = plan("1xH100-80", model={"kernels": "none"}, train={"loss": "chunked"})
    assert (made.loss, made.kernels) == ("chunked", "none")


def test_an_unknown_architecture_gets_no_liger() -> None:
    gpu = machine("1xH100-80").gpus[0]
    auto = Config.model_validate({"model": {"name": "m"}, "data": {"train": "t"}})
    assert choose_kernels(auto, gpu, "novel") == ("none", "kernels none: liger has none for novel")
    asked = auto.model_copy(update={"model": auto.model.model_copy(update={"kernels": "liger"})})
    with pytest.raises(ConfigError, match="liger has no kernels for novel"):
        choose_kernels(asked, gpu, "novel")


def test_smoothing_takes_all_logits() -> None:
    assert plan("1xH100-80", train={"label_smoothing": 0.1}).loss == "full"
    gpu = machine("1xH100-80").gpus[0]
    smooth = Config.model_validate({"model": {"name": "m"}, "data": {"train": "t"}, "train": {"label_smoothing": 0.1}})
    assert choose_loss(smooth, gpu)[1] == "loss full: label smoothing needs all logits at once"


FULL_TUNING = {"mode": "full"}
REFUSED: list[tuple[str, frozenset[str] | None, dict[str, Any], type[SftPlayError], str]] = [
    ("1xH100-80", frozenset(), {"model": {"kernels": "liger"}}, EnvironmentProblem, "package liger-kernel"),
    ("1xH100-80", frozenset(), {"model": {"kernels": "hub"}}, EnvironmentProblem, "kernels>=0.18.2"),
    ("1xH100-80", frozenset(), {"train": {"loss": "fused"}}, EnvironmentProblem, "package triton"),
    ("1xH100-80", frozenset(), {"model": {"attention": "flash_attention_2"}}, EnvironmentProblem, "flash-attn"),
    ("1xA100-80", EVERYTHING, {"model": {"attention": "flash_attention_3"}}, ConfigError, "Hopper"),
    ("1xT4", EVERYTHING, {"model": {"attention": "flash_attention_2"}}, ConfigError, "Ampere or later"),
    ("1xT4", EVERYTHING, {"model": {"attention": "flex_attention"}}, ConfigError, "Ampere or later"),
    (
        "1xH100-80", EVERYTHING, {"model": {"attention": "flash_attention_2"}, "train": {"bf16": False}},
        ConfigError, "16 bits only",
    ),
    ("cpu", None, {"model": {"kernels": "liger"}}, EnvironmentProblem, "need a GPU"),
    ("cpu", None, {"train": {"activation_offloading": True}}, ConfigError, "needs a GPU"),
    ("1xA100-80", EVERYTHING, {"train": {"fp8": True}, "tuning": FULL_TUNING}, EnvironmentProblem, "no fp8 units"),
    ("1xH100-80", frozenset(), {"train": {"fp8": True}, "tuning": FULL_TUNING}, EnvironmentProblem, "torchao"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "packages", "sections", "kind", "said"), REFUSED)
def test_what_is_lacking_is_refused(
    text: str, packages: frozenset[str] | None, sections: dict[str, Any], kind: type[SftPlayError], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        plan(text, packages, **sections)
    assert caught.value.fix
    assert (caught.value.exit_code is ExitCode.ENVIRONMENT) == (kind is EnvironmentProblem)


def test_fp8_is_planned_where_it_is_there() -> None:
    made = plan("1xH100-80", train={"fp8": True}, tuning=FULL_TUNING)
    assert any(line.startswith("fp8 products") for line in made.reasons)
    plain = plan("1xH100-80", tuning=FULL_TUNING)
    assert 1.05 < made.predicted["tokens_per_second"] / plain.predicted["tokens_per_second"] < 1.35
    assert "zero3" in choose(inputs(machine("2xH100-80"), train={"fp8": True}, tuning=FULL_TUNING)).illegal


def test_whole_logits_cost_memory_and_liger_saves_time() -> None:
    fixed = {"batch_size": 4, "grad_accum": 1, "gradient_checkpointing": True}
    plain = chosen("1xH100-80", model={"kernels": "none"}, train=fixed)
    full = chosen("1xH100-80", model={"kernels": "none"}, train={**fixed, "loss": "full"})
    liger = chosen("1xH100-80", train=fixed)
    # 4 x 2,048 tokens x 128,256 logits x 12.5 bytes are 12 GiB.
    assert 8 < (full.memory.allocated_bytes - plain.memory.allocated_bytes) / 2**30 < 14
    assert liger.tokens_per_second > 1.05 * plain.tokens_per_second


def test_offloading_saves_device_memory_for_host_memory_and_time() -> None:
    fixed = {"batch_size": 8, "grad_accum": 1, "gradient_checkpointing": False}
    kept = chosen("1xH100-80", train=fixed)
    moved = chosen("1xH100-80", train={**fixed, "activation_offloading": True})
    assert moved.memory.allocated_bytes < 0.5 * kept.memory.allocated_bytes
    assert moved.memory.host_bytes > kept.memory.allocated_bytes - moved.memory.allocated_bytes
    assert moved.tokens_per_second < kept.tokens_per_second
    assert kept.speed is not None
    assert kept.speed.parts["activation transfers"] == 0


def test_compiled_layers_are_faster_and_not_for_every_strategy() -> None:
    fixed = {"batch_size": 4, "grad_accum": 1, "gradient_checkpointing": True}
    plain = chosen("1xH100-80", model={"kernels": "none"}, train=fixed)
    compiled = chosen("1xH100-80", model={"kernels": "none"}, train={**fixed, "torch_compile": True})
    assert compiled.tokens_per_second > plain.tokens_per_second
    found = choose(inputs(machine("2xH100-80"), train={"torch_compile": True}))
    assert {"zero2", "zero3"} <= set(found.illegal)
    assert {"ddp", "fsdp"} <= {one.layout.name for one in found.candidates}


def test_bitsandbytes_optimizers_step_no_sharded_tensors() -> None:
    asked = {"optim": "adamw_bnb_8bit"}
    found = choose(inputs(machine("2xH100-80"), train=asked, tuning=FULL_TUNING))
    assert "bitsandbytes" in found.illegal["fsdp"]
    assert "ddp" in {one.layout.name for one in found.candidates}
    with pytest.raises(ConfigError, match="bitsandbytes' optimizers cannot step"):
        choose(inputs(machine("2xH100-80"), (Layout(placement=Placement.FSDP),), train=asked, tuning=FULL_TUNING))


@pytest.mark.parametrize(("storage", "fits"), [("auto", True), ("bf16", True), ("uint8", False), ("fp32", False)])
def test_sharded_4_bit_values_need_the_type_of_the_weights(storage: str, fits: bool) -> None:
    tuning = {"mode": "qlora", "quantization": {"storage": storage}}
    asked = inputs(machine("2xH100-80"), (Layout(placement=Placement.FSDP),), tuning=tuning)
    if fits:
        assert make_plan(asked).strategy == "fsdp"
        return
    with pytest.raises(ConfigError, match="cannot where they lie in"):
        make_plan(asked)
    assert make_plan(replace(asked, only=(Layout(placement=Placement.DDP),))).strategy == "ddp"


def test_what_is_installed_is_found_without_importing_it() -> None:
    assert installed_packages() <= EVERYTHING


@pytest.mark.parametrize(
    ("keys", "said"),
    [({}, True), ({"train": {"group_by_length": True}}, False), ({"train": {"batch_size": 1}}, False)],
)
def test_much_padding_is_told_with_what_takes_it_away(keys: dict[str, Any], said: bool) -> None:
    lengths = [64] * 900 + [1024] * 100
    facts = data_of(lengths)
    asked = replace(inputs(machine("1xH100-80"), **keys), data=facts)
    told = [line for line in make_report(asked).warnings if "would be padding" in line]
    assert bool(told) == said
    if told:
        assert "TRAIN_GROUP_BY_LENGTH=true leaves about" in told[0]


def data_of(lengths: list[int]) -> DataFacts:
    made = lengths_inputs(lengths).data
    assert made is not None
    return made
