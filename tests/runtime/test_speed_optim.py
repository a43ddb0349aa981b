"""8-bit optimizers and stored 4-bit values: what they are close to, and that a resumed run goes on to the bit."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from bitsandbytes.optim import PagedAdamW8bit

from sft_play.plan.build import Plan
from sft_play.runtime.model import storage
from sft_play.runtime.paged import page_again
from tests.distributed.runs import Outcome
from tests.faults.test_resume_equality import assert_equal_ends
from tests.tiny import Workplace


def configured(workplace: Workplace, **train: Any) -> None:
    """Full fine-tuning: bitsandbytes keeps the state of weights below 4,096 numbers in 32 bits."""
    workplace.config["tuning"] = {"mode": "full"}
    workplace.write(
        train={**workplace.config["train"], "learning_rate": 1e-3, "eval_strategy": "no", **train},
        run={"name": "tiny", "report_to": []},
    )


@pytest.mark.slow
def test_an_8_bit_run_goes_on_to_the_bit(workplace: Workplace) -> None:
    configured(workplace, optim="adamw_bnb_8bit", max_steps=6, save_steps=3, save_total_limit=6)
    done = workplace.train()
    assert done.code == 0, done.err + done.out
    resumed = Outcome(workplace.path / "runs/tiny")
    states = torch.load(resumed.path / "checkpoints/step-3/optimizer.pt", weights_only=True)["state"].values()
    kept = [part for state in states for part in state.values() if isinstance(part, dict)]
    assert torch.uint8 in {tensor.dtype for part in kept for tensor in part.values()}
    straight = Outcome(shutil.copytree(resumed.path, workplace.path / "straight"))
    for left in ("model", "checkpoints/step-6"):
        shutil.rmtree(resumed.path / left)
    (resumed.path / "record.json").unlink()
    assert "resuming from runs/tiny/checkpoints/step-3" in workplace.train().out
    assert_equal_ends(resumed, straight)


@pytest.mark.slow
def test_an_8_bit_run_is_near_the_plain_one(workplace: Workplace) -> None:
    configured(workplace, max_steps=20)
    for name in ("adamw_torch", "adamw_bnb_8bit"):
        assert workplace.train(RUN_NAME=name, TRAIN_OPTIM=name).code == 0
    near, plain = workplace.losses("adamw_bnb_8bit"), workplace.losses("adamw_torch")
    assert near[0] == plain[0]
    assert near != plain
    assert near == pytest.approx(plain, abs=5e-3)


def test_a_paged_optimizer_needs_a_gpu(workplace: Workplace) -> None:
    done = workplace.train(TRAIN_OPTIM="paged_adamw_8bit")
    assert done.code == 2
    assert "pages GPU memory and needs a GPU" in done.error_lines[0]


def test_loaded_state_is_put_into_the_optimizers_own_buffers() -> None:
    """On a CPU no buffer is paged: one that says so of itself was loaded, and prefetching it would end the run."""

    def made() -> tuple[torch.nn.Parameter, PagedAdamW8bit]:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(128, 64))
        return weight, PagedAdamW8bit([weight], lr=0.1)

    def step(weight: torch.nn.Parameter, optimizer: PagedAdamW8bit) -> None:
        weight.grad = weight.detach().sin()
        optimizer.step()

    weight, optimizer = made()
    step(weight, optimizer)
    saved = optimizer.state_dict()
    other, again = made()
    other.data.copy_(weight.data)
    again.load_state_dict(saved)
    loaded = again.state[other]
    loaded["state1"].is_paged = True
    before = {name: loaded[name].clone() for name in ("state1", "state2")}
    assert page_again(again) == 2
    for name, values in before.items():
        assert torch.equal(again.state[other][name], values)
        assert not getattr(again.state[other][name], "is_paged", False)
    step(weight, optimizer)
    step(other, again)
    assert torch.equal(weight, other)
    assert page_again(torch.optim.AdamW([weight])) == 0


@pytest.mark.parametrize(
    ("asked", "strategy", "got"),
    [
        ("auto", "single", torch.uint8),
        ("auto", "fsdp", torch.bfloat16),
        ("bf16", "single", torch.bfloat16),
        ("fp32", "ddp", torch.float32),
        ("uint8", "single", torch.uint8),
    ],
)
def test_4_bit_values_are_stored_as_asked(asked: str, strategy: str, got: torch.dtype) -> None:
    from types import SimpleNamespace

    from sft_play.config.schema import Config

    values = {"model": {"name": "m"}, "data": {"train": "a"}, "tuning": {"mode": "qlora"}}
    values["tuning"]["quantization"] = {"storage": asked}  # type: ignore[index]
    plan: Plan = SimpleNamespace(dtype="bf16", strategy=strategy)  # type: ignore[assignment]
    assert storage(Config.model_validate(values), plan) is got


@pytest.mark.slow
def test_the_type_of_storage_changes_no_loss(workplace: Workplace) -> None:
    workplace.config["tuning"] = {"mode": "qlora", "lora": {"r": 4, "alpha": 8}}
    workplace.write()
    for name in ("uint8", "fp32"):
        done = workplace.train(RUN_NAME=name, TUNING_QUANTIZATION_STORAGE=name)
        assert done.code == 0, done.err + done.out
    assert workplace.losses("uint8") == workplace.losses("fp32")
