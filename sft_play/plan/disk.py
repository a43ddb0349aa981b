"""Bytes a run writes to disk, estimated from above."""

from __future__ import annotations

from sft_play.config.schema import Config, TuningMode

# Adapters of every linear layer hold about 0.55% of the base's parameters at rank 16 (SmolLM2-135M: 3.6%,
# Llama-3-8B: 0.52%), so a twentieth at rank 16 covers the small models too.
ADAPTER_SHARE_AT_RANK_16 = 0.05
# Bytes a trained weight takes in a checkpoint: fp32 weight, two fp32 moments of AdamW.
CHECKPOINT_BYTES_A_WEIGHT = 12
# Tokenised rows, logs and event files.
OTHER_BYTES = 64 * 2**20


def estimate_run_bytes(config: Config, weight_bytes: int) -> int:
    """Checkpoints (those kept and the one being written), the result, and the rest.

    Args:
        weight_bytes: size of the base model's 16-bit weight files.
    """
    weights = weight_bytes / 2
    if config.tuning.mode is TuningMode.FULL:
        trained = weights
    else:
        trained = weights * min(1.0, ADAPTER_SHARE_AT_RANK_16 * config.tuning.lora.r / 16)
    kept = 0 if config.train.save_strategy == "no" else (config.train.save_total_limit or 10) + 1
    return int(trained * (CHECKPOINT_BYTES_A_WEIGHT * kept + 4)) + OTHER_BYTES
