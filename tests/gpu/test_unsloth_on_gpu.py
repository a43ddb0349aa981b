"""Training in unsloth's kernels, beside the same run through bnb; it needs the environment of unsloth."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sft_play.facts.backends import unsloth_installed
from tests.gpu.conftest import gpu_environ
from tests.tiny import Workplace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("nvml"),
    pytest.mark.skipif(not unsloth_installed(), reason="make install-unsloth was not run here"),
]
# 16-bit products in another order: three digits of the loss.
CLOSE = 0.02


def train_both(workplace: Workplace, **variables: str) -> tuple[list[float], list[float]]:
    for backend in ("bnb", "unsloth"):
        done = workplace.train(RUN_NAME=backend, TUNING_BACKEND=backend, **gpu_environ(), **variables)
        assert done.code == 0, done.err + done.out
    return workplace.losses("bnb"), workplace.losses("unsloth")


def loads_and_answers(workplace: Workplace, run: str) -> None:
    done = workplace.run("infer", RUN=f"runs/{run}", ARGS="--prompt hello --max-new-tokens 4")
    assert done.code == 0, done.err


@pytest.mark.parametrize("mode", ["lora", "qlora"])
@pytest.mark.parametrize("variables", [{}, {"DATA_PACKING": "true"}], ids=["rows", "packs"])
def test_it_learns_what_bnb_learns(gpu_workplace: Workplace, mode: str, variables: dict[str, str]) -> None:
    bnb, unsloth = train_both(gpu_workplace, TUNING_MODE=mode, **variables)
    assert unsloth[0] == pytest.approx(bnb[0], rel=CLOSE), "before the first step both are the base model"
    record: dict[str, Any] = gpu_workplace.record("unsloth")
    assert record["applied"]["kernels"] == "unsloth"
    assert record["stamp"]["backend"] == "unsloth"
    assert record["stamp"]["versions"]["unsloth"] != "absent"
    assert unsloth[-1] < unsloth[0]
    loads_and_answers(gpu_workplace, "unsloth")


def test_gradient_checkpointing_changes_no_loss(gpu_workplace: Workplace) -> None:
    losses = []
    for value in ("true", "false"):
        variables = {"RUN_NAME": value, "TUNING_BACKEND": "unsloth", "TRAIN_GRADIENT_CHECKPOINTING": value}
        done = gpu_workplace.train(**variables, **gpu_environ())
        assert done.code == 0, done.err + done.out
        losses.append(gpu_workplace.losses(value))
    assert losses[0] == pytest.approx(losses[1], rel=CLOSE)


def test_it_goes_on_with_its_own_checkpoint_and_bnb_does_not(gpu_workplace: Workplace) -> None:
    train = {**gpu_workplace.config["train"], "max_steps": 4, "save_steps": 2, "eval_strategy": "no"}
    gpu_workplace.write(train=train)
    straight = gpu_workplace.train(TUNING_BACKEND="unsloth", **gpu_environ())
    assert straight.code == 0, straight.err + straight.out
    run = gpu_workplace.path / "runs/tiny"
    losses = gpu_workplace.losses()
    (run / "record.json").unlink()
    for later in run.glob("checkpoints/step-4"):
        later.rename(run / "later")
    refused = gpu_workplace.train(**gpu_environ())
    assert refused.code == 3
    assert ["error:", "backend", "unsloth", "bnb"] in [line.split() for line in refused.error_lines]
    again = gpu_workplace.train(TUNING_BACKEND="unsloth", **gpu_environ())
    assert again.code == 0, again.err + again.out
    assert "resuming from" in again.out
    assert gpu_workplace.losses() == pytest.approx(losses, rel=CLOSE)
    assert json.loads((run / "run.json").read_text())["stamp"]["backend"] == "unsloth"
