"""The memory model against the regularities of published runs and the textbook's numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft_play.facts.hardware import GIB
from sft_play.facts.model import catalog, read_model_facts
from sft_play.facts.shapes import ModelFacts
from sft_play.plan import state
from sft_play.plan.activations import logits_bytes, stored_bytes
from sft_play.plan.memory import estimate
from sft_play.plan.settings import (
    Attention,
    Checkpointing,
    Dtype,
    Kernels,
    Loss,
    Method,
    Offload,
    Optimizer,
    Placement,
    Settings,
)
from sft_play.plan.sharding import divisors
from sft_play.plan.terms import Phase, total_bytes
from tests.plan.conftest import run


def slope_kib(facts: ModelFacts, one: Settings) -> float:
    """KiB a token between two micro-batches."""
    small, large = estimate(facts, one), estimate(facts, replace(one, micro_batch=2 * one.micro_batch))
    return (large.allocated_bytes - small.allocated_bytes) / one.tokens / 1024


@pytest.mark.parametrize(
    ("method", "changes", "measured"),
    [
        ("lora", {"kernels": Kernels.LIGER, "loss": Loss.FUSED}, 520),
        ("lora", {}, 520),
        ("lora", {"kernels": Kernels.HF}, 718),
        ("qlora", {"kernels": Kernels.HF, "upcast": True}, 974),
        ("lora", {"kernels": Kernels.LIGER, "loss": Loss.FUSED, "gpus": 4, "placement": Placement.FSDP}, 760),
    ],
)
def test_slopes_of_7b_by_library(mistral: ModelFacts, method: str, changes: dict[str, Any], measured: float) -> None:
    assert slope_kib(mistral, run(method, **changes)) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("loss", "measured"), [(Loss.FUSED, 510), (Loss.FULL, 1274)])
def test_slopes_of_8b_with_a_large_vocabulary(llama8b: ModelFacts, loss: Loss, measured: float) -> None:
    assert slope_kib(llama8b, run(kernels=Kernels.TRITON, loss=loss)) == pytest.approx(measured, rel=0.07)


def test_full_bf16_adamw_peaks_at_ten_bytes_a_parameter_and_keeps_six(mistral: ModelFacts) -> None:
    one = run("full", micro_batch=4, foreach=True)
    memory = estimate(mistral, one)
    assert memory.peak_phase is Phase.OPTIMIZER_STEP
    assert memory.allocated_bytes == pytest.approx(10 * mistral.parameters, rel=1e-3)
    rest = total_bytes(memory.phases[Phase.LOAD]) + 4 * mistral.parameters
    assert rest == pytest.approx(6 * mistral.parameters, rel=1e-3)


@pytest.mark.parametrize(("dtype", "bytes_each"), [(Dtype.BF16, 10), (Dtype.FP32, 20)])
def test_fsdp_divides_that_by_the_gpus(mistral: ModelFacts, dtype: Dtype, bytes_each: int) -> None:
    one = run("full", micro_batch=1, foreach=True, param_dtype=dtype, placement=Placement.FSDP, gpus=2)
    assert estimate(mistral, one).allocated_bytes == pytest.approx(bytes_each * mistral.parameters / 2, rel=0.01)


@pytest.mark.parametrize(
    ("name", "measured_gib"), [("mistralai/Mistral-7B-v0.1", 4.01), ("mistralai/Mixtral-8x7B-Instruct-v0.1", 22.97)]
)
def test_qlora_at_rest(name: str, measured_gib: float) -> None:
    facts, one = read_model_facts(name), run("qlora")
    resting = (
        state.decoder_weight_bytes(facts, one)
        + state.outer_weight_bytes(facts, one)
        + state.adapter_parameters(facts, one) * 12
    )
    assert resting / GIB == pytest.approx(measured_gib, rel=0.005)


def textbook(**changes: Any) -> Settings:
    """fp32 everywhere, as courses count it."""
    return run("full", param_dtype=Dtype.FP32, compute_dtype=Dtype.FP32, **changes)


@pytest.mark.parametrize(
    ("placement", "gigabytes"),
    [(Placement.SINGLE, 112), (Placement.ZERO1, 84), (Placement.ZERO2, 70), (Placement.ZERO3, 56)],
)
def test_the_textbooks_7b(placement: Placement, gigabytes: int) -> None:
    one = textbook(placement=placement, gpus=1 if placement is Placement.SINGLE else 2)
    each, n = divisors(one), 7e9
    assert n * (4 / each.weights + 4 / each.gradients + 8 / each.optimizer) / 1e9 == pytest.approx(gigabytes)


def test_activations_are_not_sharded_by_zero(mistral: ModelFacts) -> None:
    alone = stored_bytes(mistral, run("full"))
    assert all(
        stored_bytes(mistral, run("full", placement=p, gpus=8)) == alone for p in (Placement.ZERO1, Placement.ZERO3)
    )


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        ({"optimizer": Optimizer.SGD}, {"optimizer": Optimizer.ADAFACTOR}),
        ({"optimizer": Optimizer.ADAFACTOR}, {"optimizer": Optimizer.ADAMW_8BIT}),
        ({"optimizer": Optimizer.ADAMW_8BIT}, {}),
        ({"optimizer": Optimizer.PAGED_ADAMW_8BIT}, {"optimizer": Optimizer.ADAMW_8BIT}),
        ({}, {"foreach": True}),
        ({}, {"master_weights": True}),
        ({"optimizer_in_backward": True}, {"micro_batch": 1}),
        ({"loss": Loss.FUSED, "micro_batch": 64}, {"loss": Loss.FULL, "micro_batch": 64, "kernels": Kernels.HF}),
        ({"micro_batch": 16}, {"micro_batch": 16, "checkpointing": Checkpointing.SELECTIVE}),
        ({"checkpointing": Checkpointing.SELECTIVE}, {"checkpointing": Checkpointing.NONE}),
        ({"micro_batch": 16, "offload_activations": True}, {"micro_batch": 16}),
    ],
)
def test_what_saves_memory_does(mistral: ModelFacts, smaller: dict[str, Any], larger: dict[str, Any]) -> None:
    few, many = (estimate(mistral, run("full", **{"micro_batch": 1, **one})) for one in (smaller, larger))
    assert few.allocated_bytes < many.allocated_bytes


@pytest.mark.parametrize(
    ("placement", "weight_bytes"),
    [(Placement.FSDP, 2), (Placement.ZERO3, 2), (Placement.TP, 0), (Placement.DDP, 0)],
)
def test_the_chunked_loss_sums_the_gradient_of_a_whole_head_on_every_gpu(
    llama8b: ModelFacts, placement: Placement, weight_bytes: int
) -> None:
    """fp32 sums, and a copy where the gathered weight is 16-bit; an adapter leaves the head alone."""
    one = run("full", kernels=Kernels.HF, loss=Loss.CHUNKED, placement=placement, gpus=8, param_dtype=Dtype.FP32)
    frozen = replace(one, method=Method.LORA)
    head = logits_bytes(llama8b, one) - logits_bytes(llama8b, frozen)
    assert head == pytest.approx(128256 * 4096 * (4 + weight_bytes))


def test_pefts_preparation_doubles_embedding_and_head(llama8b: ModelFacts) -> None:
    plain, upcast = run("qlora"), run("qlora", upcast=True, upcast_outer=True)
    more = state.outer_weight_bytes(llama8b, upcast) - state.outer_weight_bytes(llama8b, plain)
    assert more == 2 * 2 * 128256 * 4096


def test_offload_moves_state_to_the_host(mistral: ModelFacts) -> None:
    plain = run("full", micro_batch=1, placement=Placement.ZERO3, gpus=2, master_weights=True)
    moved = replace(plain, offload=Offload.OPTIMIZER)
    assert estimate(mistral, plain).host_bytes == 0
    assert estimate(mistral, moved).host_bytes == pytest.approx((12 + 2) * mistral.parameters / 2, rel=0.01)
    assert estimate(mistral, moved).allocated_bytes < estimate(mistral, plain).allocated_bytes
    everything = estimate(mistral, replace(plain, offload=Offload.PARAMS))
    assert everything.phase_bytes(Phase.LOAD) == 0


def test_every_rank_reads_the_whole_model_into_host_memory_before_fsdp_shards(mistral: ModelFacts) -> None:
    full = run("full", placement=Placement.FSDP, gpus=4, param_dtype=Dtype.FP32)
    assert estimate(mistral, full).host_bytes == 4 * mistral.parameters
    packed = estimate(mistral, run("qlora", placement=Placement.FSDP, gpus=4)).host_bytes
    assert 0.5 * mistral.parameters < packed < mistral.parameters
    # Pages of the files themselves, or weights that are read onto the GPU.
    assert estimate(mistral, run("lora", placement=Placement.FSDP, gpus=4)).host_bytes == 0
    assert estimate(mistral, replace(full, placement=Placement.DDP)).host_bytes == 0


def test_evaluation_and_generation_have_phases_of_their_own(mistral: ModelFacts) -> None:
    memory = estimate(mistral, run(eval_micro_batch=8, max_new_tokens=128))
    cache = next(part for part in memory.phases[Phase.GENERATION] if part.name == "key value cache")
    assert cache.bytes == 2 * (32 + 1) * 1024 * 2 * 8 * (4096 + 128)
    assert Phase.EVALUATION in memory.phases


METHODS = st.sampled_from(["full", "lora", "qlora"])
PLACEMENTS = st.sampled_from([p for p in Placement if p not in {Placement.SINGLE, Placement.TP}])
MODELS = st.sampled_from(sorted(name for name in catalog() if catalog()[name]["parameters"] > 1e9))
CHECKPOINTING = st.sampled_from(list(Checkpointing))
LOSSES = st.sampled_from(list(Loss))


@settings(max_examples=150, deadline=None)
@given(METHODS, PLACEMENTS, MODELS, CHECKPOINTING, LOSSES, st.integers(1, 16), st.integers(1, 3))
def test_memory_grows_with_batch_and_length(
    method: str, placement: Placement, name: str, kept: Checkpointing, loss: Loss, rows: int, accum: int
) -> None:
    facts = read_model_facts(name)
    one = run(method, placement=placement, gpus=4, checkpointing=kept, loss=loss, micro_batch=rows, grad_accum=accum)
    base = estimate(facts, one)
    for larger in (replace(one, micro_batch=rows + 1), replace(one, seq_len=one.seq_len + 512)):
        more = estimate(facts, larger)
        assert more.allocated_bytes >= base.allocated_bytes
        assert more.device_bytes >= base.device_bytes * 0.999
        # Not strictly: where the gradients of a whole model are the peak, one row more hides below it.
        assert more.phase_bytes(Phase.FORWARD_BACKWARD) >= base.phase_bytes(Phase.FORWARD_BACKWARD)


@settings(max_examples=150, deadline=None)
@given(METHODS, PLACEMENTS, MODELS, st.integers(1, 8), st.sampled_from([2, 4, 8, 16]))
def test_more_gpus_never_need_more_on_each(method: str, placement: Placement, name: str, rows: int, gpus: int) -> None:
    facts = read_model_facts(name)
    one = run(method, placement=placement, gpus=gpus, micro_batch=rows)
    if placement is Placement.LAYER_SPLIT and 2 * gpus > facts.num_layers:
        return
    assert estimate(facts, replace(one, gpus=2 * gpus)).allocated_bytes <= estimate(facts, one).allocated_bytes


@settings(max_examples=150, deadline=None)
@given(METHODS, MODELS, st.integers(1, 8), st.sampled_from([2, 3, 8]), st.integers(1, 4))
def test_a_higher_zero_stage_never_needs_more(method: str, name: str, rows: int, gpus: int, accum: int) -> None:
    facts = read_model_facts(name)
    stages = (Placement.ZERO1, Placement.ZERO2, Placement.ZERO3)
    needs = [estimate(facts, run(method, placement=p, gpus=gpus, micro_batch=rows, grad_accum=accum)) for p in stages]
    rests = [total_bytes(need.phases[Phase.OPTIMIZER_STEP]) for need in needs]
    assert rests == sorted(rests, reverse=True)
    assert needs[1].allocated_bytes <= needs[0].allocated_bytes
    head = facts.vocab_size * facts.hidden_size * 2
    if head < total_bytes(needs[1].phases[Phase.LOAD]) / 2:  # else gathering the head costs more than sharding saves
        assert needs[2].allocated_bytes <= needs[1].allocated_bytes


@settings(max_examples=150, deadline=None)
@given(METHODS, PLACEMENTS, MODELS, CHECKPOINTING, st.integers(1, 16))
def test_components_add_up_and_the_peak_is_the_largest_phase(
    method: str, placement: Placement, name: str, kept: Checkpointing, rows: int
) -> None:
    memory = estimate(
        read_model_facts(name), run(method, placement=placement, gpus=2, checkpointing=kept, micro_batch=rows)
    )
    totals = {phase: sum(part.bytes for part in parts) for phase, parts in memory.phases.items()}
    assert totals == {phase: memory.phase_bytes(phase) for phase in memory.phases}
    assert memory.allocated_bytes == max(totals.values())
    assert memory.allocated_bytes <= memory.reserved_bytes <= memory.device_bytes
    assert memory.needed_bytes >= memory.allocated_bytes
    assert all(part.bytes > 0 for parts in memory.phases.values() for part in parts)


def test_memory_grows_with_the_model() -> None:
    names = ["Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-7B-Instruct",
             "Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen2.5-32B-Instruct", "Qwen/Qwen2.5-72B-Instruct"]  # fmt: skip
    for method in ("full", "lora", "qlora"):
        needs = [estimate(read_model_facts(name), run(method)).allocated_bytes for name in names]
        assert all(a < b for a, b in pairwise(needs))


def test_zero3_loads_a_4_bit_model_whole_on_every_gpu(mistral: ModelFacts) -> None:
    sharded = run("qlora", placement=Placement.ZERO3, gpus=8)
    alone = estimate(mistral, run("qlora")).phase_bytes(Phase.LOAD)
    assert estimate(mistral, sharded).phase_bytes(Phase.LOAD) == alone
    for other in (replace(sharded, placement=Placement.FSDP), replace(sharded, method=Method.LORA)):
        eight = estimate(mistral, replace(other, placement=Placement.DDP)).phase_bytes(Phase.LOAD) / 8
        assert estimate(mistral, other).phase_bytes(Phase.LOAD) == pytest.approx(eight)


def masks(facts: ModelFacts, one: Settings) -> int:
    parts = estimate(facts, one).phases[Phase.FORWARD_BACKWARD]
    return sum(part.bytes for part in parts if part.name == "attention masks")


def test_only_padded_rows_under_torchs_own_attention_need_a_mask(llama8b: ModelFacts, mistral: ModelFacts) -> None:
    one = run("lora", attention=Attention.SDPA, padded=True, micro_batch=4, loss=Loss.FUSED)
    pairs = 4 * 4096**2
    assert masks(llama8b, one) == pairs * (1 + 2)
    assert masks(llama8b, replace(one, checkpointing=Checkpointing.NONE)) == pairs * (1 + 32 * 2)
    packs = replace(one, packed=True, padded=False)
    assert masks(llama8b, packs) == masks(llama8b, one)
    assert masks(llama8b, replace(packs, micro_batch=1)) == pairs * (1 + 2) // 4
    assert masks(llama8b, replace(packs, flattened=True)) == 4 * pairs * (1 + 2)
    assert masks(llama8b, replace(packs, flattened=True, attention=Attention.FLASH)) == 0
    for without in ({"padded": False}, {"micro_batch": 1}, {"attention": Attention.FLASH}):
        assert masks(llama8b, replace(one, **without)) == 0  # type: ignore[arg-type]
    assert masks(mistral, replace(one, padded=False)) == pairs * (2 + 2)  # its window is 4,096
    assert masks(llama8b, replace(one, attention=Attention.EAGER, padded=False)) == pairs * 2
