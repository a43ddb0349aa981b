"""The real program evaluating while it trains: budget, cache, sources, resume, memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.runtime.evaluated import GENERATE, broken_generation, evaluations, predictions
from tests.tiny import Workplace, make_model, make_rows


def test_slow_generation_keeps_to_its_budget_and_says_how_many_rows(workplace: Workplace) -> None:
    make_rows(workplace.path / "validation.jsonl", 40, first=100)
    slow = {**GENERATE, "eval_time_budget": 0.5, "eval_steps": 60, "max_steps": 120, "logging_steps": 20}
    workplace.write(train=slow)
    done = workplace.train(**broken_generation(workplace, "time.sleep(0.05)"))
    assert done.code == 0, done.out[-2000:] + done.err
    kept = workplace.record()["evaluation"]
    assert kept["mode"] == "sample"
    assert 0 < kept["generation_seconds"] <= 1.2 * 0.5 * kept["training_seconds"]
    first, last = evaluations(workplace.path / "runs/tiny")
    assert 2 <= last["eval_generated_rows"] <= first["eval_generated_rows"] < 40
    assert f"answers at step 120: {kept['rows']} of 40 rows in" in done.out
    assert "50% allowed" in done.out
    assert "evaluation: losses" in done.out
    rows = {step: [one["row"] for one in predictions(workplace.path / "runs/tiny", step)] for step in (60, 120)}
    assert len(rows[120]) == kept["rows"]
    assert set(rows[120]) <= set(rows[60])


def test_sources_apart_the_cache_and_text_in_tensorboard(workplace: Workplace) -> None:
    """The finished run goes back to its first evaluation's weights; what those answered is not generated again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_rows(workplace.path / "one.jsonl", 3, first=100)
    make_rows(workplace.path / "two.jsonl", 2, first=200)
    two = workplace.path / "two.jsonl"
    two.write_text(two.read_text().replace("After ", "在").replace(" comes ", "这个数字之后是"))
    best = {"metric_for_best_model": "eval_loss", "greater_is_better": True, "load_best_model_at_end": True}
    saved = {"save_strategy": "steps", "save_steps": 2, "eval_accumulation_steps": 1, "eval_do_concat_batches": False}
    sources = {"validation": [{"path": "one.jsonl"}, {"path": "two.jsonl"}]}
    workplace.write(data=sources, train={**GENERATE, "eval_steps": 2, **best, **saved})
    done = workplace.train()
    assert done.code == 0, done.out[-2000:] + done.err
    run = workplace.path / "runs/tiny"
    record = workplace.record()
    assert record["best_step"] == 2
    assert record["evaluation"]["generations"] == 2  # the third found everything in the cache
    assert len((run / "eval/cache.jsonl").read_text().splitlines()) == 2 * 5
    first, _, again = evaluations(run)
    for name in ("eval_loss", "eval_rougeL", "eval_loss/0-one", "eval_rougeL/1-two", "eval_generated_rows/1-two"):
        assert first[name] == again[name], name
    assert first["eval_generated_rows/0-one"] == 3
    assert [one["source"] for one in predictions(run, 4)] == [0, 0, 0, 1, 1]
    note = "ROUGE counts a-z and 0-9 only: less than half of the letters of 2 of 5 references"
    assert f"warning: {note} -> train.eval_rouge_tokenizer: unicode" in done.out
    assert record["evaluation"]["note"] == note
    told = [one for one in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if one["event"] == "event"]
    assert [(one["step"], one["kind"], one["text"]) for one in told if one["kind"] == "evaluation"] == [
        (2, "evaluation", note)
    ]
    events = EventAccumulator(str(run / "tb"))
    events.Reload()
    shown = events.Tensors("eval/answers/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "What comes after" in shown


def test_patience_and_best_score_go_on_where_a_run_was_stopped(workplace: Workplace) -> None:
    stops = {"metric_for_best_model": "rougeL", "early_stopping_patience": 2, "max_steps": 10}
    saved = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 20}
    # So small a rate that the same nonsense is answered for ever: no evaluation improves on the first.
    workplace.write(train={**GENERATE, "eval_steps": 1, "learning_rate": 1e-7, **stops, **saved})
    assert workplace.train().code == 0
    run = workplace.path / "runs/tiny"
    straight = json.loads((run / "checkpoints/step-3/trainer_state.json").read_text())
    assert workplace.record()["steps"] == 3
    (run / "record.json").unlink()
    shutil.rmtree(run / "checkpoints/step-3")
    done = workplace.train()
    assert done.code == 0, done.out[-2000:] + done.err
    assert "resuming from runs/tiny/checkpoints/step-2" in done.out
    assert workplace.record()["steps"] == 3
    resumed = json.loads((run / "checkpoints/step-3/trainer_state.json").read_text())
    for key in ("best_metric", "best_global_step"):
        assert resumed[key] == straight[key]
    stopping = [one["stateful_callbacks"]["EarlyStoppingCallback"] for one in (straight, resumed)]
    assert stopping[0] == stopping[1]
    assert stopping[0]["attributes"]["early_stopping_patience_counter"] == 2


def test_answers_do_not_depend_on_how_batches_are_kept_or_on_earlier_draws(workplace: Workplace) -> None:
    """Sampling draws from a state of its own: the losses of training stay those of a run that never generates."""
    drawn = {"generation_do_sample": True, "generation_top_p": 0.9, "eval_steps": 2}
    workplace.write("plain.yaml", tuning={"lora": {"r": 4, "dropout": 0.1}})
    workplace.write(tuning={"lora": {"r": 4, "dropout": 0.1}}, train={**GENERATE, **drawn})
    assert workplace.train(RUN_NAME="plain", CONFIG="plain.yaml").code == 0
    for name, keep in (("one", "1"), ("many", "5")):
        done = workplace.train(RUN_NAME=name, TRAIN_EVAL_ACCUMULATION_STEPS=keep)
        assert done.code == 0, done.out[-2000:] + done.err
    runs = workplace.path / "runs"
    assert predictions(runs / "one", 4) == predictions(runs / "many", 4)
    assert workplace.losses("one") == workplace.losses("plain")


MEASURED = """
import ctypes, sys, torch
from datasets import Dataset
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
from sft_play.runtime.answers import Generation
from sft_play.runtime.evaluate import EvalSettings, evaluate_rows, loss_batches, with_fused_head

def peak(work):
    status = lambda key: next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if key in l)
    work()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free already would be taken without growing
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return (status("VmHWM") - before) * 1024

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
rows = [{"input_ids": [5] * 96, "labels": [-100] * 64 + [7] * 32, "source": 0}] * 2
data = Dataset.from_list(rows)
with_fused_head(model)
optimizer = torch.optim.AdamW(model.parameters())
(batch,) = loss_batches(data, 2)
del batch["source"]

def step():
    model.train()
    model(**batch, use_cache=False, fused_lm_head=True).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

answers = Generation(end_ids=(2,), pad_id=2, max_new_tokens=4)
evaluation = lambda: evaluate_rows(model, tokenizer, data, EvalSettings(batch=2, generation=answers))
print(peak(evaluation), peak(step))
"""


def test_evaluation_needs_no_more_memory_than_a_step_with_a_vocabulary_of_100000_words(tmp_path: Path) -> None:
    model = make_model(tmp_path, vocab_size=100_000)
    environ = Workplace(tmp_path, model).environ()
    words = [sys.executable, "-c", MEASURED, str(model)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    evaluation, step = map(int, done.stdout.split()[-2:])
    assert 0 < evaluation <= step
