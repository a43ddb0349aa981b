"""What the schema refuses, in plain words: what the key takes, what was given, and the nearest right value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sft_play.config.keys import KEYS, Key
from sft_play.config.nearest import nearest, spoken
from sft_play.config.origin import Setting
from sft_play.config.schema import DataSource
from sft_play.config.values import plain
from sft_play.errors import ConfigError, UnknownKeyError

_SOURCE_FIELDS = tuple(DataSource.model_fields)
_SHOWN = 60


def key_of(location: Sequence[str | int]) -> str | None:
    """The key that a location in pydantic's errors lies in; None for a place that is no key."""
    for end in range(1, len(location) + 1):
        name = ".".join(str(part) for part in location[:end])
        if name in KEYS:
            return name
    return None


def wrong_value(setting: Setting, problems: Sequence[Mapping[str, Any]]) -> list[ConfigError]:
    """The errors for one key that the schema refused, `problems` being pydantic's own words about it."""
    key = KEYS[setting.key]
    value = setting.origin.value
    if key.type.sources and isinstance(value, list):
        return [error for index, item in enumerate(value) for error in _wrong_source(setting, index, item, problems)]
    name = setting.key if setting.origin.given_as in ("", setting.key) else f"{setting.origin.given_as} ({setting.key})"
    what = f"{name} takes {key.type.words}, not {given(value)}"
    return [ConfigError(what, where=setting.error_place, fix=_nearest_choice(key, value))]


def _wrong_source(setting: Setting, index: int, item: Any, problems: Sequence[Mapping[str, Any]]) -> list[ConfigError]:
    """The errors in one item of a list of data sources; none when pydantic had nothing against it."""
    here = f"{setting.key}[{index}]"
    place = setting.inner_places.get((index,), setting.error_place)
    mine = [one for one in problems if index in one["loc"]]
    if not mine:
        return []
    if not isinstance(item, dict):
        return [ConfigError(f"{here} takes a path, a hub id or {{path: ...}}, not {given(item)}", where=place)]
    errors: list[ConfigError] = []
    mine = [one for one in mine if "DataSource" in one["loc"]]
    unknown = [str(one["loc"][-1]) for one in mine if one["type"] == "extra_forbidden"]
    for problem in mine:
        name = str(problem["loc"][-1])
        inner = setting.inner_places.get((index, name), place)
        if problem["type"] == "missing" and any(name in nearest(one, _SOURCE_FIELDS) for one in unknown):
            continue
        if problem["type"] == "missing":
            errors.append(ConfigError(f"{here} has no {name}", where=place, fix=f"give it {name}: data.jsonl"))
        elif problem["type"] == "extra_forbidden":
            near = spoken(nearest(name, _SOURCE_FIELDS)) or f"it takes {', '.join(_SOURCE_FIELDS)}"
            errors.append(UnknownKeyError(f"unknown key {name} in {here}, {near}", where=inner))
        else:
            kept = next(str(part) for part in problem["loc"] if part in _SOURCE_FIELDS)
            place_kept = setting.inner_places.get((index, kept), place)
            words = KEYS[f"data.{kept}"].type.words if f"data.{kept}" in KEYS else _SOURCE_WORDS[kept]
            errors.append(ConfigError(f"{here}.{kept} takes {words}, not {given(item.get(kept))}", where=place_kept))
    return errors


_SOURCE_WORDS = {"path": "a path or hub id", "revision": "text", "weight": "a number above 0"}


def given(value: Any) -> str:
    """A value as it was given, quoted and short."""
    value = plain(value)
    if value is None:
        return "nothing"
    text = value if isinstance(value, int | float) and not isinstance(value, bool) else json.dumps(value, default=str)
    text = str(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _nearest_choice(key: Key, value: Any) -> str:
    words = [str(choice) for choice in (*key.type.choices, *key.type.item_choices)]
    if isinstance(value, list) and words:
        value = next((item for item in value if item not in words), None)
    if not isinstance(value, str) or not words:
        return ""
    near = nearest(value.lower(), words)
    if not near:
        near = tuple(word for word in words if len(value) > 2 and (word in value.lower() or value.lower() in word))
    return spoken(near)


def missing_key(key: Key, file: str) -> ConfigError:
    """The error for a required key that neither a file nor the environment gave."""
    home = f"write {key.leaf} under {key.section} in {file}, or set" if file else "give CONFIG=path, or set"
    return ConfigError(f"{key.name} is missing", where=file or "config", fix=f"{home} {key.variable}=...")
