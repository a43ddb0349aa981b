"""Where every value came from: settings, the layers they stand in, and the resolved config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sft_play.config.schema import Config


class OriginKind(StrEnum):
    """The layers, weakest first; `MISSING` stands for a required key that nobody set."""

    MISSING = "missing"
    DEFAULT = "default"
    SETUP = "setup"
    INCLUDE = "include"
    FILE = "file"
    ENVIRONMENT = "environment"

    @property
    def rank(self) -> int:
        return list(OriginKind).index(self)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a value came from.

    Attributes:
        where: `configs/x.yaml:12`, `environment TRAIN_BATCH_SIZE`, `default`.
        value: the value as this layer gave it.
        given_as: the old name or variable that was written, where it differs from the key.
        overrode: what this value took the place of, the strongest first.
    """

    kind: OriginKind
    where: str
    value: Any
    given_as: str = ""
    overrode: tuple[Origin, ...] = ()

    @property
    def explicit(self) -> bool:
        """Whether a person wrote it, as opposed to a default."""
        return self.kind.rank > OriginKind.DEFAULT.rank


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One key as one layer sets it.

    Attributes:
        error_place: what stands in front of an error about it; `TRAIN_BATCH_SIZE=abc` for a variable.
        inner_places: places of the items inside a list or mapping, by path.
    """

    key: str
    origin: Origin
    error_place: str
    inner_places: Mapping[tuple[str | int, ...], str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Settings of one file or of the environment, and what is to be said about them."""

    settings: Mapping[str, Setting]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A whole config and the origin of every value in it.

    Attributes:
        origins: one for every key, by dotted name.
        notes: what was understood differently from how it was written, such as old names.
        warnings: what looks like a slip but is no error.
        path: the config file; None where the config came from the environment alone.
        files: every YAML file that was read.
    """

    config: Config
    origins: Mapping[str, Origin]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    path: Path | None = None
    files: tuple[Path, ...] = ()

    def value(self, key: str) -> Any:
        """The value of a dotted key.

        Raises:
            AttributeError: no such key.
        """
        return value_of(self.config, key)

    def explicit(self, key: str) -> bool:
        """Whether a file or the environment set the key."""
        return self.origins[key].explicit


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key of a config.

    Raises:
        AttributeError: no such key.
    """
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def frozen(mapping: Mapping[str, Origin]) -> Mapping[str, Origin]:
    return MappingProxyType(dict(mapping))
