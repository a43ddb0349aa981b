"""The keys of `dist` are honoured by the layouts that are left, or refused by name with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.facts.hardware import parse_hardware
from sft_play.facts.model import read_model_facts
from sft_play.plan.build import PlanInputs, make_plan
from sft_play.plan.layouts import layouts
from sft_play.plan.select import allowed_layouts
from sft_play.plan.settings import Placement


def config_of(mode: str = "full", **dist: Any) -> Config:
    values = {"model": {"name": "Qwen/Qwen3-0.6B"}, "data": {"train": "a"}, "tuning": {"mode": mode}, "dist": dist}
    return Config.model_validate(values)


def names(**dist: Any) -> set[str]:
    return {one.name for one in allowed_layouts(config_of(**dist)) or layouts()}


def refusal(machine: str = "2xH100-80", **dist: Any) -> str:
    """What a run of this config on this machine is refused with."""
    with pytest.raises(ConfigError) as caught:
        planned(machine, **dist)
    return caught.value.line()


def planned(machine: str, **dist: Any) -> Any:
    config = config_of(**dist)
    facts = read_model_facts(config.model.name)
    only = allowed_layouts(config)
    return make_plan(PlanInputs(config=config, hardware=parse_hardware(machine), facts=facts, only=only))


def test_what_is_sharded_decides_what_is_left() -> None:
    assert names(zero_level=2) == {"zero2"}
    assert names(zero_level=3, cpu_offload="params") == {"zero3 + params offload"}
    weights = {"fsdp", "hsdp", "zero3", "zero3 + optimizer offload", "zero3 + params offload", "fsdp + params offload"}
    assert names(shard_weights=True) == weights
    assert names(shard_weights=False, shard_gradients=True) == {"zero2", "zero2 + optimizer offload"}
    assert names(shard_gradients=False) == {"single", "ddp", "zero1", "tp", "layer_split"}
    assert names(sharding_factor=4) == {"hsdp"}
    assert not names(sharding_factor=1) & weights
    assert names(sharding_factor="all") == weights - {"hsdp"}
    assert names(cpu_offload="optimizer", nvme_path="/fast") == {"zero3 + optimizer offload"}


def test_a_key_of_communication_leaves_the_engines_that_have_it() -> None:
    sharded = {"fsdp", "hsdp", "fsdp + params offload"}
    assert names(all_to_all_reduce=True) == sharded
    assert names(copy_engine_all_gather=True) == sharded
    assert names(prefetch=True) == sharded | {name for name in names() if name.startswith("zero3")}
    assert names(prefetch=False) == {name for name in names() if name.startswith("zero3")}
    assert names() - names(copy_engine_send_recv=True) == {"single", "layer_split"}


@pytest.mark.parametrize(
    ("dist", "said"),
    [
        ({"strategy": "ddp", "all_to_all_reduce": True}, "all_to_all_reduce: ddp reduces its gradients by all"),
        ({"strategy": "zero2", "all_to_all_reduce": True}, "only with gradients rounded to 4 bits"),
        ({"strategy": "tp", "all_to_all_reduce": True}, "tp reduces no gradients between ranks"),
        ({"strategy": "zero3", "copy_engine_all_gather": True}, "zero3 gathers into memory that NCCL cannot copy"),
        ({"strategy": "ddp", "prefetch": True}, "dist.prefetch: ddp gathers no weights"),
        ({"strategy": "zero2", "prefetch": False}, "dist.prefetch: zero2 gathers no weights"),
        ({"strategy": "fsdp", "prefetch": False}, "always gathers ahead in its backward pass"),
        ({"strategy": "fsdp", "cpu_offload": "optimizer"}, "use cpu_offload: params"),
        ({"zero_level": 2, "cpu_offload": "params"}, "weights can be moved only where they are sharded"),
        ({"strategy": "layer_split", "copy_engine_send_recv": True}, "is one process and sends nothing"),
        ({"copy_engine_send_recv": True, "sync_backend": "gloo"}, "copy engines are driven by NCCL"),
        ({"shard_gradients": False, "all_to_all_reduce": True}, "and no other strategy is left"),
        ({"shard_weights": True, "sharding_factor": 1}, "the keys of dist leave no strategy"),
    ],
)  # fmt: skip
def test_what_no_engine_has_is_refused_by_name(dist: dict[str, Any], said: str) -> None:
    line = refusal(**dist)
    assert said in line
    assert " -> " in line


def test_what_this_machine_cannot_do_is_refused() -> None:
    assert "everything is in host memory already" in refusal("cpu", strategy="fsdp", cpu_offload="params")
    assert "copy engines are driven by NCCL" in refusal("cpu", strategy="fsdp", copy_engine_all_gather=True)
    far = refusal("2x8xH100-80", strategy="fsdp", copy_engine_all_gather=True)
    assert "copy engines reach the GPUs of one machine; use dist.strategy: hsdp there" in far
    assert planned("2x8xH100-80", strategy="hsdp", sharding_factor=8, copy_engine_all_gather=True).strategy == "hsdp"
    assert planned("2x8xH100-80", copy_engine_all_gather=True).strategy == "hsdp"


def test_what_can_be_had_is_planned() -> None:
    assert planned("2xH100-80", all_to_all_reduce=True).strategy == "fsdp"
    assert planned("2xH100-80", strategy="zero3", prefetch=False).strategy == "zero3"
    plan = planned("2xH100-80", strategy="ddp", sync_backend="gloo")
    assert plan.backend == "gloo"
    assert any(reason.startswith("warning: gloo between GPUs") for reason in plan.reasons)
    assert not [reason for reason in planned("2xH100-80").reasons if "gloo" in reason]


def test_every_placement_has_a_word_on_every_key() -> None:
    """No layout slips through a table that was written for the others."""
    for placement in Placement:
        for key in ("all_to_all_reduce", "copy_engine_all_gather"):
            found = {one.placement for one in allowed_layouts(config_of(**{key: True}))}
            assert (placement in found) == (placement in (Placement.FSDP, Placement.HSDP))
