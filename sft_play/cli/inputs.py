"""What several commands read from their environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.errors import UsageError
from sft_play.facts.model import read_model_facts
from sft_play.facts.shapes import ModelFacts


def config_path(environ: Mapping[str, str]) -> Path:
    """The file that CONFIG names.

    Raises:
        UsageError: CONFIG is not given.
    """
    name = environ.get("CONFIG")
    if not name:
        raise UsageError("CONFIG is missing", fix="name a file, such as CONFIG=configs/demo.yaml")
    return Path(name)


def planning_facts(config: Config) -> ModelFacts:
    """Facts of the config's model from its folder, the hub's cache or the catalog, in that order.

    Raises:
        ModelError: it is in none of them.
    """
    return read_model_facts(config.model.name)
