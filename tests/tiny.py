"""A tiny model, its data and its config, made in code: what the tests train instead of a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.data.tokenizers_made import make_tokenizer

ROOT = Path(__file__).parent.parent


def make_model(folder: Path, *, seed: int = 0, layers: int = 2, vocab_size: int | None = None) -> Path:
    """A random Llama (2 layers, hidden 32, fp32) with the ChatML byte tokenizer beside it."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    made = make_tokenizer("chatml", folder)
    tokenizer = AutoTokenizer.from_pretrained(made)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size or len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(made)
    return made


def make_rows(path: Path, count: int, *, first: int = 0) -> Path:
    """Chat rows of unequal length whose answers can be learned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(first, first + count):
        question = f"What comes after {number}?" + " Think." * (number % 5)
        answer = f"After {number} comes {number + 1}."
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": chat}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def assert_answers_in(seconds: float, run: Callable[[], object]) -> None:
    """A command's processor time is below a bound in one of ten tries: a busy machine slows some, a slow command all.

    Args:
        run: starts the command, waits for it and checks what it said.
    """
    taken = []
    for _ in range(10):
        before = os.times()
        run()
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        taken.append(round(used, 3))
        if used < seconds:
            return
    raise AssertionError(f"needs {min(taken)} s of processor time or more: {taken}")


@dataclass
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


@dataclass
class Workplace:
    """A folder with a tiny model, rows and a config; commands run inside it."""

    path: Path
    model: Path
    config: dict[str, Any] = field(default_factory=dict)

    def write(self, name: str = "tiny.yaml", **sections: dict[str, Any]) -> Path:
        """A config file: the base one with keys of sections replaced."""
        merged = {section: dict(values) for section, values in self.config.items()}
        for section, values in sections.items():
            merged[section] = {**merged.get(section, {}), **values}
        path = self.path / name
        path.write_text(yaml.safe_dump(merged), encoding="utf-8")
        return path

    def environ(self, **variables: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")}
        kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        return {**kept, **variables}

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "sft_play", *words],
            cwd=self.path,
            env=self.environ(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, stdin: str | None = None, **variables: str) -> Done:
        """Run `python -m sft_play WORDS` here, with `variables` as its environment."""
        done = subprocess.run(
            [sys.executable, "-m", "sft_play", *words],
            cwd=self.path,
            env=self.environ(**variables),
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def train(self, **variables: str) -> Done:
        return self.run("train", **{"CONFIG": "tiny.yaml", **variables})

    def record(self, name: str = "tiny") -> dict[str, Any]:
        return json.loads((self.path / "runs" / name / "record.json").read_text())

    def losses(self, name: str = "tiny") -> list[float]:
        """The training loss of every logged step."""
        lines = (self.path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [event["loss"] for event in map(json.loads, lines) if event["event"] == "train"]


def make_workplace(path: Path, model: Path) -> Workplace:
    """Rows and a config of four optimizer steps for `model`."""
    make_rows(path / "train.jsonl", 32)
    make_rows(path / "validation.jsonl", 6, first=100)
    workplace = Workplace(path, model)
    workplace.config = {
        "model": {"name": str(model), "max_seq_len": 128, "dtype": "fp32"},
        "tuning": {"mode": "lora", "lora": {"r": 4, "alpha": 8}},
        "data": {"train": "train.jsonl", "validation": "validation.jsonl"},
        "train": {
            "batch_size": 4,
            "grad_accum": 1,
            "max_steps": 4,
            "learning_rate": 0.01,
            "warmup": 0,
            "scheduler": "constant",
            "bf16": False,
        },
        "run": {"name": "tiny"},
    }
    workplace.write()
    return workplace
