"""The real program on a tiny model: what a run trains, records and leaves behind."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import Workplace

QUANTIZED = {"mode": "qlora", "lora": {"r": 4, "alpha": 8}}


@pytest.mark.parametrize("tuning", [{"mode": "lora", "lora": {"r": 4, "alpha": 8}}, QUANTIZED, {"mode": "full"}])
def test_a_run_of_every_mode_learns_and_leaves_its_folder(workplace: Workplace, tuning: dict) -> None:
    mode = tuning["mode"]
    workplace.config["tuning"] = tuning
    workplace.write(train={**workplace.config["train"], "max_steps": 8, "eval_on_start": True})
    done = workplace.train()
    assert done.code == 0, done.err + done.out
    run = workplace.path / "runs" / "tiny"
    record = workplace.record()
    assert record["outcome"] == "done"
    assert record["eval_loss"] < record["eval_loss_before"]
    assert record["steps"] == len(workplace.losses()) == 8
    result = run / ("model" if mode == "full" else "adapter")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "manifest.json"):
        assert (result / name).is_file(), name
    for name in ("run.json", "run.log", "metrics.jsonl", "attempts/001.json", "checkpoints/step-8/manifest.json"):
        assert (run / name).is_file(), name
    assert not list(run.rglob("training_args.bin"))
    assert record["quantised_layers"] == (14 if mode == "qlora" else 0)
    assert f"step 8/8  loss {workplace.losses()[-1]:.4f}" in done.out


def test_tensorboard_holds_the_losses_of_the_run(workplace: Workplace) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert workplace.train().code == 0
    events = EventAccumulator(str(workplace.path / "runs/tiny/tb"))
    events.Reload()
    shown = [point.value for point in events.Scalars("train/loss")]
    assert shown == pytest.approx(workplace.losses(), rel=1e-6)


def test_the_same_seed_gives_the_same_losses_and_weights_to_the_bit(workplace: Workplace) -> None:
    workplace.write(tuning={"mode": "lora", "lora": {"r": 4, "alpha": 8, "dropout": 0.1}})
    for name in ("one", "two"):
        assert workplace.train(RUN_NAME=name).code == 0
    assert workplace.train(RUN_NAME="other", TRAIN_SEED="7").code == 0
    assert workplace.losses("one") == workplace.losses("two") != workplace.losses("other")
    weights = [
        (workplace.path / f"runs/{name}/adapter/adapter_model.safetensors").read_bytes() for name in ("one", "two")
    ]
    assert weights[0] == weights[1]


def held_out_loss(model: torch.nn.Module, tokenizer, rows: list[dict]) -> float:
    """Mean loss over the answers' tokens and the end token, by hand: no padding, no code of ours."""
    total, count = 0.0, 0
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], tokenize=False, add_generation_prompt=True)
        whole = prompt + row["messages"][-1]["content"] + "<|im_end|>"
        start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        ids = torch.tensor([tokenizer(whole, add_special_tokens=False).input_ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].float()
        learned = ids[0, start:]
        total += torch.nn.functional.cross_entropy(logits[start - 1 : -1], learned, reduction="sum").item()
        count += len(learned)
    return total / count


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_result_loads_with_plain_transformers_and_gives_the_reported_loss(workplace: Workplace, mode: str) -> None:
    if mode == "full":
        workplace.config["tuning"] = {"mode": "full"}
    workplace.write(train={**workplace.config["train"], "eval_batch_size": 4})
    assert workplace.train().code == 0
    run = workplace.path / "runs" / "tiny"
    if mode == "lora":
        base = AutoModelForCausalLM.from_pretrained(workplace.model, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, str(run / "adapter"))
        tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    else:
        model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(run / "model")
    rows = [json.loads(line) for line in (workplace.path / "validation.jsonl").read_text().splitlines()]
    by_hand = held_out_loss(model.eval(), tokenizer, rows)
    assert by_hand == pytest.approx(workplace.record()["eval_loss"], abs=1e-5)


def test_the_global_batch_is_one_curve_however_it_is_cut(workplace: Workplace) -> None:
    """4 x 2 = 8 x 1: the loss is averaged over tokens across accumulation."""
    assert workplace.train(RUN_NAME="whole", TRAIN_BATCH_SIZE="8").code == 0
    assert workplace.train(RUN_NAME="cut", TRAIN_BATCH_SIZE="4", TRAIN_GRAD_ACCUM="2").code == 0
    assert workplace.losses("whole") == pytest.approx(workplace.losses("cut"), abs=2e-6)


def test_the_best_checkpoint_is_kept_and_loaded(workplace: Workplace) -> None:
    """The learning rate makes the loss rise after its best step; rotation keeps one checkpoint and the best."""
    workplace.write(
        train={
            **workplace.config["train"],
            "max_steps": 6,
            "learning_rate": 4.0,
            "warmup": 8,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_steps": 1,
            "save_total_limit": 1,
            "metric_for_best_model": "eval_loss",
            "load_best_model_at_end": True,
        }
    )
    done = workplace.train()
    assert done.code == 0, done.err
    run = workplace.path / "runs/tiny"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated: dict[int, float] = {}
    for line in lines:
        if line["event"] == "eval":
            evaluated.setdefault(line["step"], line["eval_loss"])
    record = workplace.record()
    best = min(evaluated, key=evaluated.__getitem__)
    assert record["best_step"] == best
    assert record["eval_loss"] == pytest.approx(evaluated[best], abs=1e-6)
    assert {folder.name for folder in (run / "checkpoints").glob("step-*")} == {f"step-{best}", "step-6"}
    assert best < 6
    saved = load_file(run / f"checkpoints/step-{best}/adapter_model.safetensors")
    final = load_file(run / "adapter/adapter_model.safetensors")
    assert all(torch.equal(saved[key], final[key]) for key in final)


def test_early_stopping_ends_the_run(workplace: Workplace) -> None:
    workplace.write(
        train={
            **workplace.config["train"],
            "max_steps": 30,
            "learning_rate": 0.0,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "metric_for_best_model": "eval_loss",
            "early_stopping_patience": 2,
        }
    )
    done = workplace.train()
    assert done.code == 0, done.err
    assert workplace.record()["steps"] < 6
