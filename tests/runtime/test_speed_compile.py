"""`train.torch_compile`: compiled layers train like plain ones, and go on from a checkpoint to the bit."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from sft_play.runtime.compiling import compile_layers, compiled_layers, decoder_layers
from tests.distributed.runs import Outcome
from tests.tiny import Workplace


def test_the_layers_are_compiled_and_nothing_else(workplace: Workplace) -> None:
    model = AutoModelForCausalLM.from_pretrained(workplace.model, dtype=torch.float32)
    names = list(model.state_dict())
    assert compiled_layers(model) == 0
    compile_layers(model)
    assert compiled_layers(model) == len(list(decoder_layers(model))) == 2
    assert list(model.state_dict()) == names
    assert sum(module._compiled_call_impl is not None for module in model.modules()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_a_compiled_run_is_the_plain_one_and_goes_on_to_the_bit(workplace: Workplace, checkpointing: str) -> None:
    workplace.write(
        train={
            **workplace.config["train"],
            "max_steps": 5,
            "save_steps": 2,
            "save_total_limit": 5,
            "eval_strategy": "no",
            "gradient_checkpointing": checkpointing == "true",
        },
        run={"name": "tiny", "report_to": []},
    )
    assert workplace.train(RUN_NAME="plain").code == 0
    done = workplace.train(TRAIN_TORCH_COMPILE="true")
    assert done.code == 0, done.err + done.out
    assert "compiled: each decoder layer" in done.out
    assert workplace.losses("tiny") == pytest.approx(workplace.losses("plain"), abs=1e-5)
    resumed = Outcome(workplace.path / "runs/tiny")
    straight = Outcome(shutil.copytree(resumed.path, workplace.path / "straight"))
    for left in ("adapter", "checkpoints/step-4", "checkpoints/step-5"):
        shutil.rmtree(resumed.path / left)
    (resumed.path / "record.json").unlink()
    assert "resuming from runs/tiny/checkpoints/step-2" in workplace.train(TRAIN_TORCH_COMPILE="true").out
    for name in ("loss", "grad_norm"):
        assert resumed.series(name) == straight.series(name)
