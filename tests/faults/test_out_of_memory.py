"""Memory that runs out in the middle of a backward pass: the run goes on to the same curve in smaller micro-batches."""

from __future__ import annotations

import json

import pytest

from sft_play.record.amendments import smaller_micro_batch
from tests.distributed.runs import Outcome
from tests.faults.hooks import hooked
from tests.tiny import Workplace

# Runs out in an optimizer step, half-way through the backward pass, for each micro-batch of more than `fits` rows.
BROKEN = """
import torch

def patch(module):
    upstream = module.SFTTrainer.training_step

    def training_step(self, model, inputs, *items, **named):
        if rank == {rank} and self.state.global_step == {step} and len(inputs["input_ids"]) > {fits}:
            layer = next(m for m in model.modules() if type(m).__name__.endswith("DecoderLayer"))
            def full(gradient):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")
            def watch(module, given, output):
                handle.remove()
                (output[0] if isinstance(output, tuple) else output).register_hook(full)
            handle = layer.register_forward_hook(watch)
        return upstream(self, model, inputs, *items, **named)

    module.SFTTrainer.training_step = training_step
"""
TRAIN = {
    "batch_size": 4, "grad_accum": 2, "max_steps": 6, "save_steps": 2, "learning_rate": 1e-3, "warmup": 0,
    "eval_strategy": "no", "scheduler": "constant", "bf16": False,
}  # fmt: skip


def run(workplace: Workplace, name: str, broken: str = "", **variables: str) -> tuple[Outcome, int, str]:
    workplace.config["tuning"] = {}
    workplace.write(tuning={"mode": "full"}, train=TRAIN, run={"name": name, "report_to": []})
    hook = hooked(workplace.path / "hook", "sft_play.runtime.trainer", broken) if broken else {}
    done = workplace.run("train-distributed", CONFIG="tiny.yaml", **{"NUM_GPUS": "1", **hook, **variables})
    return Outcome(workplace.path / "runs" / name), done.code, done.out + done.err


@pytest.mark.fault
def test_one_process_redoes_the_step_in_smaller_parts(workplace: Workplace) -> None:
    straight, code, said = run(workplace, "straight")
    assert code == 0, said
    halved, code, said = run(workplace, "halved", BROKEN.format(rank=0, step=3, fits=1))
    assert code == 0, said
    assert "out of memory in step 4: micro-batch 4 -> 2; the step is redone" in said
    assert "out of memory in step 4: micro-batch 2 -> 1; the step is redone" in said
    assert halved.series("loss") == pytest.approx(straight.series("loss"), abs=5e-6)
    assert halved.series("grad_norm") == pytest.approx(straight.series("grad_norm"), abs=5e-5)
    assert [one["micro_batch"] for one in halved.record["amendments"]] == [2, 1]
    told = [(one["step"], one["text"]) for one in halved.events("event") if one["kind"] == "out_of_memory"]
    text = "out of memory in step 4: micro-batch {}; the step is redone"
    assert told == [(4, text.format(change)) for change in ("4 -> 2", "2 -> 1")]
    for name, weight in straight.weights.items():
        assert float((halved.weights[name] - weight).abs().max()) < 1e-6


@pytest.mark.fault
def test_a_fresh_start_in_the_folder_begins_with_the_plan(workplace: Workplace) -> None:
    out_of_memory = BROKEN.format(rank=0, step=0, fits=2)
    halved, code, said = run(workplace, "tiny", out_of_memory, TRAIN_MAX_STEPS="1", TRAIN_SAVE_STEPS="1")
    assert code == 0, said
    assert [one["micro_batch"] for one in halved.record["amendments"]] == [2]
    anew, code, said = run(workplace, "tiny", TRAIN_MAX_STEPS="1", RUN_RESUME="never")
    assert code == 0, said
    assert "begins with the plan as it is" in said
    assert "memory ran out before" not in said
    assert anew.record["amendments"] == []
    told = json.loads((workplace.path / "runs/tiny/run.json").read_text())
    assert told["plan"]["micro_batch"] == 4
    assert (workplace.path / "runs/tiny/earlier-1/amendments.json").is_file()


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.slow),
        pytest.param("fsdp", marks=pytest.mark.slow),
        pytest.param("zero2", marks=pytest.mark.fault),
    ],
)
def test_several_ranks_start_again_from_the_last_checkpoint(workplace: Workplace, strategy: str) -> None:
    ranks = {"NUM_GPUS": "2", "DIST_STRATEGY": strategy, "TRAIN_GRAD_ACCUM": "1"}
    straight, code, said = run(workplace, "straight", **ranks)
    assert code == 0, said
    # A start anew is one for the user: where the run itself begins again, it keeps what it had to change.
    ranks["RUN_RESUME"] = "never"
    halved, code, said = run(workplace, "halved", BROKEN.format(rank=1, step=3, fits=2), **ranks)
    assert code == 0, said
    assert "out of memory: micro-batch 4 -> 2, 2 accumulated; the global batch and its order stay" in said
    assert "resuming from" in said
    assert halved.series("loss") == pytest.approx(straight.series("loss"), abs=5e-6)
    assert halved.record["amendments"] == [{"step": 0, "micro_batch": 2, "grad_accum": 2}]
    (told,) = [one for one in halved.events("event") if one["kind"] == "out_of_memory"]
    assert told["step"] == 2
    assert told["text"].startswith("out of memory: micro-batch 4 -> 2")
    assert [(one["step"], one["resumed"]) for one in halved.events("start")] == [(0, False), (2, True)]
    run_json = json.loads((halved.path / "run.json").read_text())
    assert (run_json["plan"]["micro_batch"], run_json["plan"]["grad_accum"]) == (2, 2)
    assert run_json["plan"]["global_batch"] == 8


def test_a_single_row_that_does_not_fit_ends_the_run_with_advice(workplace: Workplace) -> None:
    outcome, code, said = run(workplace, "tiny", BROKEN.format(rank=0, step=3, fits=0))
    assert code == 4, said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "out of memory" in line
    assert "a single row" in line
    assert "MODEL_MAX_SEQ_LEN" in line
    assert "Traceback" not in said
    assert (outcome.path / "checkpoints/step-2/manifest.json").is_file()


def test_the_next_smaller_micro_batch_divides() -> None:
    assert [smaller_micro_batch(size) for size in (1, 2, 3, 4, 6, 7, 8, 12)] == [0, 1, 1, 2, 3, 1, 4, 6]
