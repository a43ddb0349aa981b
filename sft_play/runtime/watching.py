"""Brings together what every rank measured, at each logged step, and hands it to whoever logs.

One collective a logged step: each rank sends one row of numbers, rank 0 turns them into the flat keys of
docs/metrics.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_play.config.schema import Config
from sft_play.facts.hardware import GIB
from sft_play.plan.build import Plan
from sft_play.record.checkpoints import PREFIX
from sft_play.record.run_dir import RunDir
from sft_play.record.run_record import append_event, append_metrics
from sft_play.runtime.bottleneck import Bottleneck
from sft_play.runtime.dist import Ranks
from sft_play.runtime.meter import FIELDS, PARTS, Meter, Totals, slowest_of, step_figures, totals_of
from sft_play.runtime.place import COLUMNS, Place, Row, device_names
from sft_play.runtime.sensors import PHASES, Phases, Sensors

# A phase is told again once its peak has grown by this share.
GROWN = 0.01
# Memory is looked at no more often than this.
MEMORY_SECONDS = 0.5
STEP_PARTS = tuple(f"{name}_seconds" for name in ("step", *PARTS, "other"))


class WatchCallback(TrainerCallback):
    """Measures on every rank; rank 0 adds the figures of all of them to what is logged.

    Attributes:
        meter: of this rank; the trainer's hooks feed it.
        names: of every device of the run, on rank 0.
        started: when this attempt began, by the monotonic clock.
        before: the totals that this attempt went on from, once it has trained.
    """

    def __init__(self, config: Config, plan: Plan, run: RunDir, ranks: Ranks) -> None:
        self.config, self.plan, self.run, self.ranks = config, plan, run, ranks
        self.place = Place(plan, ranks)
        self.meter = Meter(Phases(self.place.own_gpus))
        self.sensors = Sensors(plan.device_uuids if ranks.local_rank == 0 else ())
        self.bottleneck = Bottleneck(config, waits=self.waits)
        self.names: list[str] = []
        self.told: dict[str, float] = {}
        self.failed: set[int] = set()
        self.trainer: Any = None
        self.trained = False
        self.started, self.totals, self.before = time.monotonic(), Totals(), Totals()

    @property
    def waits(self) -> bool:
        """Whether the wait for other ranks can be told from work."""
        return self.plan.strategy in ("single", "ddp")

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.names = device_names(self.plan, self.place, self.ranks)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # Looked up here, for a resumed Trainer makes its callbacks anew.
        self.totals = totals_of(self.trainer.callback_handler.callbacks)
        self.before, self.trained = copy(self.totals), True
        copies = self.plan.world_size if self.plan.strategy == "tp" else 1
        self.meter.watch(self.trainer.accelerator, self.trainer.model_wrapped, copies)
        self.meter.phases.enter("train")
        self.meter.begin()
        self.meter.go_on()
        if not self.ranks.main:
            return
        attempt = len(list(self.run.attempts.glob("*.json")))
        told = {name: self.plan.predicted.get(name, 0.0) for name in ("device_bytes", "tokens_per_second")}
        start = {
            "step": state.global_step,
            "attempt": attempt,
            "resumed": state.global_step > 0,
            "strategy": self.plan.strategy,
            "world_size": self.plan.world_size,
            "devices": self.names,
            "predicted": told,
        }
        append_metrics(self.run.metrics, "start", start)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        totals, before = self.totals, self.before
        totals.seconds += self.meter.step_ended()
        totals.tokens = before.tokens + self.trainer._total_train_tokens
        totals.wall_seconds = self.wall_seconds(totals)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.meter.phases.phase != "evaluate":
            self.meter.phases.enter("evaluate")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.meter.phases.enter("train")
        self.meter.go_on()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        seconds = self.meter.phases.enter("train")
        self.meter.go_on()
        if self.ranks.main:
            step = state.global_step
            saved = {"step": step, "path": f"checkpoints/{PREFIX}{step}", "seconds": round(seconds, 3)}
            append_metrics(self.run.metrics, "save", saved)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "loss" not in logs:
            return
        ranks = self._everywhere(self.meter.take())
        if not self.ranks.main:
            return
        found = step_figures(ranks, world=self.plan.world_size, waits=self.waits)
        devices = self.place.merged(ranks)
        self.totals.add(ranks[0]["steps"], {name: found[name] for name in STEP_PARTS if name in found})
        found |= self._mfu(ranks) | self.place.figures(ranks, devices)
        logs.update({name: rounded(value) for name, value in found.items()})
        self._tell(state.global_step, ranks, devices)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.meter.phases.measure()
        ranks = self._everywhere(dict.fromkeys(FIELDS, 0.0))
        if self.ranks.main:
            self._tell_phases(state.global_step, self.place.merged(ranks))
        self.sensors.close()

    def wall_seconds(self, totals: Totals) -> float:
        """Of all attempts until now.

        Args:
            totals: as they are now; where nothing was left to train, those of the earlier attempts.
        """
        earlier = self.before if self.trained else totals
        return earlier.wall_seconds + time.monotonic() - self.started

    def _everywhere(self, own: Row) -> list[Row]:
        """Every rank's row on rank 0; an empty list on the others. A collective."""
        self.meter.phases.measure(at_least_every=MEMORY_SECONDS)
        row = [own[name] for name in FIELDS] + [float(self.meter.phases.resident)]
        row += [one.get(name, math.nan) for one in self._own_devices() for name in COLUMNS]
        if self.ranks.world_size == 1:
            return [self.place.named(row)]
        mine = torch.tensor(row, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.ranks.world_size)] if self.ranks.main else None
        torch.distributed.gather(mine, found, dst=0, group=self.ranks.control)
        return [self.place.named(one.tolist()) for one in found or []]

    def _own_devices(self) -> list[Row]:
        """What this rank knows of each device of its machine."""
        devices: list[Row] = [{} for _ in range(self.place.devices)]
        phases = self.meter.phases
        for index, number in enumerate(self.place.own):
            devices[number] = {phase: peaks[index] for phase, peaks in phases.peaks.items()}
            if phases.gpus:
                gpu = phases.gpus[index]
                devices[number]["memory_allocated_gib"] = torch.cuda.memory_allocated(gpu) / GIB
                devices[number]["memory_reserved_gib"] = torch.cuda.memory_reserved(gpu) / GIB
            else:
                devices[number]["memory_device_gib"] = phases.resident / GIB
        for number, readings in enumerate(self.sensors.take()):
            devices[number] |= {**readings, "failed": float(number in self.sensors.failed)}
        return devices

    def _mfu(self, ranks: Sequence[Row]) -> Row:
        """Model FLOPs of the trained tokens over what the GPUs could do, where their rate is known."""
        predicted, steps = self.plan.predicted, ranks[0]["steps"]
        peak = predicted.get("peak_flops_per_second", 0.0)
        if not peak or not steps:
            return {}
        rate = sum(one["tokens"] for one in ranks) / max(slowest_of(ranks)["step"], 1e-9)
        return {"mfu_percent": 100 * rate * predicted["flops_per_token"] / peak}

    def _tell(self, step: int, ranks: Sequence[Row], devices: Sequence[Row]) -> None:
        """What is no figure: sensors that failed, memory by phase, what holds the run back."""
        for number, one in enumerate(devices):
            if one.get("failed") == 1.0 and number not in self.failed:
                self.failed.add(number)
                text = f"{self.names[number]}: its sensors do not answer any more; its readings end here"
                print(f"warning: {text}")
                append_event(self.run.metrics, step, "sensor", text)
        self._tell_phases(step, devices)
        said = self.bottleneck.look(ranks, [one.get("throttled", 0.0) for one in devices], self.names)
        if said:
            print(f"note: {said}")
            append_event(self.run.metrics, step, "bottleneck", said)

    def _tell_phases(self, step: int, devices: Sequence[Row]) -> None:
        for phase in PHASES:
            peaks = {f"gpu_{number}": one[phase] for number, one in enumerate(devices) if phase in one}
            if peaks and max(peaks.values()) > self.told.get(phase, 0.0) * (1 + GROWN):
                self.told[phase] = max(peaks.values())
                values = {name: int(peak) for name, peak in peaks.items()}
                append_metrics(self.run.metrics, "phase_memory", {"step": step, "phase": phase, "bytes": values})


