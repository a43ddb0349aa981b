"""The learning rate follows the global batch as the config says, and the plan shows how."""

from __future__ import annotations

from typing import Any

import pytest

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.facts.hardware import parse_hardware
from sft_play.facts.model import read_model_facts
from sft_play.plan.build import PlanInputs, make_plan
from sft_play.plan.rate import rate_reason, scaled_learning_rate


def config_of(**train: Any) -> Config:
    return Config.model_validate({"model": {"name": "Qwen/Qwen3-0.6B"}, "data": {"train": "a"}, "train": train})


@pytest.mark.parametrize(
    ("scaling", "batch", "rate"),
    [("none", 128, 1e-4), ("linear", 128, 4e-4), ("sqrt", 128, 2e-4), ("linear", 8, 2.5e-5), ("sqrt", 32, 1e-4)],
)
def test_the_rate_is_scaled_from_its_base_batch(scaling: str, batch: int, rate: float) -> None:
    base = {} if scaling == "none" else {"lr_base_batch": 32}
    config = config_of(learning_rate=1e-4, lr_scaling=scaling, **base)
    assert scaled_learning_rate(config, batch) == pytest.approx(rate, rel=1e-12)
    assert f"{rate:.4g} at {batch} rows a step" in rate_reason(config, batch)


def test_a_scaling_without_a_base_is_refused() -> None:
    with pytest.raises(ConfigError, match="base batch"):
        scaled_learning_rate(config_of(lr_scaling="linear"), 8)


def test_the_plan_holds_the_rate_of_its_own_batch_and_says_it() -> None:
    config = config_of(learning_rate=1e-4, lr_scaling="linear", lr_base_batch=16, global_batch_size=64)
    facts = read_model_facts(config.model.name)
    plan = make_plan(PlanInputs(config=config, hardware=parse_hardware("4xH100-80"), facts=facts))
    assert (plan.global_batch, plan.learning_rate) == (64, 4e-4)
    assert "learning rate 0.0004 at 64 rows a step: 0.0001 x 64 / 16" in plan.reasons
