"""Rules between the keys of `dist`, and between them and others."""

from __future__ import annotations

from collections.abc import Iterator

from sft_play.config.findings import Finding, Rule, changed, ignored, needs, said
from sft_play.config.origin import Resolved
from sft_play.config.schema import Strategy

_ZERO = {Strategy.ZERO1: 1, Strategy.ZERO2: 2, Strategy.ZERO3: 3}
_SHARDS_WEIGHTS = (Strategy.FSDP, Strategy.HSDP, Strategy.ZERO3)
_SHARDS_GRADIENTS = (*_SHARDS_WEIGHTS, Strategy.ZERO2)
_CHOSEN = "remove it, or set dist.strategy: auto"


def _against(resolved: Resolved, key: str, by: str = "dist.strategy") -> Finding:
    what = f"{said(resolved, key)} contradicts {said(resolved, by)}"
    return Finding(keys=(key, by), what=what, fix=_CHOSEN if by == "dist.strategy" else "remove one of them")


def zero_level_fits(resolved: Resolved) -> Iterator[Finding]:
    dist = resolved.config.dist
    if dist.zero_level is None or dist.strategy is Strategy.AUTO:
        return
    if _ZERO.get(dist.strategy) != dist.zero_level:
        yield _against(resolved, "dist.zero_level")


def sharding_fits(resolved: Resolved) -> Iterator[Finding]:
    """What is sharded follows from the strategy, the ZeRO level or the sharding factor, whichever is set first."""
    dist = resolved.config.dist
    if dist.strategy is not Strategy.AUTO:
        by, implied = "dist.strategy", (dist.strategy in _SHARDS_WEIGHTS, dist.strategy in _SHARDS_GRADIENTS)
    elif dist.zero_level is not None:
        by, implied = "dist.zero_level", (dist.zero_level == 3, dist.zero_level > 1)
    elif dist.sharding_factor not in (None, 1):
        by, implied = "dist.sharding_factor", (True, True)
    else:
        return
    for key, value, right in zip(
        ("dist.shard_weights", "dist.shard_gradients"), (dist.shard_weights, dist.shard_gradients), implied, strict=True
    ):
        if value is not None and value != right:
            yield _against(resolved, key, by)


def sharding_factor_fits(resolved: Resolved) -> Iterator[Finding]:
    dist = resolved.config.dist
    if dist.strategy is Strategy.HSDP and dist.sharding_factor is None:
        fix = "set dist.sharding_factor to the ranks that share one copy of the weights"
        yield needs(resolved, "dist.strategy", "dist.sharding_factor", "dist.sharding_factor", fix=fix)
    if dist.strategy is Strategy.AUTO and None not in (dist.zero_level, dist.sharding_factor):
        level_shards = "all" if dist.zero_level == 3 else 1
        yield from (
            ()
            if dist.sharding_factor == level_shards
            else (_against(resolved, "dist.sharding_factor", "dist.zero_level"),)
        )
    if dist.sharding_factor is None or dist.strategy in (Strategy.AUTO, Strategy.HSDP):
        return
    fits = {Strategy.DDP: 1, Strategy.SINGLE: 1, Strategy.FSDP: "all"}
    if fits.get(dist.strategy) != dist.sharding_factor:
        yield _against(resolved, "dist.sharding_factor")


def offload_fits(resolved: Resolved) -> Iterator[Finding]:
    dist = resolved.config.dist
    able = {
        "optimizer": (Strategy.AUTO, *_ZERO),
        "params": (Strategy.AUTO, *_SHARDS_WEIGHTS),
        "none": tuple(Strategy),
    }[dist.cpu_offload]
    if dist.cpu_offload == "optimizer" and dist.strategy in (Strategy.FSDP, Strategy.HSDP):
        what = f"{said(resolved, 'dist.strategy')} moves weights, gradients and optimizer state together"
        yield Finding(keys=("dist.cpu_offload", "dist.strategy"), what=what, fix="set dist.cpu_offload: params")
    elif dist.strategy not in able:
        yield _against(resolved, "dist.cpu_offload")
    if dist.cpu_offload == "none":
        yield from ignored(
            resolved, ["dist.nvme_path"], by="dist.cpu_offload", fix="set dist.cpu_offload: optimizer or params"
        )
    elif dist.nvme_path is not None and dist.strategy not in (Strategy.AUTO, Strategy.ZERO3):
        yield _against(resolved, "dist.nvme_path")


