"""The worker under unsloth's own environment, as far as a machine without a GPU goes; it has to be installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

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


def train_there(workplace: Workplace, name: str, *words: str, **changes: Any) -> list[float]:
    """Train the finished run `name` again as `name`-there, with unsloth's Python; gives the losses of its steps.

    Args:
        words: what Python is to run.
        changes: of the plan; the backend becomes unsloth where there are some.
    """
    run = RunDir(workplace.path / f"runs/{name}-there")
    run.create()
    job = json.loads((workplace.path / f"runs/{name}/run.json").read_text())
    job["run"], job["plan"] = str(run.path), {**job["plan"], **changes}
    job["config"]["tuning"]["backend"] = "unsloth" if changes else "bnb"
    run.run_json.write_text(json.dumps(job))
    environ = workplace.environ(UNSLOTH_ALLOW_CPU="1", UNSLOTH_DISABLE_STATISTICS="1")
    environ["UNSLOTH_COMPILE_LOCATION"] = str(run.launch / "unsloth")
    command = [python_of("unsloth"), *words, str(run.run_json)]
    done = subprocess.run(command, cwd=workplace.path, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + run.log.read_text()
    return workplace.losses(run.path.name)


def test_its_versions_train_to_the_bit_like_ours(workplace: Workplace) -> None:
    """The parent's run.json and its rows, read by another datasets, trained by another trl and transformers."""
    workplace.write(train={**workplace.config["train"], "max_steps": 20, "loss": "full"})
    assert workplace.train().code == 0
    losses = train_there(workplace, "tiny", "-m", "sft_play.runtime.worker")
    assert len(losses) == 20
    assert losses == workplace.losses()


@pytest.mark.parametrize("packing", ["false", "true"])
def test_its_layers_learn_what_ours_do(workplace: Workplace, packing: str) -> None:
    """In fp32, rows and packs: the kernels are the real ones, interpreted."""
    workplace.write(train={**workplace.config["train"], "loss": "full", "eval_strategy": "no"})
    assert workplace.train(DATA_PACKING=packing).code == 0
    script = str(ROOT / "tests/runtime/unsloth_on_cpu.py")
    losses = train_there(workplace, "tiny", script, kernels="unsloth")
    assert len(losses) == 4
    assert losses == pytest.approx(workplace.losses(), abs=1e-5)


def test_its_layers_learn_in_16_bits_what_ours_do_in_32(workplace: Workplace) -> None:
    """In fp16: Triton's interpreter multiplies two bf16 values as the integers that their bits spell."""
    workplace.write(train={**workplace.config["train"], "loss": "full", "eval_strategy": "no"})
    assert workplace.train().code == 0
    script = str(ROOT / "tests/runtime/unsloth_on_cpu.py")
    losses = train_there(workplace, "tiny", script, kernels="unsloth", dtype="fp16", autocast="fp16")
    assert losses == pytest.approx(workplace.losses(), abs=2e-3)
    assert losses != workplace.losses()


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
