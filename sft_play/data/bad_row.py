"""A row that cannot be used, and the words in which rows and values are shown to the user."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from sft_play.errors import DataError

BEGINNING_CHARACTERS = 60
_NAME_CHARACTERS = 40
_NAMES_SHOWN = 12
_ERROR_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that cannot be used: where, which field, why, and how the row begins."""

    shown: str
    line: int
    field: str
    reason: str
    beginning: str

    def error(self, fix: str = "") -> DataError:
        """The row as the line a user reads."""
        field = f"{self.field}: " if self.field else ""
        begins = f" (row begins {self.beginning!r})" if self.beginning else ""
        return DataError(f"{field}{self.reason}{begins}", where=f"{self.shown}:{self.line}", fix=fix)


class RowProblem(Exception):
    """A fault of one row: the field and the reason."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field, self.reason = field, reason


def beginning_of(value: object) -> str:
    """The first characters of a row, for messages."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except (RecursionError, ValueError, TypeError):
        return ""
    return text if len(text) <= BEGINNING_CHARACTERS else text[:BEGINNING_CHARACTERS] + "..."


def type_name(value: object) -> str:
    """What JSON calls a value's type, with its article."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def shown_name(name: object) -> str:
    """A field's name as it may stand in a message: short and printable."""
    text = str(name)
    if text.isprintable() and 0 < len(text) <= _NAME_CHARACTERS:
        return text
    return repr(text if len(text) <= _NAME_CHARACTERS else text[:_NAME_CHARACTERS] + "...")


def shown_error(error: BaseException) -> str:
    """What a library says of a damaged file, which may hold bytes of the file itself."""
    text = str(error)[:_ERROR_CHARACTERS]
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def shown_names(names: Iterable[object]) -> str:
    """Names of fields in a message; `none` where there are none."""
    listed = list(names)
    more = len(listed) - _NAMES_SHOWN
    shown = [shown_name(name) for name in listed[:_NAMES_SHOWN]] + ([f"{more} more"] if more > 0 else [])
    return ", ".join(shown) or "none"