def deepspeed_file_used(resolved: Resolved) -> Iterator[Finding]:
    dist = resolved.config.dist
    if dist.deepspeed_config is not None and dist.strategy not in (Strategy.AUTO, *_ZERO):
        yield _against(resolved, "dist.deepspeed_config")


def gpus_fit(resolved: Resolved) -> Iterator[Finding]:
    dist = resolved.config.dist
    ids = dist.gpus if isinstance(dist.gpus, tuple) else ()
    if len(set(ids)) < len(ids):
        yield Finding(
            keys=("dist.gpus",), what=f"{said(resolved, 'dist.gpus')} names a GPU twice", fix="name each once"
        )
    if dist.gpus == ():
        yield Finding(keys=("dist.gpus",), what="dist.gpus is an empty list", fix="give a count, ids or all")
    count = len(ids) if ids else dist.gpus if isinstance(dist.gpus, int) else 0
    if dist.strategy is Strategy.SINGLE and (count > 1 or dist.num_nodes > 1):
        yield _against(resolved, "dist.gpus" if count > 1 else "dist.num_nodes")


def nodes_fit(resolved: Resolved) -> Iterator[Finding]:
    dist = resolved.config.dist
    if dist.node_rank >= dist.num_nodes:
        what = f"{said(resolved, 'dist.node_rank')} is out of range with {said(resolved, 'dist.num_nodes')}"
        yield Finding(keys=("dist.node_rank", "dist.num_nodes"), what=what, fix="machines are numbered from 0")
    if dist.num_nodes == 1:
        yield from ignored(resolved, ["dist.main_address"], by="dist.num_nodes", fix="set dist.num_nodes or remove it")
        return
    if dist.main_address is None:
        fix = "set MAIN_ADDRESS to the host name of machine 0, on every machine"
        yield needs(resolved, "dist.num_nodes", "dist.main_address", "dist.main_address", fix=fix)
    if dist.main_port == "auto":
        fix = "set MAIN_PORT to a free port of machine 0, such as 29500, on every machine"
        yield needs(resolved, "dist.num_nodes", "a fixed dist.main_port", "dist.main_port", fix=fix)


def one_way_of_communication(resolved: Resolved) -> Iterator[Finding]:
    """FSDP2 has its gather through symmetric memory or a reduction of ours, not both."""
    if resolved.config.dist.all_to_all_reduce and resolved.config.dist.copy_engine_all_gather:
        keys = ("dist.copy_engine_all_gather", "dist.all_to_all_reduce")
        what = f"{said(resolved, keys[0])} and {said(resolved, keys[1])} exclude each other"
        yield Finding(keys=keys, what=what, fix="keep one of them")


def one_timeout(resolved: Resolved) -> Iterator[Finding]:
    old, new = resolved.config.train.ddp_timeout, resolved.config.dist.timeout_seconds
    if old is not None and changed(resolved, "dist.timeout_seconds") and old != new:
        what = f"{said(resolved, 'train.ddp_timeout')} contradicts {said(resolved, 'dist.timeout_seconds')}"
        keys = ("train.ddp_timeout", "dist.timeout_seconds")
        yield Finding(keys=keys, what=what, fix="keep dist.timeout_seconds")


DIST_RULES: tuple[Rule, ...] = (
    zero_level_fits, sharding_fits, sharding_factor_fits, offload_fits, deepspeed_file_used, gpus_fit, nodes_fit,
    one_way_of_communication, one_timeout,
)  # fmt: skip