def rounded(value: float) -> float:
    """Six digits are enough to read and to add up."""
    return float(f"{value:.7g}")


def watch_of(callbacks: Sequence[TrainerCallback]) -> WatchCallback | None:
    """The one of a trainer, if it has one."""
    return next((one for one in callbacks if isinstance(one, WatchCallback)), None)


def meter_of(callbacks: Sequence[TrainerCallback]) -> Meter:
    """What the trainer's hooks feed: the watching callback's meter, or one that nobody reads."""
    watch = watch_of(callbacks)
    return watch.meter if watch else Meter()


def summary_of(watch: WatchCallback) -> dict[str, Any]:
    """What the record keeps: sums over the whole run, and where the time of a step went. Training is over."""
    plan, totals = watch.plan, totals_of(watch.trainer.callback_handler.callbacks)
    gpus = len(plan.device_uuids) * plan.nodes if plan.device == "cuda" else 0
    peak = plan.predicted.get("peak_flops_per_second", 0.0)
    rate = totals.tokens / totals.seconds if totals.seconds else 0.0
    return {
        "tokens": int(totals.tokens),
        "train_seconds": round(totals.seconds, 3),
        "gpu_hours": round(gpus * watch.wall_seconds(totals) / 3600, 4),
        **totals.means(),
        "mfu_percent": round(100 * rate * plan.predicted["flops_per_token"] / peak, 3) if peak else None,
        "warnings_of_other_ranks": warnings_of_other_ranks(watch.run),
    }


def warnings_of_other_ranks(run: RunDir) -> int:
    """Lines that warn in the logs of the ranks that do not speak."""
    logs = [path.read_text(encoding="utf-8", errors="replace") for path in run.path.glob("launch/**/rank-*.log")]
    return sum("warning" in line.lower() for text in logs for line in text.splitlines())
