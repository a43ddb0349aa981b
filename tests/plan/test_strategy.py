"""Which strategy is taken on which machine, and what the others are told."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from sft_play.facts.hardware import GIB, parse_hardware
from sft_play.facts.model import read_model_facts
from sft_play.plan.layouts import Layout
from sft_play.plan.settings import Dtype, Loss, Method, Placement, Settings
from sft_play.plan.strategy import HEAP, BatchRequest, Candidate, Choice, _fastest, choose_strategy, fits_memory


def choose(model: str, method: str, machine: str, seq_len: int = 2048, **batch: int) -> Choice:
    full = method == "full"
    base = Settings(
        method=Method(method),
        micro_batch=1,
        seq_len=seq_len,
        param_dtype=Dtype.FP32 if full else Dtype.BF16,
        loss=Loss.CHUNKED,
    )
    return choose_strategy(read_model_facts(model), [base], parse_hardware(machine), BatchRequest(**batch))


@pytest.mark.parametrize(
    ("model", "method", "machine", "taken"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "lora", "1xRTX4090", "single"),
        ("Qwen/Qwen2.5-7B-Instruct", "lora", "2xRTX4090", "ddp"),
        ("google/gemma-3-27b-it", "qlora", "2xH200", "ddp"),
        ("Qwen/Qwen2.5-7B-Instruct", "full", "8xA100-80", "zero1"),
        ("Qwen/Qwen2.5-7B-Instruct", "full", "2xH100-80", "zero2"),
        ("meta-llama/Llama-3.1-70B", "full", "4xH200", "zero3 + optimizer offload"),
        ("meta-llama/Llama-3.1-70B", "qlora", "2xRTX3060", None),
    ],
)
def test_the_decision_tree_comes_out_of_the_figures(model: str, method: str, machine: str, taken: str | None) -> None:
    choice = choose(model, method, machine)
    assert (choice.chosen.layout.name if choice.chosen else None) == taken


def test_every_loser_has_a_reason_and_the_winner_fits() -> None:
    choice = choose("Qwen/Qwen2.5-7B-Instruct", "full", "2xH100-80")
    assert choice.chosen
    assert all(one.reason for one in choice.candidates)
    reasons = {one.layout.name: one.reason for one in choice.candidates}
    assert "needs" in reasons["ddp"]
    assert "slower" in reasons["layer_split"]
    assert fits_memory(choice.chosen.memory, parse_hardware("2xH100-80"))
    assert "single" in choice.illegal


def test_every_process_of_a_cpu_machine_has_its_heap() -> None:
    needed = choose("Qwen/Qwen2.5-7B-Instruct", "lora", "cpu").candidates[0].memory
    enough = replace(parse_hardware("cpu"), ram_bytes=int(needed.allocated_bytes * HEAP / 0.94))
    assert fits_memory(needed, enough)
    assert not fits_memory(needed, replace(enough, ram_bytes=int(enough.ram_bytes / HEAP)))
    assert not fits_memory(needed, replace(enough, cpu_processes=2))
    assert fits_memory(needed, replace(enough, cpu_processes=2, ram_bytes=2 * enough.ram_bytes))


def test_the_default_effective_batch_is_32() -> None:
    choice = choose("google/gemma-3-27b-it", "qlora", "2xH200")
    assert {one.batch.global_batch for one in choice.candidates} == {32}


@pytest.mark.parametrize("machine", ["1xRTX4090", "2xRTX4090", "8xA100-80", "2x8xH100"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_batch_product_is_exact_for_every_candidate(machine: str, method: str) -> None:
    for one in choose("Qwen/Qwen2.5-7B-Instruct", method, machine, global_batch=64).candidates:
        assert one.settings.global_batch == one.batch.global_batch == 64


def test_offload_needs_host_memory_where_that_is_known() -> None:
    base = Settings(method=Method.FULL, micro_batch=1, seq_len=2048, param_dtype=Dtype.FP32)
    facts, machine = read_model_facts("meta-llama/Llama-3.1-70B"), parse_hardware("4xH200")
    assert choose_strategy(facts, [base], replace(machine, ram_bytes=2048 * GIB), BatchRequest()).chosen
    small = choose_strategy(facts, [base], replace(machine, ram_bytes=256 * GIB), BatchRequest())
    assert small.chosen is None
    assert "the machine has 256" in small.candidates[-1].reason


def test_a_forced_layout_is_the_only_one_evaluated() -> None:
    base = Settings(method=Method.FULL, micro_batch=1, seq_len=2048, param_dtype=Dtype.FP32)
    facts, machine = read_model_facts("Qwen/Qwen2.5-7B-Instruct"), parse_hardware("2xRTX4090")
    choice = choose_strategy(facts, [base], machine, BatchRequest(), only=[Layout(placement=Placement.DDP)])
    assert choice.chosen is None
    assert "23.6 are there" in choice.candidates[0].reason


def test_a_machine_without_gpus_plans_a_single_process() -> None:
    choice = choose("HuggingFaceTB/SmolLM2-135M-Instruct", "lora", "cpu")
    assert [one.layout.placement for one in choice.candidates] == [Placement.SINGLE]
    assert choice.chosen
    assert choice.chosen.speed is None


def test_the_choice_does_not_hang_on_the_order_of_the_candidates() -> None:
    """All four are nearly as fast; whichever comes first, DDP is the simplest."""
    base = Settings(method=Method.LORA, micro_batch=1, seq_len=2048)
    facts, machine = read_model_facts("Qwen/Qwen2.5-7B-Instruct"), parse_hardware("2xA100-80")
    layouts = [Layout(placement=one) for one in (Placement.DDP, Placement.ZERO1, Placement.ZERO3, Placement.FSDP)]
    for order in permutations(layouts):
        chosen = choose_strategy(facts, [base], machine, BatchRequest(), only=order).chosen
        assert chosen
        assert chosen.layout == layouts[0]


def candidate(choice: Choice, placement: Placement, rate: float) -> Candidate:
    """A candidate of a choice with another layout and speed."""
    one = choice.candidates[0]
    assert one.speed
    speed = replace(one.speed, tokens_per_second=rate)
    return replace(one, layout=Layout(placement=placement), speed=speed, fits=True)


def test_ties_are_with_the_best_and_form_no_chain() -> None:
    """1.5% apart each: the first is 3% behind the last and so no tie, though each neighbour is one of the next."""
    choice = choose("Qwen/Qwen2.5-7B-Instruct", "lora", "2xA100-80")
    rates = {Placement.DDP: 97.0, Placement.ZERO1: 98.5, Placement.ZERO2: 100.0}
    three = [candidate(choice, placement, rate) for placement, rate in rates.items()]
    for order in permutations(three):
        assert (taken := _fastest(order))
        assert taken.layout.placement is Placement.ZERO1
