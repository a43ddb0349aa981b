"""Losses and gradients that are not finite, and gradient norms far above the usual."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.runs import Outcome
from tests.faults.hooks import hooked
from tests.faults.test_stop_and_resume import finish, wait_for
from tests.tiny import Done, Workplace

BAD_LOSS = """
def patch(module):
    upstream = module.SFTTrainer.compute_loss
    def compute_loss(self, *items, **named):
        loss = upstream(self, *items, **named)
        return loss * float({value!r}) if rank == {rank} and self.state.global_step == {step} else loss
    module.SFTTrainer.compute_loss = compute_loss
"""
# A NaN in the gradient of one weight, while the loss is a number.
BAD_GRADIENT = """
import torch

def patch(module):
    upstream = module.SFTTrainer.training_step
    def training_step(self, *items, **named):
        loss = upstream(self, *items, **named)
        if self.state.global_step == {step}:
            weight = dict(self.model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
            weight.grad[0, 0] = float("nan")
        return loss
    module.SFTTrainer.training_step = training_step
"""
# Gradients times a thousand in one step.
SPIKE = """
def patch(module):
    upstream = module.SFTTrainer.training_step
    def training_step(self, model, *items, **named):
        loss = upstream(self, model, *items, **named)
        if self.state.global_step == {step}:
            for weight in model.parameters():
                if weight.grad is not None:
                    weight.grad.mul_(1000)
        return loss
    module.SFTTrainer.training_step = training_step
"""
TRAIN = {
    "batch_size": 4, "max_steps": 6, "save_steps": 2, "learning_rate": 1e-3, "warmup": 0, "eval_strategy": "no",
    "scheduler": "linear", "bf16": False,
}  # fmt: skip


def run(workplace: Workplace, patch: str, name: str = "tiny", **variables: str) -> Done:
    workplace.config["tuning"] = {}
    workplace.write(tuning={"mode": "full"}, train=TRAIN, run={"name": name, "report_to": []})
    hook = hooked(workplace.path / "hook", "sft_play.runtime.trainer", patch)
    given = {"CONFIG": "tiny.yaml", "NUM_GPUS": "1", **hook, **variables}
    return workplace.run("train-distributed", **given)


def stopped(workplace: Workplace, done: Done, step: int) -> str:
    """One line and exit 5; the newest checkpoint is finite and before the step. Returns the line."""
    assert done.code == 5, done.out[-2000:] + done.err
    (line,) = done.error_lines
    assert line.startswith(f"error: step {step}: ")
    assert "Traceback" not in done.out + done.err
    run_folder = workplace.path / "runs/tiny"
    assert json.loads((run_folder / "record.json").read_text())["outcome"] == "LossNotFiniteError"
    newest = max(run_folder.glob("checkpoints/step-*"), key=lambda folder: int(folder.name[5:]))
    assert int(newest.name[5:]) < step
    assert all(bool(torch.isfinite(one).all()) for one in load_file(newest / "model.safetensors").values())
    return line


def test_a_loss_that_is_not_finite_names_its_rows(workplace: Workplace) -> None:
    line = stopped(workplace, run(workplace, BAD_LOSS.format(rank=0, step=3, value="inf")), 4)
    rows = re.search(r"the loss is not finite \(prepared rows ([\d, ]+), from 0\)", line)
    assert rows, line
    assert rows[1].split(", ") == order_of_rows()[3]


def order_of_rows() -> list[list[str]]:
    """The rows of each step of one process, as the Trainer's own sampler gives them for seed 42."""
    order = torch.randperm(32, generator=torch.Generator().manual_seed(42)).tolist()
    return [[str(row) for row in order[start : start + 4]] for start in range(0, 32, 4)]


@pytest.mark.fault
def test_a_gradient_that_is_not_finite_names_its_weight(workplace: Workplace) -> None:
    line = stopped(workplace, run(workplace, BAD_GRADIENT.format(step=3)), 4)
    assert "the gradient of model.layers.1.mlp.up_proj.weight is not finite (prepared rows " in line


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.fault),
        pytest.param("fsdp", marks=pytest.mark.slow),
        pytest.param("zero2", marks=pytest.mark.slow),
    ],
)
def test_one_rank_alone_stops_all(workplace: Workplace, strategy: str) -> None:
    ranks = {"NUM_GPUS": "2", "DIST_STRATEGY": strategy, "TRAIN_BATCH_SIZE": "2"}
    line = stopped(workplace, run(workplace, BAD_LOSS.format(rank=1, step=3, value="nan"), **ranks), 4)
    rows = re.search(r"the loss is not finite on rank 1 \(prepared rows ([\d, ]+), from 0\)", line)
    assert rows, line
    assert rows[1].split(", ") == order_of_rows()[3][2:]
    exits = [json.loads(file.read_text()) for file in (workplace.path / "runs/tiny/launch").glob("exit-*.json")]
    assert [one["code"] for one in exits] == [5, 5], "each rank found it by itself"


