"""The nearest right name for a wrong one."""

from __future__ import annotations

from collections.abc import Iterable


def edit_distance(left: str, right: str, limit: int = 99) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours that turn `left` into `right`.

    Returns `limit + 1` as soon as the distance is known to be above `limit`.
    """
    if abs(len(left) - len(right)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        new = [i]
        for j, b in enumerate(right, start=1):
            cost = min(row[j] + 1, new[j - 1] + 1, row[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            new.append(cost)
        if min(new) > limit:
            return limit + 1
        before, row = row, new
    return row[-1]


def tolerance(name: str) -> int:
    """Edits after which a name is no longer taken for a slip of another: a third of it, at least 1."""
    return max(1, len(name) // 3)


def nearest(name: str, candidates: Iterable[str], limit: int | None = None) -> tuple[str, ...]:
    """The candidates closest to `name`, all that tie; empty when none is within `limit` (default `tolerance`)."""
    limit = tolerance(name) if limit is None else limit
    known = tuple(dict.fromkeys(candidates))
    for distance in range(limit + 1):  # most slips are one edit, and a low limit ends a comparison early
        found = tuple(one for one in known if edit_distance(name, one, distance) == distance)
        if found:
            return found
    return ()


def spoken(names: Iterable[str], most: int = 3) -> str:
    """`nearest is a`, or `nearest are a, b`; empty for no name."""
    shown = tuple(names)[:most]
    if not shown:
        return ""
    return f"nearest {'is' if len(shown) == 1 else 'are'} {', '.join(shown)}"
