"""Runs of several gloo ranks on the tiny model, each made once and shared by the tests that look at it."""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.tiny import Done, Workplace

STEPS = 20
ADAPTER = {"r": 4, "alpha": 8, "dropout": 0.0}
LORA = {"mode": "lora", "lora": ADAPTER}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"tuning": {"mode": "full"}},
    "lora": {"tuning": LORA},
    "lora-head": {"tuning": {"mode": "lora", "lora": {**ADAPTER, "modules_to_save": ["lm_head"]}}},
    "full-bf16": {"tuning": {"mode": "full"}, "model": {"dtype": "auto"}, "train": {"bf16": True}},
    "lora-bf16": {"tuning": LORA, "model": {"dtype": "bf16"}, "train": {"bf16": True}},
    "qlora": {"tuning": {**LORA, "mode": "qlora"}, "model": {"dtype": "bf16"}, "train": {"bf16": True}},
}
TRAIN = {
    "batch_size": "auto",
    "grad_accum": 1,
    "global_batch_size": 8,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "warmup": 2,
    "eval_strategy": "no",
    "save_strategy": "no",
    "weight_decay": 0.1,
}


@dataclass(frozen=True)
class Case:
    """One way to lay the same run over ranks.

    Attributes:
        wrapper: start of the wrapper's type name that proves the strategy.
        shards: ranks that share one copy of the weights.
    """

    name: str
    ranks: int
    wrapper: str
    shards: int = 1
    variables: tuple[tuple[str, str], ...] = ()
    strategy: str = ""

    @property
    def environ(self) -> dict[str, str]:
        return {"DIST_STRATEGY": self.strategy or self.name, **dict(self.variables)}


OPTIMIZER = (("DIST_CPU_OFFLOAD", "optimizer"),)
PARAMS = (("DIST_CPU_OFFLOAD", "params"),)
SINGLE = Case("single", 1, "LlamaForCausalLM")
CASES = {
    case.name: case
    for case in (
        Case("ddp", 2, "DistributedDataParallel"),
        Case("fsdp", 2, "FSDP", 2),
        Case("hsdp", 4, "FSDP", 2, (("DIST_SHARDING_FACTOR", "2"),)),
        Case("tp", 2, "LlamaForCausalLM", 2),
        Case("zero1", 2, "DeepSpeedEngine", 2),
        Case("zero2", 2, "DeepSpeedEngine", 2),
        Case("zero3", 2, "DeepSpeedEngine", 2),
        Case("zero2-offload", 2, "DeepSpeedEngine", 2, OPTIMIZER, "zero2"),
        Case("zero3-offload", 2, "DeepSpeedEngine", 2, OPTIMIZER, "zero3"),
        Case("zero3-params", 2, "DeepSpeedEngine", 2, PARAMS, "zero3"),
    )
}


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    path: Path

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self.events("train")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of one kind, in their order."""
        events = map(json.loads, (self.path / "metrics.jsonl").read_text().splitlines())
        return [event for event in events if event["event"] == kind]

    def series(self, name: str) -> list[float]:
        return [float(step[name]) for step in self.steps]

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.path / "record.json").read_text())

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        (file,) = [*self.path.glob("adapter/*.safetensors"), *self.path.glob("model/*.safetensors")]
        return load_file(file)


def run_case(workplace: Workplace, method: str, case: Case, name: str, **variables: str) -> Done:
    """Train one method by one case; rows differ in length, every step has eight of them."""
    settings = METHODS[method]
    workplace.config["tuning"] = {}
    workplace.write(
        f"{name}.yaml",
        model={**workplace.config["model"], **settings.get("model", {})},
        tuning=settings["tuning"],
        train={"bf16": False, **TRAIN, **settings.get("train", {})},
        run={"name": name, "report_to": []},
    )
    ranks = {"NUM_GPUS": str(case.ranks)} if case.ranks > 1 else {}
    # A rank of tensor parallel sees every row, the others their share.
    rows = 8 // (1 if case.name == "tp" else case.ranks)
    given = {"TRAIN_BATCH_SIZE": str(rows), **ranks, **case.environ, **variables}
    return workplace.run("train-distributed", CONFIG=f"{name}.yaml", **given)


def shared_run(shared: Workplace, method: str, case: Case) -> Outcome:
    """The run of a case, made by the first test that asks for it, in whichever process."""
    name = f"{method}-{case.name}"
    with (shared.path / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcome = Outcome(shared.path / "runs" / name)
        if not (outcome.path / "record.json").is_file():
            done = run_case(shared, method, case, name)
            assert done.code == 0, done.out[-2000:] + done.err
    return outcome
