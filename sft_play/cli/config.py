"""`make config`: every value with its origin, or one key explained."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.cli.options import Options
from sft_play.config.inputs import INPUTS_OF
from sft_play.config.keys import KEYS, SECTIONS, Key, meanings
from sft_play.config.not_yet import NOT_YET, NotYet
from sft_play.config.old_names import OLD_NAMES
from sft_play.config.origin import Origin, OriginKind, Resolved
from sft_play.config.resolve import resolve
from sft_play.config.suggest import unknown_key
from sft_play.config.values import plain, show
from sft_play.errors import UsageError

_WIDEST_VALUE = 36


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Prints the config of CONFIG under the environment, or explains KEY.

    Without CONFIG the defaults and the environment are shown, and what a run would still need.

    Raises:
        SftPlayError: the config is wrong, or KEY names no key.
    """
    options = _options(argv)
    path = Path(environ["CONFIG"]) if environ.get("CONFIG") else None
    name = _key_name(environ["KEY"]) if environ.get("KEY") else None
    resolved = resolve(path, environ, distributed=True, inputs=INPUTS_OF["config"], partial=path is None)
    for line in resolved.notes:
        print(f"note: {line}", file=sys.stderr)
    for line in resolved.warnings:
        print(f"warning: {line}", file=sys.stderr)
    if options.json:
        print(json.dumps(describe_key(resolved, name) if name else describe_all(resolved), indent=2))
    elif name is not None and name in KEYS:
        print("\n".join(explain_key(resolved, KEYS[name])))
    else:
        print("\n".join(render_all(resolved, section=name, dim=_colours(environ))))
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = Options(prog="make config", description="Every value of a config and where it comes from.")
    parser.add_argument("--json", action="store_true", help="the same for programs")
    return parser.parse_args(list(argv))


def _key_name(text: str) -> str:
    """The key or section that KEY names, also by an old name or by its variable.

    Raises:
        UnknownKeyError: neither.
        UsageError: the last part of several keys' names.
    """
    name = text.strip()
    by_variable = {key.variable: key.name for key in KEYS.values()}
    if name in KEYS or name in SECTIONS:
        return name
    if name in by_variable or name in OLD_NAMES:
        return by_variable.get(name) or OLD_NAMES[name]
    homes = [key.name for key in KEYS.values() if key.leaf == name]
    if len(homes) == 1:
        return homes[0]
    if homes:
        raise UsageError(f"{name} may be {' or '.join(homes)}", where="KEY", fix=f"KEY={homes[0]}")
    raise unknown_key(name, "KEY")


def _colours(environ: Mapping[str, str]) -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in environ and environ.get("TERM") != "dumb"


def render_all(resolved: Resolved, *, section: str | None = None, dim: bool = False) -> Iterator[str]:
    """The table of all values, or of one section's, a group for each section; `dim` greys the defaults."""
    shown = [one for one in SECTIONS if section is None or f"{one}.".startswith(f"{section}.")]
    keys = [key for one in shown for key in KEYS.values() if key.section == one]
    name_width = max(len(key.leaf) for key in keys)
    value_width = min(_WIDEST_VALUE, max(len(show(_value(resolved, key))) for key in keys))
    yield f"config  {resolved.path or '(no CONFIG: defaults and environment)'}"
    group = ""
    for key in keys:
        if key.section != group:
            group = key.section
            yield f"\n{group}"
        origin = resolved.origins[key.name]
        line = f"  {key.leaf:<{name_width}}  {show(_value(resolved, key)):<{value_width}}  {_source(resolved, key)}"
        yield f"\x1b[2m{line.rstrip()}\x1b[0m" if dim and not origin.explicit else line.rstrip()
    yield ""
    yield _counts(resolved, keys)
    yield "make config KEY=train.learning_rate explains one key"


def _counts(resolved: Resolved, keys: Sequence[Key]) -> str:
    kinds = [resolved.origins[key.name].kind for key in keys]
    words = {
        OriginKind.ENVIRONMENT: "from the environment",
        OriginKind.FILE: "from the file",
        OriginKind.INCLUDE: "from what it includes",
        OriginKind.SETUP: "from setup-accelerate",
        OriginKind.DEFAULT: "defaults",
        OriginKind.MISSING: "still to be set",
    }
    return ", ".join(f"{kinds.count(kind)} {text}" for kind, text in words.items() if kind in kinds)


def _value(resolved: Resolved, key: Key) -> Any:
    return resolved.value(key.name)


def _source(resolved: Resolved, key: Key) -> str:
    """Where the value came from, what it overrode, and whether it can be honoured."""
    origin = resolved.origins[key.name]
    text = f"needed: {key.variable}=..." if origin.kind is OriginKind.MISSING else origin.where
    if origin.given_as and origin.kind is not OriginKind.ENVIRONMENT:
        text += f" as {origin.given_as}"
    below = origin.overrode[0] if origin.overrode else None
    if below is not None and below.explicit:
        text += f", instead of {show(below.value)} ({below.where})"
    return text + "".join("  [not available yet]" for one in _refusing(key) if one.refuses(_value(resolved, key)))


def _refusing(key: Key) -> list[NotYet]:
    return [one for one in NOT_YET if one.key == key.name]


def explain_key(resolved: Resolved, key: Key) -> Iterator[str]:
    """One key in full: value, meaning, type, default, origin, what it overrode, its variable."""
    origin = resolved.origins[key.name]
    yield f"{key.name} = {show(_value(resolved, key))}"
    yield f"  {meanings()[key.name]}"
    yield ""
    rows = [("takes", key.type.words), ("default", "none, it must be set" if key.required else show(key.default))]
    rows.append(("comes from", f"{origin.where}{f' as {origin.given_as}' if origin.given_as else ''}"))
    rows += [("instead of", f"{show(one.value)}, {one.where}") for one in origin.overrode]
    rows.append(("variable", key.variable))
    old = [name for name, target in OLD_NAMES.items() if target == key.name]
    rows += [("old names", ", ".join(old))] if old else []
    rows += [("not available yet", one.said()) for one in _refusing(key)]
    for label, text in rows:
        yield f"  {label:<17}  {text}"


def describe_all(resolved: Resolved) -> dict[str, Any]:
    """Everything as JSON: `values` has one entry for each key."""
    return {
        "config": str(resolved.path) if resolved.path else None,
        "files": [str(path) for path in resolved.files],
        "notes": list(resolved.notes),
        "warnings": list(resolved.warnings),
        "values": {name: describe_key(resolved, name) for name in KEYS},
    }


def describe_key(resolved: Resolved, name: str) -> dict[str, Any]:
    """One key, or a section's keys, as JSON."""
    if name in SECTIONS:
        return {one: describe_key(resolved, one) for one in KEYS if one.startswith(f"{name}.")}
    key, origin = KEYS[name], resolved.origins[name]
    value = resolved.value(name)
    return {
        "key": name,
        "value": None if origin.kind is OriginKind.MISSING else plain(value),
        "meaning": meanings()[name],
        "type": key.type.words,
        "choices": [*key.type.choices, *key.type.item_choices],
        "required": key.required,
        "default": plain(key.default),
        "variable": key.variable,
        "origin": _origin(origin),
        "overrode": [_origin(one) for one in origin.overrode],
        "available": not any(one.refuses(value) for one in _refusing(key)),
    }


def _origin(origin: Origin) -> dict[str, Any]:
    return {
        "kind": origin.kind.value,
        "where": origin.where,
        "value": plain(origin.value),
        "given_as": origin.given_as or None,
    }
