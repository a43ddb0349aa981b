"""The worker under unsloth's own environment, as far as a machine without a GPU goes; it has to be installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sft_play.facts.backends import python_of, unsloth_installed
from sft_play.launch.execute import execute
from sft_play.launch.spec import WorkerInputs, launch_spec
from sft_play.record.run_dir import RunDir
from tests.launch.planned import make_config, make_plan
from tests.tiny import ROOT, Workplace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not unsloth_installed(), reason="make install-unsloth was not run here"),
]
# unsloth asks the card what it is before it loads anything; the answers stand in for one.
LOAD = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
import torch
card = SimpleNamespace(name="a card", total_memory=24 * 2**30, major=8, minor=9, multi_processor_count=100)
torch.cuda.get_device_properties = lambda *_: card
torch.cuda.get_device_capability = lambda *_: (8, 9)
torch.cuda.mem_get_info = lambda *_: (20 * 2**30, 24 * 2**30)
torch.cuda.current_device = lambda: 0
import unsloth, unsloth.models.llama as llama
llama.get_current_device, llama.DEVICE_TYPE_TORCH = (lambda: "cpu"), "cpu"
from transformers import Trainer
before = dict(vars(Trainer))
import trl
from sft_play.config.schema import Config
from sft_play.plan.build import Plan
from sft_play.runtime import unsloth as ours
from sft_play.runtime.compiling import decoder_layers
from sft_play.runtime.dist import Ranks
from sft_play.runtime.fused import applied_kernels
job = __import__("json").loads(Path(sys.argv[1]).read_text())
ours_ranks = SimpleNamespace(local_rank="cpu")
config, path = Config.model_validate(job["config"]), Path(job["model_path"])
model = ours.load_unsloth(config, Plan(**job["plan"]), path, Path(sys.argv[2]), ours_ranks)
assert vars(Trainer) == before, "the Trainer is not upstream's"
assert trl.SFTTrainer.__module__ == "trl.trainer.sft_trainer"
assert ours.missing_layers(list(decoder_layers(model))) == []
assert applied_kernels(model) == "unsloth"
assert model.is_gradient_checkpointing
lora = model.peft_config["default"]
assert (lora.r, lora.lora_alpha, len(lora.target_modules)) == (4, 8, 7), lora
assert all("lora_" in name for name, weight in model.named_parameters() if weight.requires_grad)
layers = list(decoder_layers(model))
layers[0].self_attn.forward = type("Plain", (), {"forward": lambda self: None})().forward
assert ours.missing_layers(layers) == ["1 of 2 attention layers are not unsloth's"]
print("loaded")
"""


def run_in_environment(*words: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "UNSLOTH_ALLOW_CPU": "1"}
    command = [python_of("unsloth"), *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)


def test_its_versions_train_to_the_bit_like_ours(workplace: Workplace) -> None:
    """The parent's run.json and its rows, read by another datasets, trained by another trl and transformers."""
    workplace.write(train={**workplace.config["train"], "max_steps": 20, "loss": "full"})
    assert workplace.train().code == 0
    other = workplace.path / "runs/other"
    shutil.copytree(workplace.path / "runs/tiny/launch", other / "launch")
    job = json.loads((workplace.path / "runs/tiny/run.json").read_text())
    (other / "run.json").write_text(json.dumps({**job, "run": str(other)}))
    done = run_in_environment("-m", "sft_play.runtime.worker", str(other / "run.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(workplace.losses("other")) == 20
    assert workplace.losses("other") == pytest.approx(workplace.losses(), abs=1e-4)


def test_a_planned_gpu_that_is_not_there_is_one_line_after_unsloth_was_imported(
    workplace: Workplace, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    config = make_config(tuning={"backend": "unsloth"}, model={"name": str(workplace.model)})
    plan = make_plan("single", gpus=1, kernels="unsloth")
    inputs = WorkerInputs(model_path=workplace.model, splits={}, stamp={}, config_yaml="")
    code, lines = execute(launch_spec(config, plan, run, inputs), run, {**os.environ, "PYTHONPATH": str(ROOT)})
    assert code == 4, run.log.read_text()
    assert len(lines) == 1
    assert "sees no GPU" in lines[0]
    assert "make install-unsloth TORCH_INDEX" in lines[0]


def test_model_and_adapter_are_unsloths_and_the_trainer_is_upstreams(workplace: Workplace, tmp_path: Path) -> None:
    config = make_config(
        tuning={"backend": "unsloth", "lora": {"r": 4, "alpha": 8}},
        model={"name": str(workplace.model), "max_seq_len": 128},
    )
    job = {
        "config": config.model_dump(mode="json"),
        "plan": make_plan("single", gpus=1, kernels="unsloth").__dict__,
        "model_path": str(workplace.model),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = run_in_environment("-c", LOAD, str(tmp_path / "job.json"), str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "loaded"
