"""The batch arithmetic: the product is exact or the config is refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.facts.accelerator import Accelerator
from sft_play.plan.build import choose_autocast, choose_dtype, make_plan, solve_batch

T4 = Accelerator(kind="cuda", name="T4", capability=(7, 5), uuid="GPU-1")
A100 = Accelerator(kind="cuda", name="A100", capability=(8, 0), uuid="GPU-2")


def config(**train: Any) -> Config:
    return Config.model_validate({"model": {"name": "m"}, "data": {"train": "t"}, "train": train})


@pytest.mark.parametrize(
    ("train", "world", "expected"),
    [
        ({}, 1, (8, 4)),
        ({"global_batch_size": 6}, 1, (6, 1)),
        ({"global_batch_size": 14}, 1, (7, 2)),
        ({"batch_size": 4}, 1, (4, 8)),
        ({"batch_size": 64}, 1, (64, 1)),
        ({"grad_accum": 4}, 1, (8, 4)),
        ({"grad_accum": 1}, 1, (8, 1)),
        ({"grad_accum": 1, "global_batch_size": 32}, 1, (32, 1)),
        ({"batch_size": 3}, 1, (3, 10)),
        ({"batch_size": 3, "grad_accum": 5}, 2, (3, 5)),
        ({"global_batch_size": 32}, 4, (8, 1)),
    ],
)
def test_automatic_values(train: dict[str, Any], world: int, expected: tuple[int, int]) -> None:
    assert solve_batch(config(**train), world_size=world)[:2] == expected


def test_the_product_is_exact_for_every_combination() -> None:
    for total, micro, accum, world in product([None, 1, 6, 32, 37], ["auto", 1, 3, 8], ["auto", 1, 4], [1, 2, 3, 8]):
        made = config(global_batch_size=total, batch_size=micro, grad_accum=accum)
        try:
            rows, times, reason = solve_batch(made, world_size=world)
        except ConfigError:
            continue
        assert micro in ("auto", rows)
        assert accum in ("auto", times)
        assert total in (None, rows * times * world)
        assert f"global batch {rows * times * world} = {rows} x {times} x {world}" in reason


def test_what_cannot_divide_is_refused() -> None:
    for train in (
        {"batch_size": 3, "global_batch_size": 32},
        {"batch_size": 2, "grad_accum": 2, "global_batch_size": 8},
    ):
        with pytest.raises(ConfigError):
            solve_batch(config(**train), world_size=1)


def test_a_gpu_without_bf16_gets_fp16_and_never_bf16() -> None:
    assert choose_dtype(config(), T4)[0] == "fp16"
    assert choose_autocast(config(), T4)[0] == "fp16"
    assert choose_autocast(config(), A100)[0] == "bf16"
    with pytest.raises(ConfigError, match=r"train\.bf16"):
        choose_autocast(config(bf16=True), T4)


def test_the_gpu_of_dist_gpus_is_taken() -> None:
    two = Config.model_validate({"model": {"name": "m"}, "data": {"train": "t"}, "dist": {"gpus": [1]}})
    plan = make_plan(two, [T4, A100])
    assert (plan.device_name, plan.device_uuid) == ("A100", "GPU-2")
    assert plan.optimizer == "adamw_torch_fused"
    assert plan.gradient_checkpointing
