"""The finished demo run, looked at from outside: plain transformers and peft, and its own records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.runtime.test_training import held_out_loss
from tests.tiny import ROOT

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def run() -> Path:
    runs = sorted((ROOT / "runs").glob("demo-*/record.json"), key=lambda path: path.stat().st_mtime)
    assert runs, "run make demo first"
    return runs[-1].parent


def test_the_loss_fell_by_15_percent(run: Path) -> None:
    record = json.loads((run / "record.json").read_text())
    assert record["eval_loss"] <= 0.85 * record["eval_loss_before"]
    # Two idle cores need about two minutes; the bound leaves room for a machine that does other work too.
    assert record["seconds"] <= 480


def test_plain_transformers_and_peft_give_the_reported_loss(run: Path) -> None:
    """bf16 matrix products differ with the batch's shape, so the bound is one of bf16, not of fp32."""
    job = json.loads((run / "run.json").read_text())
    record = json.loads((run / "record.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(job["model_path"], dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, str(run / "adapter")).eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    lines = (ROOT / "data/demo/validation.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[: job["config"]["train"]["eval_max_rows"]]]
    with torch.autocast("cpu", torch.bfloat16):
        by_hand = held_out_loss(model, tokenizer, rows)
    print(f"reported {record['eval_loss']:.6f}, by hand {by_hand:.6f}")
    assert by_hand == pytest.approx(record["eval_loss"], abs=5e-3)


def test_the_labels_of_real_rows_are_the_answer_and_the_end_token(run: Path) -> None:
    from datasets import Dataset

    job = json.loads((run / "run.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    prepared = Dataset.from_file(job["splits"]["validation"])
    lines = (ROOT / "data/demo/validation.jsonl").read_text().splitlines()
    assert len(prepared) == len(lines)
    for row, line in zip(prepared, lines, strict=True):
        learned = [label for label in row["labels"] if label != -100]
        answer = json.loads(line)["messages"][-1]["content"]
        assert tokenizer.decode(learned) == answer + "<|im_end|>"
