"""Where ranks and devices stand among all, and the row of numbers that a rank sends of itself and its devices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sft_play.facts.hardware import GIB
from sft_play.plan.build import Plan
from sft_play.runtime.dist import Ranks, to_main
from sft_play.runtime.meter import FIELDS
from sft_play.runtime.sensors import PHASES, READINGS

# What is known of one device: torch's own counts, the sensors' readings, whether they failed, peaks by phase.
COLUMNS = ("memory_allocated_gib", "memory_reserved_gib", *READINGS, "failed", *PHASES)
SHOWN = COLUMNS[: COLUMNS.index("failed")]

Row = dict[str, float]


class Place:
    """Where this rank and its devices stand among all: devices are counted over the machines.

    Attributes:
        devices: of each machine.
        own: numbers on this machine of the devices that this rank computes on: one, or all under a layer split.
        own_gpus: the same where they are GPUs.
    """

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        self.local_ranks = max(1, plan.world_size // plan.nodes)
        self.devices = len(plan.device_uuids) or self.local_ranks
        alone = plan.world_size == 1
        self.own = list(range(self.devices)) if alone and plan.device == "cuda" else [ranks.local_rank]
        self.own_gpus = self.own if plan.device == "cuda" else []
        self.predicted = plan.predicted.get("device_bytes", 0.0)
        of_devices = [f"{number}/{name}" for number in range(self.devices) for name in COLUMNS]
        self.keys = [*FIELDS, "resident", *of_devices]

    def named(self, row: Sequence[float]) -> Row:
        """A rank's row as it was sent, by name; devices by number and name."""
        return dict(zip(self.keys, row, strict=True))

    def merged(self, ranks: Sequence[Row]) -> list[Row]:
        """Each device of the run: what its own rank and its machine's sensors know of it."""
        found: list[Row] = []
        for first in range(0, len(ranks), self.local_ranks):
            machine = ranks[first : first + self.local_ranks]
            for number in range(self.devices):
                known = [(name, one[f"{number}/{name}"]) for one in reversed(machine) for name in COLUMNS]
                found.append({name: value for name, value in known if not math.isnan(value)})
        return found

    def figures(self, ranks: Sequence[Row], devices: Sequence[Row]) -> Row:
        """The flat keys of memory and sensors."""
        found = {
            f"{name}_gpu_{number}": one[name]
            for number, one in enumerate(devices)
            for name in SHOWN
            if name in one and (one.get("failed") != 1.0 or name.startswith(("memory_alloc", "memory_res")))
        }
        for node, first in enumerate(range(0, len(ranks), self.local_ranks)):
            resident = sum(one["resident"] for one in ranks[first : first + self.local_ranks])
            found[f"host_memory_gib_node_{node}"] = resident / GIB
        return {**found, "memory_predicted_gib": self.predicted / GIB}


def device_names(plan: Plan, place: Place, ranks: Ranks) -> list[str]:
    """Every device of the run with its machine, on rank 0. A collective."""
    own = [(number, torch.cuda.get_device_name(number) if place.own_gpus else plan.device_name) for number in place.own]
    kind = "gpu" if place.own_gpus else "rank"
    named = []
    for rank, devices in enumerate(to_main(ranks, own)):
        node = rank // place.local_ranks
        named += [f"{kind} {node * place.devices + number}: {name} (node {node})" for number, name in devices]
    return named
