"""Bytes a run writes to disk."""

from __future__ import annotations

from sft_play.config.schema import Config
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.derive import shape_settings
from sft_play.plan.state import trained_parameters

# Bytes a trained weight takes in a checkpoint: fp32 weight and two fp32 moments of AdamW; other optimizers less.
CHECKPOINT_BYTES_A_WEIGHT = 12
RESULT_BYTES_A_WEIGHT = 4
# Tokenised rows, logs and event files.
OTHER_BYTES = 64 * 2**20
# Checkpoints counted where `save_total_limit` keeps all of them.
UNLIMITED = 10


def checkpoint_bytes(config: Config, facts: ModelFacts) -> int:
    """One checkpoint: trained weights and optimizer state."""
    return CHECKPOINT_BYTES_A_WEIGHT * trained_parameters(facts, shape_settings(config))


def estimate_run_bytes(config: Config, facts: ModelFacts) -> int:
    """The checkpoints kept and the one being written, the result, and the rest."""
    one = checkpoint_bytes(config, facts)
    kept = 0 if config.train.save_strategy == "no" else (config.train.save_total_limit or UNLIMITED) + 1
    return one * kept + one * RESULT_BYTES_A_WEIGHT // CHECKPOINT_BYTES_A_WEIGHT + OTHER_BYTES
