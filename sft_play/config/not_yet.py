"""What the schema accepts and this version cannot honour yet: the one table, and its refusal at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sft_play.config.keys import KEYS
from sft_play.config.origin import Resolved
from sft_play.config.values import plain, show
from sft_play.errors import NotAvailableError, SeveralErrors


@dataclass(frozen=True, kw_only=True)
class NotYet:
    """One key, or some values of it, that cannot be honoured yet. A key's default always can.

    Attributes:
        values: the values that are refused; empty for every value but the default.
        instead: what to write in its place; by default the key's default.
    """

    key: str
    values: tuple[Any, ...] = ()
    instead: str = ""

    def refuses(self, value: Any) -> bool:
        if value == KEYS[self.key].default:
            return False
        return value in self.values if self.values else True

    def said(self) -> str:
        """What is not available, for the reference page."""
        return ", ".join(show(value) for value in self.values) if self.values else "any value but the default"


NOT_YET: tuple[NotYet, ...] = ()


def unavailable(resolved: Resolved) -> tuple[NotAvailableError, ...]:
    """An error for every value that this version cannot honour yet."""
    errors = []
    for entry in NOT_YET:
        value = resolved.value(entry.key)
        if not entry.refuses(value):
            continue
        written = f"{entry.key}: {show(value)}"
        fix = entry.instead or f"remove it, or set it back to {show(plain(KEYS[entry.key].default))}"
        errors.append(
            NotAvailableError(f"{written} is not available yet", where=resolved.origins[entry.key].where, fix=fix)
        )
    return tuple(errors)


def refuse_unavailable(resolved: Resolved) -> None:
    """Stops a run that asks for what this version cannot do yet; nothing is ignored instead.

    Raises:
        SeveralErrors: of `NotAvailableError`, one for each such value.
    """
    errors = unavailable(resolved)
    if errors:
        raise SeveralErrors(errors)
