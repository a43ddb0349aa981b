"""What one rank measures while it trains: its losses, its tokens and where the time of a step goes.

Everything is timed on the host. On a GPU kernels run behind it: their time is booked where the host next waits for a
value, which trl's loss does in every micro-batch, so parts are right to within the kernels launched after that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from sft_play.runtime.collate import IGNORED, REAL_TOKENS
from sft_play.runtime.sensors import Phases

PARTS = ("data", "compute", "wait", "optimizer")
# Micro-batches whose values are kept one by one on the device before they are added up.
HELD = 64


class Meter:
    """Adds up one interval between two logged steps.

    Attributes:
        steps: optimizer steps of the interval.
        seconds: of the steps, whole (`step`) and by part; evaluation and saving are no part of a step.
        phases: the memory of this process by phase.
    """

    def __init__(self, phases: Phases | None = None) -> None:
        self.phases = phases or Phases()
        self._copies = 1
        self._ddp: DistributedDataParallel | None = None
        self._mark = self._ended = 0.0
        self._inside = False
        self._waited = 0.0
        self.begin()

    def begin(self) -> None:
        """Start an interval."""
        self.steps = 0
        self.seconds = dict.fromkeys(("step", *PARTS), 0.0)
        self._sums: torch.Tensor | None = None
        self._numbers = [0.0] * 4
        self._held: list[tuple[Any, ...]] = []

    def go_on(self) -> None:
        """The next step begins now: what came since the last one was no training."""
        self._mark = time.perf_counter()

    def watch(self, accelerator: Any, model: Any, copies: int) -> None:
        """Tell the wait for other ranks from work, under DDP. Other engines wait inside of their forward passes.

        Args:
            copies: ranks that train on the same rows (tensor parallel).
        """
        self._copies = copies
        if not isinstance(model, DistributedDataParallel) or self._ddp is model:
            return
        self._ddp, self._waited = model, 0.0
        model._set_ddp_runtime_logging_sample_rate(1)
        gather = accelerator.gather

        def timed(*args: Any, **named: Any) -> Any:
            started = time.perf_counter()
            found = gather(*args, **named)
            if self._inside:
                self.seconds["wait"] += time.perf_counter() - started
            return found

        accelerator.gather = timed

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Book the time of a block, less what it waited for other ranks."""
        started, waited, self._inside = time.perf_counter(), self.seconds["wait"], True
        try:
            yield
        finally:
            self._ended, self._inside = time.perf_counter(), False
            self.seconds[name] += self._ended - started - (self.seconds["wait"] - waited)

    def add(self, inputs: Mapping[str, Any], rows: torch.Tensor | None, loss: torch.Tensor, items: Any) -> None:
        """Count a micro-batch. Nothing waits for the device.

        Args:
            rows: numbers of its rows, or packs; None for a row each of the inputs.
            loss: its share of the step's loss, as the Trainer adds it up.
            items: answer tokens of the step over all ranks.
        """
        answer = inputs["labels"][..., 1:].ne(IGNORED).sum()
        real = inputs.get(REAL_TOKENS)
        if real is None:
            mask = inputs.get("attention_mask")
            real = inputs["input_ids"].numel() if mask is None else mask.sum()
        count = len(inputs["input_ids"] if rows is None else rows)
        self._held.append((loss, answer, 1 if items is None else items, real, count))
        if len(self._held) >= HELD:
            self._add_up()

    def _add_up(self) -> None:
        """Values of micro-batches into sums, on the device still."""
        device = self._held[0][0].device
        if device.type == "cpu":  # numbers are at hand there, and tensors of one number slow
            for loss, answer, items, real, count in (map(float, one) for one in self._held):
                self._numbers = [
                    held + new
                    for held, new in zip(self._numbers, (loss, answer / items, real, count * (answer > 0)), strict=True)
                ]
            self._held = []
            return
        columns = [_column(one, device) for one in zip(*self._held, strict=True)]
        loss, answer, items, real, count = columns
        # A batch without answer tokens is one row that only fills it.
        found = torch.stack([loss.sum(), (answer / items).sum(), real.sum(), (count * (answer > 0)).sum()])
        self._sums = found if self._sums is None else self._sums + found
        self._held = []

    def step_ended(self) -> float:
        """Close an optimizer step; returns its seconds."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        self.seconds["optimizer"] += now - self._ended
        self.seconds["step"] += seconds
        self.steps += 1
        return seconds

    def take(self) -> dict[str, float]:
        """The interval's sums, by the names of `FIELDS`; a new one begins. Waits for the device."""
        if self._held:
            self._add_up()
        loss, share, tokens, rows = self._numbers if self._sums is None else self._sums.tolist()
        counts = {"loss": loss, "share": share, "tokens": tokens / self._copies, "rows": rows / self._copies}
        seconds = dict(self.seconds)
        wait = min(self._newly_waited(), seconds["compute"])
        seconds["compute"] -= wait
        seconds["wait"] += wait
        found = {"steps": float(self.steps), **counts, **seconds}
        self.begin()
        return found

    def _newly_waited(self) -> float:
        """Seconds of DDP's communication that no computation hid, since the last call.

        DDP books an iteration when the next one begins, so the latest step is counted with the interval after it.
        """
        if self._ddp is None:
            return 0.0
        told = self._ddp._get_ddp_logging_data()
        exposed = told.get("avg_backward_comm_time", 0) - told.get("avg_backward_compute_comm_overlap_time", 0)
        total = exposed * told.get("iteration", 0) / 1e9  # averages over all iterations, in nanoseconds
        newly, self._waited = total - self._waited, total
        return max(0.0, newly)


