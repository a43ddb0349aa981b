"""How a run evaluates: the mode with its reason, the batch, memory and time of answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.facts.data import DataFacts, SplitFacts, summarise_lengths
from sft_play.facts.hardware import Hardware, parse_hardware
from sft_play.facts.model import read_model_facts
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.build import Plan, PlanInputs, make_plan
from sft_play.plan.evaluation_memory import cache_bytes
from sft_play.plan.generation import generation_seconds
from sft_play.plan.memory import estimate
from sft_play.plan.report import make_report
from sft_play.plan.select import allowed_layouts
from sft_play.plan.settings import Dtype, Placement
from sft_play.plan.terms import Phase
from tests.plan.conftest import run

MODEL = "meta-llama/Meta-Llama-3-8B"
GENERATE = {"predict_with_generate": True}


def split(rows: int, length: int = 512, form: str = "messages") -> SplitFacts:
    percentiles, histogram = summarise_lengths([length] * rows)
    return SplitFacts(
        rows_read=rows,
        rows_kept=rows,
        dropped={},
        truncated=0,
        tokens=rows * length,
        loss_tokens=rows * 100,
        longest=length,
        percentiles=percentiles,
        histogram=histogram,
        formats={form: rows},
        end_of_turn_share=1.0,
    )


def planned(machine: str | Hardware, rows: int | None = 200, form: str = "messages", **sections: Any) -> PlanInputs:
    data = {"train": "t", "validation": "v", **sections.pop("data", {})}
    config = Config.model_validate({"model": {"name": MODEL}, "data": data, **sections})
    splits = {"train": split(20_000), "validation": split(rows or 1, form=form)}
    facts = DataFacts(key="k", fingerprint="f", max_seq_len=2048, splits=splits)
    return PlanInputs(
        config=config,
        hardware=parse_hardware(machine) if isinstance(machine, str) else machine,
        facts=read_model_facts(MODEL),
        data=facts if rows else None,
        only=allowed_layouts(config),
    )


def plan(machine: str, rows: int | None = 200, form: str = "messages", **sections: Any) -> Plan:
    return make_plan(planned(machine, rows, form, **sections))


@pytest.mark.parametrize(
    ("sections", "mode", "why"),
    [
        ({"data": {"validation": None}}, "none", "no validation rows"),
        ({"train": {"eval_strategy": "no"}}, "none", "eval_strategy is no"),
        ({}, "loss", "predict_with_generate is false"),
        ({"train": GENERATE}, "generate", "answers to 200 rows: all take about"),
        ({"train": {**GENERATE, "eval_time_budget": 0}}, "generate", "however long they take"),
        ({"train": {**GENERATE, "eval_time_budget": 0.0001}}, "sample", "of 200 rows: all take about"),
        ({"train": {**GENERATE, "eval_on_start": True}}, "sample", "before the first step there is none"),
        ({"train": {**GENERATE, "eval_batch_size": 4096}}, "loss", "generating for 4096 rows at once would need"),
        ({"form": "text", "train": GENERATE}, "loss", "texts, which have no question"),
        ({"rows": None, "train": GENERATE}, "sample", "the rows are not prepared yet"),
    ],
)
def test_the_mode_and_why(sections: dict[str, Any], mode: str, why: str) -> None:
    found = plan("1xH100-80", **sections)
    assert (found.evaluation, why in found.evaluation_reason) == (mode, True), found.evaluation_reason
    assert found.reasons[-1] == f"evaluation {mode}: {found.evaluation_reason}"


def test_a_cpu_keeps_to_its_budget_without_a_prediction() -> None:
    found = plan("cpu", train={**GENERATE, "eval_batch_size": 2})
    assert (found.evaluation, found.eval_batch) == ("sample", 2)
    assert "10% of the training time" in found.evaluation_reason


def test_a_metric_that_can_never_exist_is_refused_before_training() -> None:
    sections: dict[str, Any] = {"form": "text", "train": {**GENERATE, "metric_for_best_model": "rougeL"}}
    with pytest.raises(ConfigError) as caught:
        plan("1xH100-80", **sections)
    assert "rougeL is a figure of generated answers" in caught.value.line()
    assert "texts" in caught.value.line()
    with pytest.raises(ConfigError, match="rougeL"):
        make_report(planned("1xH100-80", **sections))
    assert plan("1xH100-80", train={**GENERATE, "metric_for_best_model": "eval_rougeL"}).evaluation == "generate"


def test_answers_are_made_for_many_rows_at_once_within_the_memory_of_training() -> None:
    inputs = planned("1xH100-80", train=GENERATE)
    report = make_report(inputs)
    assert report.plan is not None
    assert report.chosen is not None
    assert report.plan.eval_batch > report.plan.micro_batch
    phases = report.chosen.memory
    assert phases.peak_phase in (Phase.FORWARD_BACKWARD, Phase.OPTIMIZER_STEP)
    assert 0 < phases.phase_bytes(Phase.GENERATION) <= phases.phase_bytes(phases.peak_phase)
    assert plan("1xH100-80").eval_batch == plan("1xH100-80").micro_batch
    assert plan("1xH100-80", train={**GENERATE, "eval_batch_size": 3}).eval_batch == 3


def test_rows_of_packs_are_evaluated_several_at_a_time() -> None:
    found = plan("1xH100-80", data={"packing": True})
    assert found.eval_batch == found.micro_batch * found.seq_len // 512


def test_evaluation_never_decides_the_strategy() -> None:
    with_answers, without = (plan("2xRTX4090", train=train) for train in (GENERATE, {}))
    assert (with_answers.strategy, with_answers.micro_batch) == (without.strategy, without.micro_batch)


def test_no_full_logits_in_evaluation() -> None:
    facts = read_model_facts(MODEL)
    reading = run("full", loss="chunked", kernels="hf", eval_micro_batch=8, max_new_tokens=64)
    memory = estimate(facts, reading)
    logits = {part.name: part.bytes for phase in memory.phases.values() for part in phase if "logits" in part.name}
    assert logits["next token logits"] == 8 * facts.vocab_size * 6
    assert logits["evaluation logits"] < 8 * 4096 * facts.vocab_size
    assert memory.phase_bytes(Phase.EVALUATION) < memory.phase_bytes(Phase.FORWARD_BACKWARD)


def test_the_cache_of_keys_and_values_by_hand(mistral: ModelFacts) -> None:
    reading = run(eval_seq_len=100, max_new_tokens=28)
    assert cache_bytes(mistral, reading, 4) == 33 * 2 * 1024 * 2 * 4 * 128
    assert cache_bytes(mistral, replace(reading, num_beams=3), 4) == 3 * cache_bytes(mistral, reading, 4)
    assert cache_bytes(mistral, replace(reading, compute_dtype=Dtype.FP32), 4) == 2 * cache_bytes(mistral, reading, 4)


def seconds(facts: ModelFacts, machine: str, rows: int = 64, **changes: Any) -> float:
    reading = run(**{"eval_micro_batch": 16, "eval_seq_len": 512, "max_new_tokens": 128, **changes})
    found = generation_seconds(facts, reading, parse_hardware(machine), rows=rows, prompt=400)
    assert found is not None
    return found


def test_answers_go_at_the_pace_of_memory(llama8b: ModelFacts) -> None:
    """A token of every row needs all weights once: 16 GB over 2 TB/s and 80% of it, with the adapters' launches."""
    one = seconds(llama8b, "1xA100-80")
    assert one / 4 / 128 > 2 * 7.5e9 / 2.04e12
    assert seconds(llama8b, "1xA100-80", rows=128) == pytest.approx(2 * one)
    assert seconds(llama8b, "1xA100-80", eval_micro_batch=64) < one / 2
    assert seconds(llama8b, "2xA100-80", placement=Placement.DDP, gpus=2) == pytest.approx(one / 2)
    sharded = seconds(llama8b, "2xA100-80", placement=Placement.FSDP, gpus=2, fsdp2=True)
    assert sharded > one / 2
    assert generation_seconds(llama8b, run(eval_micro_batch=1), parse_hardware("cpu"), rows=1, prompt=9) is None
