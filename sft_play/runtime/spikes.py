"""Gradient norms far above their recent range: told, and where the config says so, the step is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

# Steps whose norms are remembered, how many must be known before one is judged, and what counts as far.
WINDOW = 64
FIRST = 16
TIMES = 10.0


class SpikeCallback(TrainerCallback, ExportableState):
    """Remembers the latest gradient norms; every checkpoint holds them, so a resumed run judges as the straight one.

    Attributes:
        norms: before clipping, of the latest steps, the oldest first.
        found, skipped: spikes of the whole run, and steps dropped for one.
        told: what was said of the latest.
    """

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.found = self.skipped = 0
        self.told = ""

    def is_spike(self, norm: float, step: int, *, skip: bool) -> bool:
        """Whether the norm of a step (from 1) is a spike, which is told and counted. Every rank has the same norm."""
        times = times_median(norm, self.norms)
        self.norms = [*self.norms, norm][-WINDOW:]
        if times <= TIMES:
            return False
        self.found += 1
        self.skipped += skip
        done = "the step is skipped" if skip else "train.on_spike: skip would leave the step out"
        self.told = f"step {step}: gradient norm {norm:.4g}, {times:.0f} times the median of late; {done}"
        print(f"warning: {self.told}")
        return True

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        kept = {"norms": self.norms, "found": self.found, "skipped": self.skipped}
        return {"args": {}, "attributes": kept}

    def summary(self) -> dict[str, int]:
        """The counts, for the record."""
        return {"found": self.found, "skipped": self.skipped}


def times_median(norm: float, norms: Sequence[float]) -> float:
    """The norm as a multiple of the median of earlier ones; 0 where too few are known, or they are all but zero."""
    if len(norms) < FIRST:
        return 0.0
    usual = median(norms)
    return norm / usual if usual else 0.0


def spikes_of(callbacks: Sequence[TrainerCallback]) -> SpikeCallback:
    """The one of a trainer; resuming replaces it by another object."""
    return next(one for one in callbacks if isinstance(one, SpikeCallback))
