"""The stamp: what made a run and each of its checkpoints."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sft_play import __version__
from sft_play.config.schema import Config
from sft_play.plan.build import Plan
from sft_play.record.run_dir import config_hash

VERSION = 1
STACK = ("torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "deepspeed", "datasets", "tokenizers")


def make_stamp(config: Config, plan: Plan, data_fingerprint: str, base_identity: str) -> dict[str, Any]:
    """Backend, model, placement, data and versions, as plain JSON values."""
    return {
        "version": VERSION,
        "sft_play": __version__,
        "backend": config.tuning.backend,
        "mode": config.tuning.mode.value,
        "base_model": config.model.name,
        "base_identity": base_identity,
        "strategy": plan.strategy,
        "world_size": plan.world_size,
        "precision": {"weights": plan.dtype, "autocast": plan.autocast},
        "global_batch": plan.global_batch,
        "config_hash": config_hash(config),
        "data_fingerprint": data_fingerprint,
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in STACK},
    }


def installed_version(package: str) -> str:
    """The installed version, or `absent`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
