"""The process group of a run: joined once, with its timeout, before any library looks for one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from sft_play.config.schema import Config
from sft_play.errors import AppliedDiffersError, NodesDifferError
from sft_play.plan.build import Plan
from sft_play.runtime.job import Job

# Strategies that accelerate applies to a group of GPUs only, and silently replaces by DDP on one of CPUs.
NEEDS_GPU_GROUP = ("fsdp", "hsdp", "tp")
AGREEMENT = "sft_play/run"


@dataclass(frozen=True)
class Ranks:
    """Which process of the run this is: numbers over all machines, and on this one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    control: Any = None

    @property
    def main(self) -> bool:
        return self.rank == 0


def read_ranks() -> Ranks:
    """What the launcher says; one process where there is none."""
    return Ranks(*(int(os.environ.get(name, default)) for name, default in _VARIABLES))


_VARIABLES = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))


PARENT_FIRST_SECONDS = 30


@contextlib.contextmanager
def process_group(job: Job) -> Iterator[Ranks]:
    """Join the group of the run and leave it at the end, all ranks together.

    Raises:
        NodesDifferError: another machine was started with another config; names the first differing key.
    """
    ranks, plan = read_ranks(), job.plan
    if ranks.world_size != plan.world_size:
        raise AppliedDiffersError(f"{plan.world_size} processes were planned and {ranks.world_size} were started")
    if plan.device == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    if ranks.world_size == 1 and not plan.strategy.startswith("zero"):
        yield ranks
        return
    # The parent looks after the ranks and can say which one is silent; the group's own patience ends after its.
    margin = PARENT_FIRST_SECONDS if "SFT_PLAY_PARENT" in os.environ else 0
    timeout = timedelta(seconds=timeout_seconds(job.config) + margin)
    torch.distributed.init_process_group(
        plan.backend,
        timeout=timeout,
        device_id=torch.device("cuda", ranks.local_rank) if plan.backend == "nccl" else None,
    )
    agree(ranks, job.told)
    ranks = replace(ranks, control=torch.distributed.new_group(backend="gloo", timeout=timeout))
    if plan.strategy.startswith("zero"):
        import deepspeed

        deepspeed.init_distributed(plan.backend, auto_mpi_discovery=False, verbose=False)
    yield ranks
    # Not in a `finally`: a rank that leaves with an error must not wait for the others.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def timeout_seconds(config: Config) -> int:
    """The longest wait in a collective, under its own name or its old one."""
    return config.train.ddp_timeout or config.dist.timeout_seconds


def present_group(plan: Plan) -> None:
    """Let accelerate shard over a group of CPUs too; called between the arguments and the trainer."""
    if plan.device == "cpu" and plan.strategy in NEEDS_GPU_GROUP:
        PartialState().distributed_type = DistributedType.MULTI_GPU


def highest(ranks: Ranks, number: int) -> int:
    """The largest of the ranks' numbers, over a group of CPUs that no GPU waits for."""
    if ranks.world_size == 1:
        return number
    found = torch.tensor(number)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=ranks.control)
    return int(found)


def agree(ranks: Ranks, told: dict[str, Any]) -> None:
    """Compare what this rank was told with what rank 0 was told, through the group's store.

    Raises:
        NodesDifferError: they differ; names the first differing key and both values.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    mine = flatten(told)
    mine = {key: value for key, value in mine.items() if key not in MAY_DIFFER}
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    store.set(f"{AGREEMENT}/{ranks.rank}", json.dumps(mine) if ranks.main else digest)
    theirs = json.loads(store.get(f"{AGREEMENT}/0"))
    different = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
    store.set(f"{AGREEMENT}/differs/{ranks.rank}", different[0] if different else "")
    found = [store.get(f"{AGREEMENT}/differs/{rank}").decode() for rank in range(ranks.world_size)]
    store.set(f"{AGREEMENT}/read/{ranks.rank}", "yes")
    if ranks.main:  # it may hold the store, and leave only once all have read
        store.wait([f"{AGREEMENT}/read/{rank}" for rank in range(ranks.world_size)])
    for rank, key in enumerate(found):
        if not key:
            continue
        if rank == ranks.rank:
            what = f"{key} is {mine.get(key)} here and {theirs.get(key)} on rank 0"
        else:
            what = f"{key} differs between rank 0 and rank {rank}"
        raise NodesDifferError(what, where="start of the run")


# What each machine has of its own.
MAY_DIFFER = ("config.dist.node_rank", "plan.device_uuids", "config.run.tensorboard_port")


def to_main(ranks: Ranks, value: Any) -> list[Any]:
    """Every rank's value on rank 0, in the order of the ranks; nothing on the others."""
    if ranks.world_size == 1:
        return [value]
    found = [None] * ranks.world_size if ranks.main else None
    torch.distributed.gather_object(value, found, dst=0, group=ranks.control)
    return list(found or [])


def from_main(ranks: Ranks, value: Any) -> Any:
    """Rank 0's value on every rank."""
    if ranks.world_size == 1:
        return value
    held = [value]
    torch.distributed.broadcast_object_list(held, src=0, group=ranks.control)
    return held[0]


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    if not isinstance(values, dict):
        return {prefix: values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
