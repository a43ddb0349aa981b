"""Every key of docs/speed.md that only a GPU can run, against the plain run of the same 20 steps on the same GPU."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.runs import Outcome
from tests.faults.test_resume_equality import differences
from tests.gpu.conftest import gpu_environ
from tests.gpu.test_train_on_gpu import planned
from tests.tiny import Workplace, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nvml")]
PLAIN = {"MODEL_KERNELS": "none", "TRAIN_LOSS": "chunked"}


@pytest.fixture
def twenty(gpu_workplace: Workplace) -> Workplace:
    """Twenty steps, rows of unequal length, nothing saved on the way."""
    gpu_workplace.config["train"] = {
        **gpu_workplace.config["train"],
        "max_steps": 20,
        "learning_rate": 1e-3,
        "save_strategy": "no",
    }
    gpu_workplace.write()
    return gpu_workplace


def curve(workplace: Workplace, name: str, **variables: str) -> list[float]:
    done = workplace.train(**{**gpu_environ(), **PLAIN, "RUN_NAME": name, **variables})
    assert done.code == 0, done.err + done.out
    return workplace.losses(name)


@pytest.fixture
def paging(gpu_workplace: Workplace, tmp_path: Path) -> Workplace:
    """Full fine-tuning of a model with a wide vocabulary: weights below 100,000 numbers are not paged."""
    model = make_model(tmp_path / "wide", vocab_size=4096)
    gpu_workplace.config["model"] = {**gpu_workplace.config["model"], "name": str(model)}
    gpu_workplace.config["tuning"] = {"mode": "full"}
    gpu_workplace.write()
    return gpu_workplace


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def capability() -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability()


def test_three_ways_to_the_loss_are_one_curve(twenty: Workplace) -> None:
    needs("triton")
    fp32 = {"MODEL_DTYPE": "fp32", "TRAIN_BF16": "false"}
    curves = {kind: curve(twenty, kind, TRAIN_LOSS=kind, **fp32) for kind in ("fused", "chunked", "full")}
    assert planned(twenty, "fused")["loss"] == "fused"
    for kind in ("fused", "full"):
        assert curves[kind][0] == pytest.approx(curves["chunked"][0], abs=1e-5)
        assert curves[kind] == pytest.approx(curves["chunked"], abs=1e-3)


def test_without_a_word_the_fused_loss_is_taken(twenty: Workplace) -> None:
    needs("triton")
    curve(twenty, "auto", TRAIN_LOSS="auto", MODEL_KERNELS="auto")
    assert planned(twenty, "auto")["loss"] == "fused"


def test_liger_trains_like_plain_layers(twenty: Workplace) -> None:
    needs("liger_kernel")
    assert curve(twenty, "liger", MODEL_KERNELS="liger") == pytest.approx(curve(twenty, "plain"), abs=2e-2)
    assert planned(twenty, "liger")["kernels"] == "liger"


@pytest.mark.parametrize(
    ("kernel", "package", "first"),
    [("flash_attention_2", "flash_attn", 8), ("flash_attention_3", "flash_attn_interface", 9)],
)
@pytest.mark.parametrize("packing", ["false", "true"])
def test_flash_attention_trains_like_sdpa(
    twenty: Workplace, kernel: str, package: str, first: int, packing: str
) -> None:
    needs(package)
    if capability()[0] < first:
        pytest.skip(f"{kernel} needs a newer GPU")
    plain = curve(twenty, "plain", DATA_PACKING=packing)
    assert curve(twenty, "flash", MODEL_ATTENTION=kernel, DATA_PACKING=packing) == pytest.approx(plain, abs=2e-2)


@pytest.mark.parametrize("packing", ["false", "true"])
def test_flex_attention_trains_like_sdpa(twenty: Workplace, packing: str) -> None:
    if capability()[0] < 8:
        pytest.skip("flex_attention needs Ampere or later")
    plain = curve(twenty, "plain", DATA_PACKING=packing)
    flex = curve(twenty, "flex", MODEL_ATTENTION="flex_attention", DATA_PACKING=packing)
    assert flex == pytest.approx(plain, abs=2e-2)


def test_offloaded_activations_come_back_unchanged(twenty: Workplace) -> None:
    plain = curve(twenty, "plain")
    assert curve(twenty, "moved", TRAIN_ACTIVATION_OFFLOADING="true") == pytest.approx(plain, abs=1e-6)


def test_compiled_layers_train_like_plain_ones(twenty: Workplace) -> None:
    needs("triton")
    assert curve(twenty, "compiled", TRAIN_TORCH_COMPILE="true") == pytest.approx(curve(twenty, "plain"), abs=2e-2)


def test_fp8_trains_like_bf16(twenty: Workplace) -> None:
    needs("torchao")
    if capability() < (8, 9):
        pytest.skip("this GPU has no fp8 units")
    twenty.config["tuning"] = {"mode": "full"}
    twenty.write()
    assert curve(twenty, "fp8", TRAIN_FP8="true") == pytest.approx(curve(twenty, "plain"), abs=5e-2)


@pytest.mark.parametrize(
    ("paged", "plain"), [("paged_adamw_8bit", "adamw_bnb_8bit"), ("paged_adamw_32bit", "adamw_torch")]
)
def test_a_paged_optimizer_steps_like_its_plain_form(paging: Workplace, paged: str, plain: str) -> None:
    bound = 1e-6 if plain.endswith("8bit") else 1e-3
    assert curve(paging, "paged", TRAIN_OPTIM=paged) == pytest.approx(
        curve(paging, "plain", TRAIN_OPTIM=plain), abs=bound
    )


@pytest.mark.parametrize("optimizer", ["paged_adamw_8bit", "paged_adamw_32bit", "adamw_bnb_8bit"])
def test_a_run_with_such_an_optimizer_goes_on_to_the_bit(paging: Workplace, optimizer: str) -> None:
    settings: dict[str, Any] = {"max_steps": 6, "save_steps": 3, "save_total_limit": 6, "deterministic": True}
    paging.write(train={**paging.config["train"], **settings, "optim": optimizer, "eval_strategy": "no"})
    curve(paging, "tiny")
    resumed = Outcome(paging.path / "runs/tiny")
    straight = Outcome(shutil.copytree(resumed.path, paging.path / "straight"))
    for left in ("model", "checkpoints/step-6"):
        shutil.rmtree(resumed.path / left)
    (resumed.path / "record.json").unlink()
    curve(paging, "tiny")
    assert resumed.series("loss") == straight.series("loss")
    assert differences(resumed.weights, straight.weights) == []
