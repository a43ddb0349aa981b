"""Where ranks and devices stand among all machines, and what a run counts over its attempts."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sft_play.record.run_dir import RunDir
from sft_play.runtime import place as placing
from sft_play.runtime.dist import Ranks
from sft_play.runtime.meter import FIELDS, Totals
from sft_play.runtime.place import COLUMNS, Place, device_names
from sft_play.runtime.watching import WatchCallback, summary_of
from tests.launch.planned import make_config, make_plan

GIB = 2**30
TWO_MACHINES = [Ranks(rank=rank, world_size=4, local_rank=rank % 2) for rank in range(4)]


def sent(place: Place, rank: Ranks) -> list[float]:
    """The row of a rank: its own device's allocated memory is its number; the first of a machine reads the sensors of
    all, in watts 100 for each rank before it.
    """
    row = [0.0] * len(FIELDS) + [(1 + rank.rank) * GIB]
    for number in range(place.devices):
        known = {"memory_allocated_gib": float(rank.rank)} if number in place.own else {}
        if rank.local_rank == 0:
            known |= {"power_watts": 100.0 * (rank.rank + number), "failed": float(rank.rank + number == 3)}
        row += [known.get(name, math.nan) for name in COLUMNS]
    return row


def test_devices_are_counted_over_the_machines() -> None:
    places = [Place(make_plan("ddp", nodes=2, predicted={"device_bytes": GIB}), rank) for rank in TWO_MACHINES]
    assert [place.own_gpus for place in places] == [[0], [1], [0], [1]]
    first = places[0]
    ranks = [first.named(sent(place, rank)) for place, rank in zip(places, TWO_MACHINES, strict=True)]
    devices = first.merged(ranks)
    assert [one["memory_allocated_gib"] for one in devices] == [0.0, 1.0, 2.0, 3.0]
    assert [one["power_watts"] for one in devices] == [0.0, 100.0, 200.0, 300.0]
    figures = first.figures(ranks, devices)
    assert (figures["power_watts_gpu_2"], figures["memory_allocated_gib_gpu_3"]) == (200.0, 3.0)
    assert "power_watts_gpu_3" not in figures  # its sensors failed
    assert (figures["host_memory_gib_node_0"], figures["host_memory_gib_node_1"]) == (3.0, 7.0)
    assert figures["memory_predicted_gib"] == 1.0


@pytest.mark.parametrize("cpu", [True, False])
def test_devices_are_named_with_their_machine(monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    plan = make_plan("ddp", nodes=2, cpu=cpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"card {number}")
    kept: list[object] = []
    monkeypatch.setattr(placing, "to_main", lambda ranks, own: kept.append(own) or list(kept))
    for rank in TWO_MACHINES:
        names = device_names(plan, Place(plan, rank), rank)
    kind, each = ("rank", ("CPU", "CPU")) if cpu else ("gpu", ("card 0", "card 1"))
    assert names == [f"{kind} {number}: {each[number % 2]} (node {number // 2})" for number in range(4)]


def test_one_process_of_a_layer_split_has_all_devices_of_its_machine() -> None:
    place = Place(make_plan("layer_split", gpus=3), Ranks())
    assert (place.own_gpus, place.devices) == ([0, 1, 2], 3)
    assert Place(make_plan("single", cpu=True), Ranks()).own_gpus == []


def test_hours_of_earlier_attempts_count_also_where_nothing_was_left_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan("single", cpu=True)
    watch = WatchCallback(make_config(), plan, RunDir(tmp_path), Ranks())
    watch.plan = make_plan("single", gpus=1)
    earlier = Totals()
    earlier.wall_seconds = 7200.0
    watch.trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[earlier]))
    monkeypatch.setattr(time, "monotonic", lambda: watch.started + 3600)
    assert summary_of(watch)["gpu_hours"] == 3.0
