"""Runs whose evaluation generates answers, and a way to break generation inside the real program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny import ROOT, Workplace

ANSWER = "It is 42."
GENERATE = {
    "predict_with_generate": True,
    "generation_max_new_tokens": 12,
    "eval_time_budget": 0.0,
    "eval_batch_size": 2,
    "eval_strategy": "steps",
}
# Runs in every process of the program; the module it changes is only loaded by workers.
HOOK = """
import importlib.abc, importlib.util, os, sys, time

class Patch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "sft_play.runtime.answers":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            module.generate_ids = wrapped(module.generate_ids)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Patch())
rank, calls = int(os.environ.get("RANK", 0)), []

def wrapped(generate):
    def generate_ids(*given):
        calls.append(1)
        {broken}
        return generate(*given)
    return generate_ids
"""


def broken_generation(workplace: Workplace, code: str) -> dict[str, str]:
    """Variables under which `code` runs before every batch is generated; it knows `rank`, `calls` and `time`."""
    folder = workplace.path / "hook"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(HOOK.replace("{broken}", code))
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def fixed_rows(path: Path, count: int, *, first: int = 0) -> None:
    """Questions that all have one answer."""
    rows = [
        [
            {"role": "user", "content": f"What comes after {number}?" + " Think." * (number % 5)},
            {"role": "assistant", "content": ANSWER},
        ]
        for number in range(first, first + count)
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def predictions(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"eval/step-{step}.jsonl").read_text().splitlines()]


def evaluations(run: Path) -> list[dict[str, Any]]:
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == "eval"]
