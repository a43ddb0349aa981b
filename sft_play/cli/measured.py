"""A finished run's figures beside its plan's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.facts.calibration import Measured
from sft_play.plan.build import Plan


def measured_of(config: Config, plan: Plan, record: dict[str, Any]) -> Measured:
    """Plan and record of a run as one comparison."""
    return Measured(
        device=plan.device_name,
        model=Path(config.model.name).name,
        method=config.tuning.mode.value,
        predicted_memory_bytes=plan.predicted["allocated_bytes"],
        memory_bytes=record["measured"]["memory_bytes"],
        predicted_tokens_per_second=plan.predicted["tokens_per_second"],
        tokens_per_second=record["tokens_per_second"],
    )