def _column(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Numbers and scalar tensors as one vector in 64 bits."""
    if not isinstance(values[0], torch.Tensor):
        return torch.tensor(values, dtype=torch.float64, device=device)
    return torch.stack([one.detach().to(device) for one in values]).double()


FIELDS = ("steps", "loss", "share", "tokens", "rows", "step", *PARTS)


class Totals(TrainerCallback, ExportableState):
    """Sums over the whole run, kept in every checkpoint, so that a run that was resumed counts all its attempts.

    Attributes:
        tokens: real tokens trained on, of all ranks.
        seconds: training time of rank 0, evaluation and saving left out.
        wall_seconds: of all attempts, up to the checkpoint that the next went on from.
        steps: logged steps that `parts` (seconds of the slowest rank, whole and by part) are sums over.
    """

    def __init__(self) -> None:
        self.tokens = self.seconds = self.wall_seconds = self.steps = 0.0
        self.parts: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        kept = {"tokens": self.tokens, "seconds": self.seconds, "wall_seconds": self.wall_seconds, "steps": self.steps}
        return {"args": {}, "attributes": {**kept, "parts": dict(self.parts)}}

    def add(self, steps: float, parts: Mapping[str, float]) -> None:
        """Add an interval: its seconds a step."""
        self.steps += steps
        for name, seconds in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + steps * seconds

    def means(self) -> dict[str, float]:
        """Seconds a step over all logged steps."""
        return {name: round(seconds / self.steps, 6) for name, seconds in self.parts.items()} if self.steps else {}


def totals_of(callbacks: Sequence[TrainerCallback]) -> Totals:
    """The one of a trainer; resuming replaces it by another object."""
    return next((one for one in callbacks if isinstance(one, Totals)), Totals())


def step_figures(ranks: Sequence[Mapping[str, float]], *, world: int, waits: bool) -> dict[str, float]:
    """The flat figures of an interval from every rank's sums.

    `loss_rank_r` are means over the rank's answer tokens; weighted by `loss_share_rank_r`, its share of the answer
    tokens (the mean over the steps), they add up to `loss`.

    Args:
        waits: whether the wait for other ranks is known.
    """
    steps = ranks[0]["steps"]
    if not steps:
        return {}
    slowest = slowest_of(ranks)
    seconds = max(slowest["step"], 1e-9)
    found = {f"{name}_per_second": sum(one[key] for one in ranks) / seconds for name, key in RATES}
    found |= parts_of(slowest, waits=waits)
    shares = sum(one["share"] for one in ranks)
    for rank, one in enumerate(ranks):
        share = one["share"] / shares if shares else 0.0
        if share:
            found[f"loss_rank_{rank}"] = one["loss"] / world / steps / share
        found |= {
            f"loss_share_rank_{rank}": share,
            f"tokens_rank_{rank}": one["tokens"],
            f"tokens_per_second_rank_{rank}": one["tokens"] / max(one["step"], 1e-9),
            f"data_seconds_rank_{rank}": one["data"] / steps,
            f"compute_seconds_rank_{rank}": one["compute"] / steps,
        }
    return found


RATES = (("tokens", "tokens"), ("samples", "rows"))


def slowest_of(ranks: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The rank that the others wait for: the one with the most time of its own."""
    return max(ranks, key=lambda one: one["step"] - one["wait"])


def parts_of(one: Mapping[str, float], *, waits: bool) -> dict[str, float]:
    """Mean seconds of a step of a rank, whole and by part; the parts add up to the whole."""
    kept = [name for name in PARTS if waits or name != "wait"]
    means = {f"{name}_seconds": one[name] / one["steps"] for name in ("step", *kept)}
    return {**means, "other_seconds": max(0.0, one["step"] - sum(one[name] for name in kept)) / one["steps"]}
