"""What a rule says about a config, and the two shapes that most rules have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sft_play.config.keys import KEYS
from sft_play.config.origin import Origin, OriginKind, Resolved
from sft_play.config.values import show


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Keys that do not go together.

    Attributes:
        keys: those it is about; the first one's origin is the place of the error.
        note: said and not refused.
    """

    keys: tuple[str, ...]
    what: str
    fix: str
    note: bool = False


Rule = Callable[[Resolved], Iterable[Finding]]


def said(resolved: Resolved, key: str) -> str:
    """`train.bf16: true`, as one would write it in a file."""
    return f"{key}: {show(resolved.value(key))}"


def changed(resolved: Resolved, key: str) -> bool:
    """Whether the key was set to something else than its default."""
    return resolved.explicit(key) and resolved.value(key) != KEYS[key].default


def ignored(resolved: Resolved, keys: Iterable[str], *, by: str, fix: str, always: bool = False) -> Iterator[Finding]:
    """Keys that were set and have no effect because of the key `by`.

    Where a stronger layer switched them off (`TUNING_MODE=full` over a file with an adapter) that is what was
    wanted, and only noted; otherwise it is an error.

    Args:
        always: count a key that repeats its default too, because just writing it shows a wrong belief.
    """
    for key in keys:
        if not (resolved.explicit(key) if always else changed(resolved, key)):
            continue
        switched_off = _layer(resolved.origins[by]) > _layer(resolved.origins[key])
        yield Finding(keys=(key, by), what=f"{key} has no effect with {said(resolved, by)}", fix=fix, note=switched_off)


def _layer(origin: Origin) -> int:
    return origin.kind.rank if origin.kind is not OriginKind.MISSING else 0


def needs(resolved: Resolved, key: str, what: str, *others: str, fix: str) -> Finding:
    """`key` was set and lacks something that lies with `others`."""
    return Finding(keys=(key, *others), what=f"{said(resolved, key)} needs {what}", fix=fix)
