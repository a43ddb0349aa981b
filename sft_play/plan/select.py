"""Which GPUs of a machine a run takes, and which layouts its config allows."""

from __future__ import annotations

from dataclasses import replace

from sft_play.config.schema import Config, Strategy
from sft_play.errors import EnvironmentProblem
from sft_play.facts.hardware import Hardware, LinkKind
from sft_play.plan.settings import Offload, Placement
from sft_play.plan.strategy import Layout, layouts

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


def allowed_layouts(config: Config) -> tuple[Layout, ...]:
    """What the config leaves to choose from: one layout, or all with its offload; empty where the choice is free.

    Only ZeRO-3 offloads to NVMe.
    """
    strategy, offload = config.dist.strategy, Offload(config.dist.cpu_offload)
    if strategy is not Strategy.AUTO:
        return (Layout(placement=Placement(strategy.value), offload=offload),)
    if offload is Offload.NONE:
        return ()
    able = (one for one in layouts() if one.offload is offload)
    return tuple(one for one in able if one.placement is Placement.ZERO3 or config.dist.nvme_path is None)
