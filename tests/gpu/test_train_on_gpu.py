"""The real program on a tiny model on the GPU, and the same run beside it on the CPU."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.gpu.conftest import gpu_environ
from tests.tiny import Workplace

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nvml")]
TUNINGS = [{"mode": "full"}, *({"mode": mode, "lora": {"r": 4, "alpha": 8}} for mode in ("lora", "qlora"))]


def planned(workplace: Workplace, name: str = "tiny") -> dict[str, Any]:
    return json.loads((workplace.path / "runs" / name / "run.json").read_text())["plan"]


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda tuning: tuning["mode"])
def test_a_run_ends_well_and_keeps_its_figures(gpu_workplace: Workplace, tuning: dict[str, Any]) -> None:
    import torch

    gpu_workplace.config["tuning"] = tuning
    gpu_workplace.write()
    done = gpu_workplace.train(**gpu_environ())
    assert done.code == 0, done.err + done.out
    plan, record = planned(gpu_workplace), gpu_workplace.record()
    bf16 = torch.cuda.get_device_capability()[0] >= 8
    assert (plan["device"], plan["autocast"]) == ("cuda", "bf16" if bf16 else "fp16")
    losses = gpu_workplace.losses()
    assert len(losses) == 4
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    predicted, measured = record["predicted"], record["measured"]
    assert predicted["allocated_bytes"] > 0
    assert 0 < measured["memory_bytes"] <= measured["reserved_bytes"] <= measured["device_bytes"]
    assert record["tokens_per_second"] > 0
    assert record["quantised_layers"] == (14 if tuning["mode"] == "qlora" else 0)


def test_in_fp32_the_gpu_trains_like_the_cpu(workplace: Workplace) -> None:
    assert workplace.train(RUN_NAME="cpu").code == 0
    on_gpu = workplace.train(RUN_NAME="gpu", **gpu_environ())
    assert on_gpu.code == 0, on_gpu.err + on_gpu.out
    assert planned(workplace, "gpu")["device"] == "cuda"
    # Kernels add in another order; TF32 is off unless it is asked for, and would show here as 1e-3.
    assert workplace.losses("gpu")[0] == pytest.approx(workplace.losses("cpu")[0], rel=1e-5)
    assert workplace.losses("gpu") == pytest.approx(workplace.losses("cpu"), rel=1e-3)


@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_in_bf16_the_gpu_starts_where_fp32_does(gpu_workplace: Workplace, checkpointing: str) -> None:
    """The bf16 kernels of attention, norms and trl's chunked loss give the fp32 loss to bf16's 3 digits."""
    cpu = gpu_workplace.train(RUN_NAME="cpu", MODEL_DTYPE="fp32", TRAIN_BF16="false")
    assert cpu.code == 0, cpu.err + cpu.out
    done = gpu_workplace.train(RUN_NAME="gpu", TRAIN_GRADIENT_CHECKPOINTING=checkpointing, **gpu_environ())
    assert done.code == 0, done.err + done.out
    assert gpu_workplace.losses("gpu")[0] == pytest.approx(gpu_workplace.losses("cpu")[0], rel=0.01)


def test_the_same_seed_gives_the_same_curve_on_the_gpu(gpu_workplace: Workplace) -> None:
    for name in ("one", "two"):
        assert gpu_workplace.train(RUN_NAME=name, TRAIN_DETERMINISTIC="true", **gpu_environ()).code == 0
    assert gpu_workplace.losses("one") == gpu_workplace.losses("two")


def test_calibration_measures_on_the_gpu_and_later_plans_show_it(gpu_workplace: Workplace) -> None:
    done = gpu_workplace.run("plan", CONFIG="tiny.yaml", CALIBRATE="1", **gpu_environ())
    assert done.code == 0, done.err + done.out
    assert "GiB measured" in done.out
    later = gpu_workplace.run("plan", CONFIG="tiny.yaml", **gpu_environ())
    assert later.code == 0, later.err
    assert "measured on this machine" in later.out


def test_a_hidden_gpu_is_not_used(gpu_workplace: Workplace) -> None:
    done = gpu_workplace.train(**{**gpu_environ(), "CUDA_VISIBLE_DEVICES": ""})
    assert done.code == 0, done.err + done.out
    assert planned(gpu_workplace)["device"] == "cpu"
