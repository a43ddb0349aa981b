"""A finished run of two ranks, made by hand: every event and key that a page shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sft_play.record.run_dir import RunDir

GIB = 2**30


def made_run(folder: Path, *, answer: str = "", error: str = "", setting: str = "x") -> Path:
    """Write the run.

    Args:
        answer: put after each answer.
        error: what it failed of; empty for a run that is done.
        setting: value of a setting.
    """
    run = RunDir(folder)
    run.create()
    plan = {
        "strategy": "ddp",
        "world_size": 2,
        "device": "cuda",
        "device_name": "GPU",
        "predicted": {"device_bytes": GIB},
    }
    told = {"config": {"model": {"name": "m"}, "tuning": {"mode": "full"}, "train": {"note": setting}}, "plan": plan}
    run.run_json.write_text(json.dumps(told))
    run.config_yaml.write_text(f"train:\n  note: {setting}   # from mine.yaml:3\n")
    (run.attempts / "001.json").write_text("{}")
    run.metrics.write_text("".join(json.dumps(event) + "\n" for event in _events()))
    outcome = {"outcome": "ConfigError", "error": [error]} if error else {"outcome": "done"}
    run.record.write_text(json.dumps({**_record(), **outcome}))
    (folder / "eval").mkdir()
    for step in (0, 5, 10):
        answers = [_answer(step, row, answer) for row in range(4)]
        (folder / f"eval/step-{step}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    return folder


def _answer(step: int, row: int, more: str) -> dict[str, Any]:
    text = f"answer of {step} to row {row} {more}"
    return {
        "row": row,
        "prompt": f"row {row}? {more}",
        "reference": f"reference {row}",
        "prediction": text,
        "rougeL": 0.5,
    }


def _record() -> dict[str, Any]:
    summary = {
        "tokens": 1234, "train_seconds": 9.5, "gpu_hours": 0.01, "step_seconds": 1.0, "data_seconds": 0.1,
        "compute_seconds": 0.6, "optimizer_seconds": 0.1, "wait_seconds": 0.1, "other_seconds": 0.1,
    }  # fmt: skip
    return {
        "train_loss": 1.25, "eval_loss": 1.5, "eval_loss_before": 2.5, "steps": 10, "best_step": 10, "seconds": 12.5,
        "tokens_per_second": 98.7, "measured": {"device_bytes": GIB + 5}, "predicted": {"device_bytes": GIB},
        "summary": summary, "result": "model",
    }  # fmt: skip


def _events() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"event": "start", "step": 0, "resumed": False}]
    for step in range(1, 11):
        train = {"event": "train", "step": step, "loss": 3.0 - step / 10, "learning_rate": 1e-4, "grad_norm": 1.0,
                 "tokens_per_second": 100.0, "step_seconds": 1.0, "data_seconds": 0.2,
                 "compute_seconds": 0.8}  # fmt: skip
        for rank in (0, 1):
            train |= {f"loss_rank_{rank}": 2.0, f"memory_device_gib_gpu_{rank}": 1.0, f"power_watts_gpu_{rank}": 300.0}
        found.append(train)
        if step % 5 == 0:
            found.append({"event": "eval", "step": step, "eval_loss": 2.0, "eval_token_accuracy": 0.5})
        if step == 4:
            found.append({"event": "event", "step": 4, "kind": "spike", "text": "norm far above"})
        if step == 5:
            found.append({"event": "start", "step": 5, "resumed": True})
    found.append({"event": "phase_memory", "step": 10, "phase": "train", "bytes": {"gpu_0": GIB, "gpu_1": GIB}})
    return [{"time": 1_700_000_000.0 + n, **event} for n, event in enumerate(found)]
