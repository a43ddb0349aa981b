"""What a plan needs to know about a model: its shapes and its parameter counts, without loading it.

`read_model_facts` takes a folder's config.json, else the catalog of known models, else (for an architecture
without a formula here) a child process that builds the model on the meta device and counts.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sft_play.errors import ModelError
from sft_play.facts.families import FAMILIES, facts_of_family
from sft_play.facts.locate import hub_cache
from sft_play.facts.shapes import Linear, ModelFacts

__all__ = ["Linear", "ModelFacts", "catalog", "facts_from_config", "read_model_facts"]

CATALOG = Path(__file__).parent / "catalog" / "architectures.json"
COUNTER_MODULE = "sft_play.runtime.count_parameters"
COUNTER_TIMEOUT_SECONDS = 120


def read_model_facts(source: str) -> ModelFacts:
    """Facts of a model by folder or by an id of the catalog.

    Raises:
        ModelError: no config.json there, an id that the catalog lacks, or a config that cannot be read.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return facts_from_config(_read_config(folder / "config.json"), name=source)
    if cached := _cached_config(source):
        return facts_from_config(_read_config(cached), name=source)
    known = catalog().get(source)
    if known is None:
        raise ModelError(
            "is no folder here, not in the hub's cache and not in the catalog of known models",
            where=source,
            fix="download it, or name a folder with its config.json",
        )
    return facts_from_config(known, name=source)


def _cached_config(source: str) -> Path | None:
    """The newest config.json of a hub id in the hub's cache, by the cache's own layout; nothing is downloaded."""
    if source.count("/") != 1:
        return None
    found = hub_cache().glob(f"models--{source.replace('/', '--')}/snapshots/*/config.json")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def facts_from_config(config: dict[str, Any], *, name: str) -> ModelFacts:
    """Facts from the contents of a config.json.

    Raises:
        ModelError: a key that the architecture needs is missing or malformed.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        return _counted_facts(config, name=name)
    try:
        return facts_of_family(config, name=name)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"config.json of a {model_type} model is incomplete: {error}", where=name) from error


@functools.cache
def catalog() -> dict[str, dict[str, Any]]:
    """The configs of known models by hub id."""
    models: dict[str, dict[str, Any]] = json.loads(CATALOG.read_text(encoding="utf-8"))["models"]
    return models


def facts_as_json(facts: ModelFacts) -> str:
    return json.dumps(asdict(facts))


def facts_from_json(text: str) -> ModelFacts:
    """Inverse of `facts_as_json`."""
    values = json.loads(text)
    values["linears"] = tuple(Linear(**one) for one in values["linears"])
    return ModelFacts(**values)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError("the model folder has no readable config.json", where=str(path)) from error
    except ValueError as error:
        raise ModelError(f"not JSON: {error}", where=str(path)) from error
    if not isinstance(config, dict):
        raise ModelError("config.json holds no mapping", where=str(path))
    return config


def _counted_facts(config: dict[str, Any], *, name: str) -> ModelFacts:
    """Facts from a child process that builds the model on the meta device, cached by the config's content."""
    text = json.dumps(config, sort_keys=True)
    cached = _cache_folder() / f"facts-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if cached.is_file():
        return facts_from_json(cached.read_text(encoding="utf-8"))
    facts = facts_from_json(_count(text, name=name))
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_text(facts_as_json(facts), encoding="utf-8")
    except OSError:
        pass  # a cache that cannot be written costs a few seconds next time
    return facts


def _count(config_json: str, *, name: str) -> str:
    command = [sys.executable, "-m", COUNTER_MODULE, name]
    try:
        done = subprocess.run(
            command, input=config_json, capture_output=True, text=True, timeout=COUNTER_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"counting parameters took over {COUNTER_TIMEOUT_SECONDS} seconds", where=name) from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(f"no formula for this architecture and counting its parameters failed: {reason}", where=name)
    return done.stdout.strip().splitlines()[-1]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sft-play"
