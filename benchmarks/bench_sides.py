"""The sides of a case of `make bench`, each a process of its own: ours, plain trl, and ours through unsloth."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench_cases import BenchCase
from benchmarks.measure import ROOT, run_limited
from benchmarks.overhead import steady_speed

OURS, PLAIN, UNSLOTH = "ours", "plain", "unsloth"
NOT_OURS = ("ARGS", "SFT_PLAY_MAKE_VARIABLES", "MAKEFLAGS", "MAKELEVEL")
MEAN_ROW = 9 / 16  # of packed rows, as a share of the length: they are drawn from an eighth to all of it


@dataclass(kw_only=True)
class Bench:
    """One measuring of this machine.

    Attributes:
        folder: models, rows and runs, thrown away at the end.
        steps: optimizer steps of a run; the first is not timed.
        limit: seconds that a process may take.
        environ: what the processes are given.
    """

    folder: Path
    steps: int
    limit: float
    environ: dict[str, str] = field(default_factory=lambda: clean(os.environ.copy()))

    def measure(self, case: BenchCase, side: str, number: int) -> dict[str, Any]:
        """Figures of one run; `error` alone where it failed."""
        place = self.folder / f"{case.name}-{side}-{number}"
        try:
            self.prepare(case)
            return self.plain(case, place) if side == PLAIN else self.ours(case, side, place)
        except RuntimeError as error:
            return {"error": str(error)}

    def prepare(self, case: BenchCase) -> None:
        """The case's model and rows, once."""
        if not (self.folder / f"{case.name}.jsonl").exists():
            self.run([sys.executable, "-m", "benchmarks.bench_model", case.name, str(self.folder)], {})

    def ours(self, case: BenchCase, side: str, place: Path) -> dict[str, Any]:
        """`make train` of the case; unsloth is the same config with another backend."""
        model, rows = self.folder / case.model_key, self.folder / f"{case.name}.jsonl"
        output = self.folder / f"{case.name}-runs"
        settings = case.settings(model=str(model), rows=str(rows), output=output, steps=self.steps)
        config = place.with_suffix(".yaml")
        config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
        given = {"CONFIG": str(config), "RUN_NAME": place.name}
        if side == UNSLOTH:
            given["TUNING_BACKEND"] = UNSLOTH
        began = self.run([sys.executable, "-m", "sft_play", "train"], given)
        run = output / place.name
        events = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        record, job = (json.loads((run / name).read_text(encoding="utf-8")) for name in ("record.json", "run.json"))
        self.job_of(case).write_text(json.dumps(job), encoding="utf-8")
        shutil.rmtree(run)  # a full model of this size may be the last that the disk holds
        return {**figures(events, began, record["peak_memory_bytes"]), "plan": chosen_by_plan(job["plan"])}

    def job_of(self, case: BenchCase) -> Path:
        """What the plan said, for the plain side."""
        return self.folder / f"{case.name}-run.json"

    def plain(self, case: BenchCase, place: Path) -> dict[str, Any]:
        """The same with plain trl, by the plan of a run of ours that came before."""
        if not self.job_of(case).exists():
            raise RuntimeError("no plan to follow: our side failed")
        rows = round(case.micro_batch / MEAN_ROW) if case.packing else case.micro_batch
        result = place.with_suffix(".json")
        command = [sys.executable, "-m", "benchmarks.bench_plain", str(self.job_of(case)), str(self.steps), str(rows)]
        began = self.run([*command, str(result)], {})
        told = json.loads(result.read_text(encoding="utf-8"))
        return figures(told["events"], began, told["peak_bytes"])

    def run(self, command: list[str], given: dict[str, str]) -> float:
        """Run a command and return when it was started, in seconds of the clock.

        Raises:
            RuntimeError: it failed or took too long; the text is its last line.
        """
        began = time.time()
        environ = {**self.environ, **given, "PYTHONPATH": str(ROOT)}
        code, words = run_limited(command, environ, self.limit, self.folder / "output.txt")
        if code is None:
            raise RuntimeError(f"over its limit of {self.limit:.0f} s")
        if code:
            raise RuntimeError(f"ended with {code}: {words}")
        return began


def clean(environ: dict[str, str]) -> dict[str, str]:
    """The environment without what make was given for us, on one GPU at most, with no network."""
    kept = {key: value for key, value in environ.items() if key not in NOT_OURS}
    one_gpu = kept.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return kept | {"CUDA_VISIBLE_DEVICES": one_gpu, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def figures(events: list[dict[str, Any]], began: float, peak_bytes: float) -> dict[str, Any]:
    """Real tokens a second after the first step, seconds from the start of the process to its end, peak, losses."""
    steps = [event for event in events if event["event"] == "train"]
    return {
        "tokens_per_second": steady_speed(events),
        "first_step_seconds": steps[0]["time"] - began,
        "peak_bytes": peak_bytes,
        "first_loss": steps[0]["loss"],
    }


def chosen_by_plan(plan: dict[str, Any]) -> dict[str, Any]:
    """What the plan decided for the case, and the FLOPs that an MFU needs."""
    kept = ("dtype", "autocast", "attention", "loss", "kernels", "optimizer", "gradient_checkpointing", "mfu_formula")
    rates = {key: plan["predicted"].get(key, 0.0) for key in ("flops_per_token", "peak_flops_per_second")}
    return {**{key: plan[key] for key in kept}, **rates}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of the rounds that came to an end; the error of the last one where none did."""
    done = [one for one in rounds if "error" not in one]
    if not done:
        return {"error": rounds[-1]["error"]} if rounds else {"error": "not run"}
    numbers = ("tokens_per_second", "first_step_seconds", "peak_bytes", "first_loss")
    found: dict[str, Any] = {key: statistics.median(one[key] for one in done) for key in numbers}
    plans = [one["plan"] for one in done if "plan" in one]
    return {**found, **({"plan": plans[0]} if plans else {})}
