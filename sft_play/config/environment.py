"""The environment's layer: SECTION_KEY variables, typed by the schema, and what looks like a slip."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sft_play.config.inputs import (
    COMMAND_INPUTS,
    INPUTS_OF,
    MAKE_VARIABLES,
    check_inputs,
    foreign_input,
    given,
    passes,
)
from sft_play.config.keys import KEYS, VARIABLES
from sft_play.config.nearest import nearest, spoken
from sft_play.config.origin import Layer, Origin, OriginKind, Setting
from sft_play.config.suggest import nearest_variables
from sft_play.config.values import parse_text
from sft_play.errors import ConfigError, SftPlayError, UnknownKeyError

__all__ = ["COMMAND_INPUTS", "INPUTS_OF", "MAKE_VARIABLES", "ReadEnvironment", "check_inputs", "read_environment"]

CLOSE = 2
"""Edits up to which a variable that is merely present counts as a slip of a key's."""


@dataclass(frozen=True, kw_only=True)
class ReadEnvironment:
    """The environment's settings, errors, and slips that are warnings or, under run.strict_env, errors."""

    layer: Layer
    errors: tuple[SftPlayError, ...]
    slips: tuple[UnknownKeyError, ...]


def read_environment(environ: Mapping[str, str], inputs: Collection[str] | None = None) -> ReadEnvironment:
    """Reads every variable that sets a key. Errors are returned, never raised.

    Args:
        inputs: variables that this command reads, from `INPUTS_OF`; None for those of every command. Another
            command's are refused on the make command line and left alone where they are merely set.
    """
    inputs = COMMAND_INPUTS if inputs is None else inputs
    on_command_line = given(environ)
    settings: dict[str, Setting] = {}
    errors: list[SftPlayError] = []
    for variable in sorted(environ):
        if variable in VARIABLES:
            _take(variable, environ[variable], settings, errors)
    errors += [_unknown_variable(one, inputs) for one in on_command_line if not _is_known(one, inputs)]
    known_inputs = {*COMMAND_INPUTS, *inputs}
    slips = [
        slip
        for variable in sorted(set(environ) - set(on_command_line))
        if not _is_known(variable, known_inputs) and (slip := _slip(variable)) is not None
    ]
    return ReadEnvironment(layer=Layer(settings=settings), errors=tuple(errors), slips=tuple(slips))


def _is_known(variable: str, inputs: Collection[str]) -> bool:
    return variable in VARIABLES or variable in inputs or passes(variable)


def _take(variable: str, text: str, settings: dict[str, Setting], errors: list[SftPlayError]) -> None:
    key = KEYS[VARIABLES[variable]]
    place = f"{variable}={text}"
    if not text.strip():
        fix = f"give it a value, or unset {variable}" + ("; none stands for nothing" if key.type.nullable else "")
        errors.append(ConfigError("the variable is empty", where=f"{variable}=", fix=fix))
        return
    alias = variable if variable != key.variable else ""
    origin = Origin(
        kind=OriginKind.ENVIRONMENT, where=f"environment {variable}", value=parse_text(key, text), given_as=alias
    )
    other = settings.get(key.name)
    if other is not None and other.origin.value != origin.value:
        what = f"{other.origin.where.removeprefix('environment ')} says otherwise, and both set {key.name}"
        errors.append(ConfigError(what, where=variable, fix="keep one of them"))
        return
    settings[key.name] = Setting(key=key.name, origin=origin, error_place=place)


def _unknown_variable(variable: str, inputs: Collection[str]) -> UnknownKeyError:
    if variable in COMMAND_INPUTS:
        return foreign_input(variable, inputs)
    near = spoken(nearest_variables(variable, inputs))
    what = "no key and no input of a command has this name" + (f", {near}" if near else "")
    fix = "" if near else "variables are SECTION_KEY, such as TRAIN_BATCH_SIZE; docs/configuration.md lists them"
    return UnknownKeyError(what, where=variable, fix=fix)


def _slip(variable: str) -> UnknownKeyError | None:
    near = nearest(variable.upper(), VARIABLES, CLOSE)
    if not near:
        return None
    what = f"the variable is set and no key has this name, {spoken(near)}"
    return UnknownKeyError(what, where=variable, fix=f"rename or unset {variable}")