@pytest.mark.fault
def test_the_plain_trainer_goes_on(workplace: Workplace) -> None:
    """The control: without this program a NaN loss is trained on to the end."""
    script = workplace.path / "plain.py"
    script.write_text(
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "class Bad(Trainer):\n"
        "    def compute_loss(self, *items, **named):\n"
        "        loss = super().compute_loss(*items, **named)\n"
        "        return loss * float('nan') if self.state.global_step == 1 else loss\n"
        "rows = [{'input_ids': [1, 2, 3], 'labels': [1, 2, 3]}] * 8\n"
        "args = TrainingArguments('out', max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to='none')\n"
        "Bad(model, args, train_dataset=rows).train()\n"
        "print('finite', all(bool(w.isfinite().all()) for w in model.parameters()))\n"
    )
    words = [sys.executable, str(script), str(workplace.model)]
    done = subprocess.run(words, cwd=workplace.path, env=workplace.environ(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "finite False" in done.stdout


LONG = {"TRAIN_MAX_STEPS": "24", "TRAIN_SAVE_STEPS": "20"}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_spike_is_skipped_on_all_ranks_and_counted(workplace: Workplace, ranks: int) -> None:
    given = {"NUM_GPUS": str(ranks), "TRAIN_BATCH_SIZE": str(4 // ranks), "TRAIN_ON_SPIKE": "skip"}
    given |= {"TRAIN_MAX_STEPS": "24", "TRAIN_SAVE_STEPS": "1", "TRAIN_SAVE_TOTAL_LIMIT": "9"}
    done = run(workplace, SPIKE.format(step=20), **given)
    assert done.code == 0, done.err
    assert re.search(
        r"warning: step 21: gradient norm \S+, \d+ times the median of late; the step is skipped", done.out
    )
    assert "1 spikes of the gradient norm, 1 steps skipped for them" in done.out
    found = Outcome(workplace.path / "runs/tiny")
    assert found.record["spikes"] == {"found": 1, "skipped": 1}
    (told,) = [one for one in found.events("event") if one["kind"] == "spike"]
    assert told["step"] == 21
    assert told["text"].endswith("; the step is skipped")
    at = {step: load_file(found.path / f"checkpoints/step-{step}/model.safetensors") for step in (20, 21, 22)}
    assert all(torch.equal(at[20][name], at[21][name]) for name in at[20])
    assert not all(torch.equal(at[21][name], at[22][name]) for name in at[20])
    rates = found.series("learning_rate")
    assert rates[20] - rates[21] == pytest.approx(rates[19] - rates[20])


@pytest.mark.slow
def test_the_window_survives_a_resume_to_the_bit(workplace: Workplace) -> None:
    """Stopped before the spike: only with the norms of before can the resumed run tell it."""
    assert run(workplace, SPIKE.format(step=20), "straight", **LONG).code == 0
    hook = hooked(workplace.path / "hook", "sft_play.runtime.trainer", SPIKE.format(step=20))
    workplace.write(tuning={"mode": "full"}, train=TRAIN, run={"name": "tiny", "report_to": []})
    process = workplace.start("train", CONFIG="tiny.yaml", **hook, **LONG)
    wait_for(process, "step 17/24")
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 75
    done = run(workplace, SPIKE.format(step=20), **LONG)
    assert done.code == 0, done.err
    assert "train.on_spike: skip would leave the step out" in done.out
    states = [window(workplace.path / "runs" / name) for name in ("straight", "tiny")]
    assert states[0] == states[1]
    assert len(states[0]["norms"]) == 24
    assert Outcome(workplace.path / "runs/tiny").record["spikes"] == {"found": 1, "skipped": 0}


def window(run_folder: Path) -> dict[str, object]:
    state = json.loads((run_folder / "checkpoints/step-24/trainer_state.json").read_text())
    return state["stateful_callbacks"]["SpikeCallback"]["attributes"]
