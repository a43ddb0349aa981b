"""Layers to one config: every value with its origin, or every error at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sft_play.config.deepspeed_file import deepspeed_layer
from sft_play.config.environment import read_environment
from sft_play.config.keys import KEYS
from sft_play.config.origin import Layer, Origin, OriginKind, Resolved, Setting, frozen
from sft_play.config.rules import check_rules
from sft_play.config.schema import Config
from sft_play.config.secrets import looks_secret, secret_error
from sft_play.config.setup_file import PRECISION, SETUP_FILE, read_setup, without_precision
from sft_play.config.sources import ReadFiles, read_files
from sft_play.config.values import show
from sft_play.config.wording import key_of, missing_key, wrong_value
from sft_play.errors import SeveralErrors, SftPlayError, UnknownKeyError

__all__ = ["Origin", "OriginKind", "Resolved", "overrides", "resolve"]

_NO_FILES = ReadFiles(layers=(), files=(), errors=(), refused=frozenset())
_PLACEHOLDER = "(not set)"


def resolve(
    config_path: Path | None,
    environ: Mapping[str, str],
    *,
    distributed: bool = False,
    inputs: Collection[str] | None = None,
    partial: bool = False,
) -> Resolved:
    """The config from default < setup < include < file < environment.

    Reads YAML files and looks whether the model is a folder, nothing else.

    Args:
        config_path: the YAML file; None for the environment alone.
        distributed: the run may take several GPUs and machines, so that those which `setup-accelerate` wrote down
            count too. On a machine that HARDWARE describes nothing of that file does.
        inputs: what the calling command reads beside the keys (`environment.INPUTS_OF`); another command's inputs
            are refused on the make command line. None accepts those of every command.
        partial: let required keys stay unset, for commands that only show values; such a key holds
            `(not set)` and its origin is `OriginKind.MISSING`.

    Raises:
        SeveralErrors: everything that is wrong with the files, the variables and the values.
    """
    read = read_files(config_path) if config_path is not None else _NO_FILES
    env = read_environment(environ, inputs)
    setup, setup_errors = _setup_layer(environ, [*read.layers, env.layer], distributed=distributed)
    layers = [setup, *read.layers, env.layer]
    merged = merge(layers)
    engine, engine_errors = deepspeed_layer(merged)
    layers.append(engine)
    merged = merge(layers)
    draft = _Draft(settings=merged, errors=[*setup_errors, *read.errors, *env.errors, *engine_errors])
    draft.refuse_secrets()
    config = draft.validate()
    missing = [key for key in KEYS.values() if key.required and key.name not in merged]
    if not partial and (config_path is None or read.layers):
        file = str(config_path) if config_path is not None else ""
        draft.errors += [missing_key(key, file) for key in missing if key.name not in read.refused]
    resolved = Resolved(
        config=config,
        origins=_origins(merged),
        notes=tuple(note for layer in layers for note in layer.notes),
        path=config_path,
        files=read.files,
    )
    findings = check_rules(
        resolved, without=draft.wrong | {key.name for key in missing} | (read.refused - merged.keys())
    )
    draft.errors += findings.errors
    warnings = _slips(env.slips, resolved.config.run.strict_env, draft.errors)
    if draft.errors:
        raise SeveralErrors(_in_reading_order(draft.errors, read.files))
    return replace(resolved, notes=(*resolved.notes, *findings.notes), warnings=warnings)


def _setup_layer(
    environ: Mapping[str, str], stronger: Sequence[Layer], *, distributed: bool
) -> tuple[Layer, list[SftPlayError]]:
    """What `setup-accelerate` left in this folder."""
    if environ.get("HARDWARE"):
        return Layer(settings={}), []
    layer, errors = read_setup(SETUP_FILE, distributed=distributed)
    decided = any(key in one.settings for one in stronger for key in PRECISION)
    return (without_precision(layer) if decided else layer), errors


def merge(layers: Sequence[Layer]) -> dict[str, Setting]:
    """The strongest setting of every key; each remembers what it took the place of."""
    merged: dict[str, Setting] = {}
    for layer in layers:
        for name, setting in layer.settings.items():
            below = merged[name].origin if name in merged else _default_origin(name)
            chain = () if below is None else (replace(below, overrode=()), *below.overrode)
            merged[name] = replace(setting, origin=replace(setting.origin, overrode=chain))
    return merged


def overrides(resolved: Resolved) -> tuple[str, ...]:
    """One line for each value that the environment set, for the start of a run."""
    lines = []
    for name, origin in resolved.origins.items():
        if origin.kind is not OriginKind.ENVIRONMENT:
            continue
        variable = origin.where.removeprefix("environment ")
        line = f"{name} = {show(resolved.value(name))} from {variable}"
        below = origin.overrode[0] if origin.overrode else None
        lines.append(f"{line} (instead of {show(below.value)}, {below.where})" if below else line)
    return tuple(lines)


@dataclass(kw_only=True)
class _Draft:
    """The settings on their way to a config, and what was found wrong with them."""

    settings: Mapping[str, Setting]
    errors: list[SftPlayError]
    wrong: set[str] = field(default_factory=set)

    def refuse_secrets(self) -> None:
        for setting in self.settings.values():
            if looks_secret(setting.origin.value):
                self.errors.append(secret_error(setting))
                self.wrong.add(setting.key)

    def validate(self) -> Config:
        """The config; where keys are wrong, one with their defaults, so that the rest can still be checked."""
        try:
            return Config.model_validate(self._tree())
        except ValidationError as refused:
            problems = refused.errors(include_url=False, include_context=False, include_input=False)
        for name in dict.fromkeys(key_of(problem["loc"]) for problem in problems):
            if name is None:
                continue
            mine = [problem for problem in problems if key_of(problem["loc"]) == name]
            self.errors += wrong_value(self.settings[name], mine)
            self.wrong.add(name)
        return Config.model_validate(self._tree())

    def _tree(self) -> dict[str, Any]:
        values = {key.name: _PLACEHOLDER for key in KEYS.values() if key.required}
        values |= {name: setting.origin.value for name, setting in self.settings.items() if name not in self.wrong}
        tree: dict[str, Any] = {}
        for name, value in values.items():
            *sections, leaf = name.split(".")
            branch = tree
            for section in sections:
                branch = branch.setdefault(section, {})
            branch[leaf] = value
        return tree


def _default_origin(name: str) -> Origin | None:
    key = KEYS[name]
    return None if key.required else Origin(kind=OriginKind.DEFAULT, where="default", value=key.default)


def _origins(merged: Mapping[str, Setting]) -> Mapping[str, Origin]:
    missing = Origin(kind=OriginKind.MISSING, where="not set", value=None)
    return frozen({name: merged[name].origin if name in merged else _default_origin(name) or missing for name in KEYS})


def _slips(slips: Sequence[UnknownKeyError], strict: bool, errors: list[SftPlayError]) -> tuple[str, ...]:
    """The slips as warnings; under run.strict_env they become errors instead."""
    if strict:
        errors += slips
        return ()
    return tuple(slip.line() for slip in slips)


def _in_reading_order(errors: Sequence[SftPlayError], files: Sequence[Path]) -> list[SftPlayError]:
    """Errors by file and line, as one would read them; what has no line keeps its order behind."""
    order = {str(path): index for index, path in enumerate(files)}

    def position(error: SftPlayError) -> tuple[int, int]:
        place = re.fullmatch(r"(.+):(\d+)", error.where)
        return (order.get(place[1], len(order)), int(place[2])) if place else (len(order) + 1, 0)

    return sorted(errors, key=position)
