"""The model card: the hub's ids in full, this machine's paths not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_play.report.card import data_name, license_of, model_card
from sft_play.report.read import read_run

COMMIT = "a" * 40


def make_run(folder: Path, model_path: str) -> Path:

    told = {
        "model_path": model_path,
        "config": {"model": {"name": "Qwen/Qwen3-0.6B"}, "data": {"train": ["org/chats", "/home/me/own.jsonl"]}},
        "stamp": {"mode": "lora", "versions": {"torch": "2.13.0", "deepspeed": "absent"}},
    }
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(told))
    (folder / "record.json").write_text(json.dumps({"eval_loss": 2.5, "eval_loss_before": 3.25}))
    return folder


def test_a_base_of_the_hub_is_named_with_its_commit(tmp_path: Path) -> None:
    cached = f"/cache/models--Qwen--Qwen3-0.6B/snapshots/{COMMIT}"
    card = model_card(read_run(make_run(tmp_path / "run", cached)), kind="adapter")
    assert "base_model: Qwen/Qwen3-0.6B\n" in card
    assert f"| Revision | {COMMIT} |" in card
    assert "datasets:\n- org/chats\n---" in card
    assert "| Trained on | org/chats, own.jsonl |" in card
    assert "| Held-out loss | 2.5000 (3.2500 before) |" in card
    assert "/home/me" not in card
    assert "deepspeed" not in card


def test_a_folder_is_no_base_of_the_hub(tmp_path: Path) -> None:
    card = model_card(read_run(make_run(tmp_path / "run", str(tmp_path / "Qwen3-0.6B"))), kind="model")
    assert "base_model:" not in card
    assert str(tmp_path) not in card


def test_secrets_are_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "own.jsonl")
    assert "own.jsonl" not in model_card(read_run(make_run(tmp_path / "run", "x")), kind="model")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("README.md", "---\nlanguage: en\nlicense: llama3.1\n---\n", "llama3.1"),
        ("LICENSE", "\n  Apache License\nVersion 2.0\n", "see its LICENSE: Apache License"),
        ("README.md", "license: not in a front matter\n", "not stated"),
    ],
)
def test_the_licence_is_the_bases_own(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert license_of(tmp_path) == said


def test_names_of_data() -> None:
    assert [data_name(one) for one in ("org/set", "./a/b.jsonl", "data/train.jsonl", "/x/y")] == [
        "org/set", "b.jsonl", "train.jsonl", "y",
    ]  # fmt: skip
