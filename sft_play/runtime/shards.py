"""Optimizer state that lies in shards (FSDP2, hybrid shard, tensor parallel): each rank keeps its own file.

Plain tensors only, so that they load with `weights_only=True`; the same ranks read them back to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

SCHEDULER = "scheduler.pt"


@contextlib.contextmanager
def without_crc32() -> Iterator[None]:
    """Let torch write no checksums of its own: the manifest's are stronger, and nobody would read these."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def shard_file(folder: Path, rank: int) -> Path:
    """Where a rank keeps its part of the optimizer state."""
    return folder / f"optimizer-{rank}.pt"


def save_optimizer_shard(optimizer: torch.optim.Optimizer, folder: Path, rank: int) -> None:
    """Write this rank's part of the moments; their order is that of the optimizer's parameters."""
    state = optimizer.state_dict()
    state["state"] = {
        index: {key: value.to_local() if isinstance(value, DTensor) else value for key, value in moments.items()}
        for index, moments in state["state"].items()
    }
    torch.save(state, shard_file(folder, rank))


def load_optimizer_shard(optimizer: torch.optim.Optimizer, folder: Path, rank: int) -> None:
    """Read back what `save_optimizer_shard` wrote, for an optimizer over the same shards."""
    state = torch.load(shard_file(folder, rank), map_location="cpu", weights_only=True)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state["state"] = {
        index: {key: _placed(value, weights[index]) for key, value in moments.items()}
        for index, moments in state["state"].items()
    }
    optimizer.load_state_dict(state)


def _placed(value: Any, weight: torch.Tensor) -> Any:
    """A moment as a shard of its weight; counters and factored moments stay as they are."""
    if not isinstance(weight, DTensor) or not torch.is_tensor(value) or value.shape != weight.to_local().shape:
        return value
    return DTensor.from_local(
        value.to(weight.device),
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
