"""Which GPUs of a machine a run takes, and which layouts its config allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sft_play.config.schema import Config, Strategy
from sft_play.errors import ConfigError, EnvironmentProblem
from sft_play.facts.hardware import Hardware, LinkKind
from sft_play.plan.communication import why_no_knob
from sft_play.plan.layouts import Layout, layouts
from sft_play.plan.settings import Offload, Placement

Gpus = str | int | tuple[int, ...] | None


def select_gpus(hardware: Hardware, asked: Gpus, *, default_count: int | None) -> Hardware:
    """The machine with only the GPUs that `dist.gpus` names: `all` (or 0), a count, or positions.

    Args:
        default_count: how many to take where nothing is asked; None for all.

    Raises:
        EnvironmentProblem: a GPU is asked for that is not there.
    """
    wanted = default_count if asked is None else asked
    if wanted in (None, "all", 0):
        return hardware
    seen = len(hardware.gpus)
    if asked is None and not seen:
        return hardware
    positions = wanted if isinstance(wanted, tuple) else tuple(range(int(wanted)))
    missing = [position for position in positions if position >= seen]
    if missing and not seen and isinstance(asked, int):
        return replace(hardware, cpu_processes=asked)
    if missing:
        what = f"{seen} are there" if seen else "no GPU is seen by NVML"
        raise EnvironmentProblem(
            f"GPU {missing[0]} was asked for and {what}",
            where="dist.gpus",
            fix="remove dist.gpus to take what is there, or check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    taken = tuple(hardware.gpus[position] for position in positions)
    alone = {"link": LinkKind.NONE, "link_bytes_per_second": 0.0} if len(taken) < 2 else {}
    return replace(hardware, gpus=taken, **alone)  # type: ignore[arg-type]


ZERO = (Placement.ZERO1, Placement.ZERO2, Placement.ZERO3)
# What unsloth's kernels take: whole weights, on one GPU or a copy on each.
UNSLOTH = (Placement.SINGLE, Placement.DDP)
SHARDS_WEIGHTS = (Placement.FSDP, Placement.HSDP, Placement.ZERO3)
SHARDS_GRADIENTS = (*SHARDS_WEIGHTS, Placement.ZERO2)


def allowed_layouts(config: Config, placements: Sequence[Placement] = ()) -> tuple[Layout, ...]:
    """The layouts that `dist` leaves to choose from; empty where it leaves all, one where it forces one.

    Args:
        placements: those that the command offers where the config names none; empty for all.

    Raises:
        ConfigError: the keys of `dist` leave none.
    """
    dist = config.dist
    offload = Offload(dist.cpu_offload)
    if config.tuning.backend == "unsloth":
        placements = [one for one in UNSLOTH if not placements or one in placements]
        if not placements:
            what = "unsloth trains on one GPU, or under DDP with a copy on each, which this command does not offer"
            raise ConfigError(what, where="tuning.backend", fix="make train or make train-distributed, or use bnb")
    if dist.strategy is not Strategy.AUTO:
        return (_forced(Placement(dist.strategy.value), offload, config),)
    if dist.zero_level is not None:
        return (_forced(ZERO[dist.zero_level - 1], offload, config),)
    if isinstance(dist.sharding_factor, int) and dist.sharding_factor > 1:
        return (_forced(Placement.HSDP, offload, config),)
    left = [one for one in layouts() if _allowed(one, config, placements)]
    able = [one for one in left if not why_no_knob(config, one)[0]]
    if not left:
        raise ConfigError("the keys of dist leave no strategy", where="dist", fix="set dist.strategy alone")
    if not able:
        key, why = why_no_knob(config, left[-1])
        raise ConfigError(f"{why}, and no other strategy is left", where=key, fix=f"remove {key}")
    return () if len(able) == len(layouts()) else tuple(able)


def _forced(placement: Placement, offload: Offload, config: Config) -> Layout:
    """The one layout that the config names.

    Raises:
        ConfigError: its engine cannot do what another key asks for.
    """
    layout = _with_shards(Layout(placement=placement, offload=offload), config)
    key, why = why_no_knob(config, layout)
    if key:
        raise ConfigError(why, where=key, fix=f"remove {key}, or choose another dist.strategy")
    return layout


def _with_shards(layout: Layout, config: Config) -> Layout:
    factor = config.dist.sharding_factor
    shards = factor if layout.placement is Placement.HSDP and isinstance(factor, int) else None
    return replace(layout, sharding_factor=shards)


def _allowed(layout: Layout, config: Config, placements: Sequence[Placement]) -> bool:
    dist, placement = config.dist, layout.placement
    return (
        (not placements or placement in placements)
        and dist.cpu_offload in ("none", layout.offload.value)
        and (dist.shard_weights is None or dist.shard_weights == (placement in SHARDS_WEIGHTS))
        and (dist.shard_gradients is None or dist.shard_gradients == (placement in SHARDS_GRADIENTS))
        and (dist.sharding_factor != 1 or placement not in SHARDS_WEIGHTS)
        and (dist.sharding_factor != "all" or placement in (Placement.FSDP, Placement.ZERO3))
    )
