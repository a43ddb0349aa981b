"""Rows of different lengths: memory at the longest, speed at what micro-batches are padded to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sft_play.config.schema import Config
from sft_play.facts.data import DataFacts, SplitFacts, summarise_lengths
from sft_play.facts.hardware import parse_hardware
from sft_play.facts.model import read_model_facts
from sft_play.plan.build import PlanInputs, choose, make_plan
from sft_play.plan.lengths import expected_longest, mean_length, speed_on_rows
from sft_play.plan.memory import estimate
from sft_play.plan.report import run_length
from sft_play.plan.speed import estimate_speed
from sft_play.plan.strategy import Candidate

MODEL = "meta-llama/Llama-3.2-1B"
GPU = parse_hardware("1xA100-80")
# Nine rows in ten are short; the longest is as long as the config allows.
LENGTHS = [128] * 900 + [2048] * 100


def split_of(lengths: list[int]) -> SplitFacts:
    percentiles, histogram = summarise_lengths(lengths)
    return SplitFacts(
        rows_read=len(lengths), rows_kept=len(lengths), dropped={}, truncated=0, tokens=sum(lengths),
        loss_tokens=sum(lengths), longest=max(lengths), percentiles=percentiles, histogram=histogram,
        formats={"messages": len(lengths)}, end_of_turn_share=1.0,
    )  # fmt: skip


def inputs(lengths: list[int] | None, *, packs: int | None = None, **train: object) -> PlanInputs:
    packed = {"train": "t", "packing": packs is not None}
    values = {"model": {"name": MODEL, "max_seq_len": 4096}, "data": packed, "train": train}
    data = None
    if lengths:
        split = replace(split_of(lengths), packs=packs, fill=sum(lengths) / (packs * 4096) if packs else None)
        data = DataFacts(key="k", fingerprint="f", max_seq_len=4096, splits={"train": split})
    return PlanInputs(config=Config.model_validate(values), hardware=GPU, facts=read_model_facts(MODEL), data=data)


def chosen(made: PlanInputs) -> Candidate:
    found = choose(made).chosen
    assert found
    return found


def test_a_micro_batch_is_padded_to_the_longest_of_its_rows() -> None:
    split = split_of(LENGTHS)
    assert mean_length(split) == 320
    assert expected_longest(split, 1) == pytest.approx(320)
    assert expected_longest(split, 4) == pytest.approx(128 * 0.9**4 + 2048 * (1 - 0.9**4))
    assert expected_longest(split, 1000) == pytest.approx(2048)


def test_memory_is_planned_for_a_micro_batch_of_the_longest_rows() -> None:
    made = inputs(LENGTHS, batch_size=4)
    one = chosen(made)
    assert one.settings.tokens == 4 * 2048
    assert one.settings.padded
    all_long = chosen(inputs([2048] * 1000, batch_size=4))
    assert not all_long.settings.padded
    assert one.memory == estimate(made.facts, replace(all_long.settings, padded=True, grad_accum=one.batch.grad_accum))


def test_speed_counts_the_rows_own_tokens_in_the_time_of_padded_ones() -> None:
    made = inputs(LENGTHS, batch_size=4)
    one, split = chosen(made), split_of(LENGTHS)
    padded = round(expected_longest(split, 4))
    in_full = estimate_speed(made.facts, replace(one.settings, seq_len=padded), GPU)
    assert in_full
    assert one.tokens_per_second == pytest.approx(in_full.tokens_per_second * 320 / padded)
    assert make_plan(made).predicted["step_seconds"] == pytest.approx(in_full.step_seconds, abs=1e-4)
    longest = estimate_speed(made.facts, one.settings, GPU)
    assert longest
    assert make_plan(made, speed_at_longest=True).predicted["step_seconds"] == round(longest.step_seconds, 4)
    length = run_length(made, one)
    assert length.steps == 32
    assert length.tokens == 32 * 32 * 320
    assert length.hours == pytest.approx(32 * in_full.step_seconds / 3600)


def test_unknown_rows_are_all_as_long_as_the_config_allows() -> None:
    made = inputs(None)
    one = chosen(made)
    assert one.settings.seq_len == 4096
    assert (
        one.speed == speed_on_rows(made.facts, one.settings, GPU, None) == estimate_speed(made.facts, one.settings, GPU)
    )


def test_padding_is_part_of_the_choice_of_a_micro_batch() -> None:
    """Rows of one short length are worth many at a time; a rare long one among them makes that mostly padding."""
    alike, mixed = chosen(inputs([128] * 1000)), chosen(inputs(LENGTHS))
    assert alike.batch.micro_batch > mixed.batch.micro_batch


def test_packs_are_counted_as_sequences_of_full_length() -> None:
    made = inputs(LENGTHS, packs=80, batch_size=2, global_batch_size=8)
    one = chosen(made)
    assert (one.settings.packed, one.settings.flattened, one.settings.padded) == (True, False, False)
    assert one.settings.seq_len == 4096
    full = estimate_speed(made.facts, one.settings, GPU)
    assert full
    assert one.tokens_per_second == pytest.approx(full.tokens_per_second * sum(LENGTHS) / (80 * 4096))
    length = run_length(made, one)
    assert (length.rows, length.steps, length.tokens) == (80, 10, sum(LENGTHS))
    reasons = make_plan(made).reasons
    assert any(reason.startswith("batch: 2 packs x 4 accumulated") for reason in reasons)
    assert "length 4096 tokens: 1,000 rows in 80 packs, 97.7% of them real tokens" in reasons


def test_rows_that_fill_no_pack_are_planned_at_their_own_length() -> None:
    assert chosen(inputs([100] * 8, packs=1)).settings.seq_len == 800
    assert chosen(inputs(None, packs=1)).settings.seq_len == 4096


def test_only_kernels_that_take_lengths_get_a_micro_batch_in_one_row() -> None:
    config = Config.model_validate({**inputs(None, packs=1).config.model_dump(), "model": {"name": MODEL}})
    for attention, flattened in (("flash_attention_2", True), ("sdpa", False), ("eager", False)):
        asked = config.model_copy(update={"model": config.model.model_copy(update={"attention": attention})})
        one = chosen(PlanInputs(config=asked, hardware=GPU, facts=read_model_facts(MODEL)))
        assert one.settings.flattened is flattened
        assert one.settings.span == one.settings.seq_len * (one.batch.micro_batch if flattened else 1)
