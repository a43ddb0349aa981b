"""Plans and runs made by hand: what the tests here launch, without a machine that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.plan.build import Plan
from sft_play.record.run_dir import RunDir

STRATEGIES = ("single", "layer_split", "ddp", "fsdp", "hsdp", "tp", "zero1", "zero2", "zero3")
FOLDER = Path("/data/my runs/it's one")
"""A run whose path a shell would take apart."""


def make_plan(strategy: str, *, nodes: int = 1, gpus: int = 2, cpu: bool = False, **changes: Any) -> Plan:
    """A plan of `nodes` machines with `gpus` GPUs each, or as many processes without."""
    ranks = 1 if strategy in ("single", "layer_split") else nodes * gpus
    values: dict[str, Any] = {
        "strategy": strategy,
        "offload": "none",
        "world_size": ranks,
        "nodes": nodes,
        "sharding_factor": max(1, ranks // 2) if strategy == "hsdp" else None,
        "backend": "gloo" if cpu else "nccl",
        "device": "cpu" if cpu else "cuda",
        "device_name": "CPU" if cpu else "H100-80",
        "device_uuids": () if cpu else tuple(f"GPU-{number:02d}" for number in range(gpus)),
        "micro_batch": 4,
        "grad_accum": 2,
        "global_batch": 8 * (1 if strategy == "tp" else ranks),
        "learning_rate": 2e-4,
        "seq_len": 512,
        "dtype": "bf16",
        "autocast": "bf16",
        "attention": "sdpa",
        "optimizer": "adamw_torch",
        "gradient_checkpointing": True,
        "pin_memory": not cpu,
        "predicted": {},
        "reasons": (),
    }
    return Plan(**{**values, **changes})


def make_config(*, nodes: int = 1, node_rank: int = 0, **sections: dict[str, Any]) -> Config:
    """A config of so many machines."""
    several = {"main_address": "node0.cluster", "main_port": 29500} if nodes > 1 else {}
    dist = {"num_nodes": nodes, "node_rank": node_rank, **several, **sections.pop("dist", {})}
    return Config.model_validate({"model": {"name": "m"}, "data": {"train": "a"}, "dist": dist, **sections})


def make_run(node_rank: int = 0, folder: Path = FOLDER) -> RunDir:
    return RunDir(folder, node_rank)
