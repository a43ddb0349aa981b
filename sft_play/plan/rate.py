"""The learning rate of a run: the configured one, scaled with the global batch where the config says so."""

from __future__ import annotations

import math

from sft_play.config.schema import Config
from sft_play.errors import ConfigError


def scaled_learning_rate(config: Config, global_batch: int) -> float:
    """Peak learning rate at `global_batch` rows a step.

    `linear` multiplies by k = global_batch / train.lr_base_batch (Goyal et al. 2017, section 2.1), `sqrt` by its square
    root, which suits Adam (Malladi et al. 2022).

    Raises:
        ConfigError: a scaling without a base batch.
    """
    train = config.train
    if train.lr_scaling == "none":
        return train.learning_rate
    if train.lr_base_batch is None:
        fix = "set train.lr_base_batch to the global batch that learning_rate was chosen for"
        raise ConfigError("scaling needs a base batch", where="train.lr_scaling", fix=fix)
    ratio = global_batch / train.lr_base_batch
    return train.learning_rate * (ratio if train.lr_scaling == "linear" else math.sqrt(ratio))


def rate_reason(config: Config, global_batch: int) -> str:
    """The effective batch and the rate used, with the arithmetic where it was scaled."""
    train, rate = config.train, scaled_learning_rate(config, global_batch)
    used = f"learning rate {rate:.4g} at {global_batch} rows a step"
    if train.lr_scaling == "none":
        return f"{used}: as configured, whatever the batch"
    ratio = f"{global_batch} / {train.lr_base_batch}"
    return f"{used}: {train.learning_rate:.4g} x {ratio if train.lr_scaling == 'linear' else f'sqrt({ratio})'}"
