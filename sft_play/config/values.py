"""Values as people write them: text from the environment, loose YAML, and plain words back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from enum import Enum
from typing import Any

from pydantic import BaseModel

from sft_play.config.keys import Key

_TRUE = {"true", "1", "yes", "on"}
_FALSE = {"false", "0", "no", "off"}
_NOTHING = {"none", "null", "~"}
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def parse_text(key: Key, text: str) -> Any:
    """The value that a variable's text stands for, by the key's type.

    Text that does not fit is returned as it is, for the schema to refuse.
    """
    text = text.strip()
    kind = key.type
    if text in kind.choices:
        return text
    if text.lower() in _NOTHING and (kind.nullable or kind.listed):
        return None if kind.nullable else ()
    if kind.boolean and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    if kind.number and _NUMBER.fullmatch(text):
        return _number(text)
    if kind.mapping:
        return _parse_mapping(text)
    if kind.sources or kind.listed:
        return _parse_list(key, text)
    return text


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def _parse_mapping(text: str) -> Any:
    if text.startswith("{"):
        return _json_or_text(text)
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(sign for _, sign, _ in pairs):
        return text
    return {name.strip(): value.strip() for name, _, value in pairs}


def _parse_list(key: Key, text: str) -> Any:
    if text.startswith(("[", "{")):
        value = _json_or_text(text)
        if isinstance(value, list | dict):
            return loosen(key, value)
        text = text.strip("[]")
    elif key.type.sources and "," not in text:
        return text
    items = [part.strip() for part in text.split(",") if part.strip()]
    return [_number(item) if key.type.number and _NUMBER.fullmatch(item) else item for item in items]


def _json_or_text(text: str) -> Any:
    """Brackets hold JSON, so that a path with a comma can be given; anything else stays text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def loosen(key: Key, value: Any) -> Any:
    """What a YAML file may write more loosely than the schema: `none` for nothing, `0,1` for a list, `no` for false."""
    kind = key.type
    if isinstance(value, str):
        return _loosen_text(key, value)
    if value is None and not kind.nullable:
        return "none" if "none" in kind.choices else () if kind.listed else None
    if value is False and "no" in kind.choices:
        return "no"
    if kind.sources and isinstance(value, dict):
        return [value]
    return value


def _loosen_text(key: Key, text: str) -> Any:
    kind = key.type
    if text in kind.choices:
        return text
    if text.strip().lower() in _NOTHING and (kind.nullable or kind.listed):
        return None if kind.nullable else ()
    if kind.boolean and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    if kind.listed and not (kind.number and "," not in text):
        return _parse_list(key, text)
    return text


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def show(value: Any) -> str:
    """A value as a person would write it in YAML: `none`, `true`, `2e-4`, `[q_proj, v_proj]`."""
    value = plain(value)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _show_float(value)
    if isinstance(value, list):
        return f"[{_commas(show(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{_commas(f'{name}: {show(item)}' for name, item in value.items())}}}"
    return str(value)


def _commas(items: Iterable[str]) -> str:
    return ", ".join(items)


def _show_float(value: float) -> str:
    if not math.isfinite(value):
        return repr(value)
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    text = repr(value)
    if 0 < abs(value) < 1e-3:
        short = f"{value:.15e}"
        mantissa, _, power = short.partition("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    return text if float(text) == value else repr(value)
