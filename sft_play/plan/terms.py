"""What an estimate is made of: named numbers of bytes, by phase."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Parts of a run that are not in memory together; the peak is the largest, not the sum."""

    LOAD = "load"
    FORWARD_BACKWARD = "forward+backward"
    OPTIMIZER_STEP = "optimizer step"
    EVALUATION = "evaluation"
    GENERATION = "generation"
    SAVE = "save"


@dataclass(frozen=True, kw_only=True)
class Term:
    """One named piece of memory on one GPU."""

    name: str
    bytes: int


def terms(**named: float) -> tuple[Term, ...]:
    """Terms from keyword arguments (underscores become spaces); those of no bytes are left out."""
    found = (Term(name=name.replace("_", " "), bytes=round(value)) for name, value in named.items())
    return tuple(term for term in found if term.bytes > 0)


def total_bytes(parts: tuple[Term, ...]) -> int:
    """Sum of the terms."""
    return sum(part.bytes for part in parts)
