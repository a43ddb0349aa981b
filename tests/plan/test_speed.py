"""Speed: formulas by hand, orders that must hold, and published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sft_play.facts.hardware import parse_hardware
from sft_play.facts.model import read_model_facts
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.links import data_parallel_seconds, exposed_seconds, tensor_parallel_seconds
from sft_play.plan.settings import Attention, Checkpointing, Dtype, Kernels, Loss, Method, Placement, Settings
from sft_play.plan.speed import (
    Speed,
    estimate_speed,
    model_flops_per_token,
    pointwise_seconds,
    recompute_flops_per_token,
)
from sft_play.plan.state import adapter_parameters
from tests.plan.conftest import run

A100 = parse_hardware("1xA100-80")


def speed(facts: ModelFacts, settings: Settings, machine: str = "1xA100-80") -> Speed:
    found = estimate_speed(facts, settings, parse_hardware(machine))
    assert found
    return found


def test_flops_a_token_by_hand(mistral: ModelFacts) -> None:
    weights = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) + 4096 * 32000
    attention = 6 * 32 * 4096 * 4096
    assert model_flops_per_token(mistral, run("full")) == 6 * weights + attention
    adapters = adapter_parameters(mistral, run("lora"))
    assert adapters == 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    assert model_flops_per_token(mistral, run("lora")) == 4 * weights + 6 * adapters + attention
    assert recompute_flops_per_token(mistral, run("full")) == 2 * (weights - 4096 * 32000)


def test_a_mixture_counts_the_experts_in_use() -> None:
    facts = read_model_facts("mistralai/Mixtral-8x7B-Instruct-v0.1")
    assert model_flops_per_token(facts, run("full")) < 6.5 * facts.active_parameters
    assert speed(facts, run("qlora")).tokens_per_second > 1000


@pytest.mark.parametrize(
    ("method", "kernels", "published"),
    [
        ("full", Kernels.HF, 3143),
        ("full", Kernels.TRITON, 3546),
        ("lora", Kernels.HF, 3354),
        ("qlora", Kernels.HF, 3662),
    ],
)
def test_7b_on_an_a100(mistral: ModelFacts, method: str, kernels: Kernels, published: int) -> None:
    assert speed(mistral, run(method, kernels=kernels, foreach=True)).tokens_per_second == pytest.approx(
        published, rel=0.15
    )


@pytest.mark.parametrize(
    ("name", "method", "published"),
    [("Qwen/Qwen3-8B", "lora", 9100), ("Qwen/Qwen3-4B", "lora", 12800), ("Qwen/Qwen3-8B", "qlora", 8400)],
)
def test_figures_that_nothing_was_fitted_to_h200_unsloth(name: str, method: str, published: int) -> None:
    one = Settings(
        method=Method(method), micro_batch=4, seq_len=2048, grad_accum=4, attention=Attention.FLASH,
        kernels=Kernels.UNSLOTH, loss=Loss.FUSED,
    )  # fmt: skip
    assert speed(read_model_facts(name), one, "1xH200").tokens_per_second == pytest.approx(published, rel=0.2)


def test_orders_that_must_hold(mistral: ModelFacts) -> None:
    one = run("full", micro_batch=2)
    plain = speed(mistral, one).tokens_per_second
    assert speed(mistral, replace(one, checkpointing=Checkpointing.NONE)).tokens_per_second > plain
    assert speed(mistral, replace(one, method=Method.LORA)).tokens_per_second > plain
    assert speed(mistral, replace(one, kernels=Kernels.HF)).tokens_per_second < plain
    assert speed(mistral, one, "1xH100").tokens_per_second > plain
    assert speed(mistral, replace(one, attention=Attention.EAGER)).tokens_per_second < plain


def test_more_gpus_are_faster_together_and_slower_each(mistral: ModelFacts) -> None:
    one = run("lora", placement=Placement.DDP)
    rates = [speed(mistral, replace(one, gpus=n), f"{n}xRTX4090") for n in (2, 4, 8)]
    assert rates[0].tokens_per_second < rates[1].tokens_per_second < rates[2].tokens_per_second
    assert rates[0].tokens_per_second_per_gpu >= rates[2].tokens_per_second_per_gpu


def test_mfu_stays_below_one_and_names_its_formula(mistral: ModelFacts) -> None:
    found = speed(mistral, run("lora"))
    assert 0.2 < found.mfu < 0.7
    assert "4N" in found.formula
    assert sum(found.parts.values()) == pytest.approx(found.step_seconds)


def test_without_a_gpu_there_is_no_figure(mistral: ModelFacts) -> None:
    assert estimate_speed(mistral, run("lora"), parse_hardware("cpu")) is None


def test_the_inner_width_is_16_bit_under_autocast_though_the_weights_are_fp32(mistral: ModelFacts) -> None:
    """Half of it: 2 bytes instead of 4 for three inner widths, where the residual stream stays at 4."""
    autocast = run("full", param_dtype=Dtype.FP32, placement=Placement.DDP, gpus=2)
    (gpu,) = A100.gpus
    all_fp32 = pointwise_seconds(mistral, replace(autocast, compute_dtype=Dtype.FP32), gpu)
    all_16_bit = pointwise_seconds(mistral, replace(autocast, param_dtype=Dtype.BF16), gpu)
    inner, hidden = 3 * 14336, 4 * 4096
    saved = (all_fp32 - all_16_bit) * inner / (inner + hidden)
    assert all_fp32 - pointwise_seconds(mistral, autocast, gpu) == pytest.approx(saved)


def test_gradients_travel_in_their_own_type_under_ddp(mistral: ModelFacts) -> None:
    machine = parse_hardware("2xA100-80")
    in_fp32 = run("full", placement=Placement.DDP, gpus=2, param_dtype=Dtype.FP32)
    in_bf16 = replace(in_fp32, param_dtype=Dtype.BF16)
    seconds = data_parallel_seconds(mistral, in_fp32, machine)
    assert seconds == pytest.approx(2 * mistral.parameters * 4 / 2 / (300e9 * 0.4))
    assert seconds == pytest.approx(2 * data_parallel_seconds(mistral, in_bf16, machine))
    adapters = run("lora", placement=Placement.DDP, gpus=2)
    expected = 2 * adapter_parameters(mistral, adapters) * 4 / 2 / (300e9 * 0.4)
    assert data_parallel_seconds(mistral, adapters, machine) == pytest.approx(expected)


def test_zero2_scatters_in_every_micro_batch_and_zero1_reduces_once(mistral: ModelFacts) -> None:
    machine = parse_hardware("2xA100-80")
    first, second = (run("full", placement=p, gpus=2, grad_accum=8) for p in (Placement.ZERO1, Placement.ZERO2))
    once = data_parallel_seconds(mistral, first, machine)
    assert data_parallel_seconds(mistral, second, machine) == pytest.approx(once * 9 / 2)


def test_nothing_hides_what_tensor_parallel_reduces(mistral: ModelFacts) -> None:
    machine = parse_hardware("2xA100-80")
    one = run("full", placement=Placement.TP, gpus=2, checkpointing=Checkpointing.NONE)
    reduced = 4 * 32 * 2 * one.tokens * 4096 * 2 / 2 / (300e9 * 0.4)
    assert exposed_seconds(mistral, one, machine, compute=1e9) == pytest.approx(reduced)
    recomputed = tensor_parallel_seconds(mistral, replace(one, checkpointing=Checkpointing.FULL), machine)
    assert recomputed == pytest.approx(reduced * 6 / 4)


def test_tensor_parallel_ranks_each_multiply_by_the_whole_head(mistral: ModelFacts) -> None:
    one = run("full", placement=Placement.TP, gpus=8, kernels=Kernels.HF, loss=Loss.CHUNKED)
    split = replace(one, loss=Loss.FUSED)
    more = speed(mistral, one, "8xA100-80").parts["matrix products"]
    more -= speed(mistral, split, "8xA100-80").parts["matrix products"]
    assert more == pytest.approx(one.tokens * 7 / 8 * 6 * 4096 * 32000 / (312e12 * 0.77))


def test_cards_without_peer_access_copy_through_host_memory(mistral: ModelFacts) -> None:
    one = run("full", placement=Placement.DDP, gpus=2)
    geforce, inference = (data_parallel_seconds(mistral, one, parse_hardware(m)) for m in ("2xRTX4090", "2xL40S"))
    assert geforce / inference == pytest.approx(0.7 / 0.45)


def test_dora_is_slower_than_lora_and_trains_a_magnitude_an_output(mistral: ModelFacts) -> None:
    plain = run("lora", kernels=Kernels.HF)
    dora = replace(plain, dora=True)
    outputs = 32 * (2 * 4096 + 2 * 1024)
    assert adapter_parameters(mistral, dora) - adapter_parameters(mistral, plain) == outputs
    plain, dora = (replace(one, micro_batch=1, seq_len=2048, lora_targets=("all-linear",)) for one in (plain, dora))
    assert 1.5 < speed(mistral, dora).step_seconds / speed(mistral, plain).step_seconds < 2.1
