"""What a wrong key or variable was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable

from sft_play.config.keys import KEYS, SECTIONS, VARIABLES
from sft_play.config.nearest import edit_distance, nearest, spoken, tolerance
from sft_play.config.old_names import ADVICE, OLD_NAMES
from sft_play.errors import UnknownKeyError

_SECRET_WORDS = ("token", "api_key", "apikey", "password", "passwd", "secret", "credential")


def unknown_key(name: str, place: str) -> UnknownKeyError:
    """The error for a dotted name that no section has, with the nearest right one."""
    leaf = name.rpartition(".")[2]
    if leaf in ADVICE:
        return UnknownKeyError(f"unknown key {name}", where=place, fix=ADVICE[leaf])
    homes = [key.section for key in KEYS.values() if key.leaf == leaf]
    if homes:
        under = " or ".join(f"`{home}`" for home in homes)
        beside = spoken(nearest(name, (key.name for key in KEYS.values() if len(leaf) > 2), 1))
        also = f", and {beside}" if beside else ""
        return UnknownKeyError(f"unknown key {name}: `{leaf}` belongs under {under}{also}", where=place)
    if leaf in OLD_NAMES:
        return UnknownKeyError(f"unknown key {name}: `{leaf}` is {OLD_NAMES[leaf]} here", where=place)
    guess = nearest_keys(name)
    if guess:
        return UnknownKeyError(f"unknown key {name}, {spoken(guess)}", where=place)
    if any(word in leaf.lower() for word in _SECRET_WORDS):
        fix = "secrets belong in the environment, such as HF_TOKEN, and never in a config"
        return UnknownKeyError(f"unknown key {name}", where=place, fix=fix)
    return UnknownKeyError(f"unknown key {name}", where=place, fix=_listing(name.rpartition(".")[0]))


def meant_keys(name: str) -> tuple[str, ...]:
    """The keys or sections that `unknown_key` names for a wrong one."""
    leaf = name.rpartition(".")[2]
    homes = tuple(key.name for key in KEYS.values() if key.leaf == leaf)
    return homes or ((OLD_NAMES[leaf],) if leaf in OLD_NAMES else nearest_keys(name))


def nearest_keys(name: str) -> tuple[str, ...]:
    """The keys or sections nearest to a dotted name, in any section; empty when nothing is near.

    A key of the same section wins over an equally near one of another section.
    """
    section, _, leaf = name.rpartition(".")
    here = [key.leaf for key in KEYS.values() if key.section == section]
    here += [one.rpartition(".")[2] for one in SECTIONS if one.rpartition(".")[0] == section]
    dot = f"{section}." if section else ""
    near_here = [f"{dot}{one}" for one in nearest(leaf, here)]
    everywhere = [*KEYS, *SECTIONS]
    near_leaf = nearest(leaf, dict.fromkeys(one.rpartition(".")[2] for one in everywhere))
    if near_here and (not near_leaf or _distance(near_here[0], leaf) <= edit_distance(leaf, near_leaf[0])):
        return tuple(near_here)
    if near_leaf:
        return tuple(one for one in everywhere if one.rpartition(".")[2] in near_leaf)
    whole = nearest(name, everywhere, min(2, tolerance(name)))
    return whole or tuple(dict.fromkeys(OLD_NAMES[old] for old in nearest(leaf, OLD_NAMES, min(2, tolerance(leaf)))))


def _distance(name: str, leaf: str) -> int:
    return edit_distance(leaf, name.rpartition(".")[2])


def _listing(section: str) -> str:
    if section:
        return f"{section} has " + ", ".join(key.leaf for key in KEYS.values() if key.section == section)
    return "the sections are " + ", ".join(one for one in SECTIONS if "." not in one)


def nearest_variables(name: str, inputs: Iterable[str] = ()) -> tuple[str, ...]:
    """The variables or command inputs nearest to a name, old names and `SECTION_oldname` understood."""
    upper = name.upper()
    known = (*VARIABLES, *inputs)
    if upper in known:
        return (upper,)
    for old, key in OLD_NAMES.items():
        section = key.partition(".")[0]
        if upper in (old.upper(), f"{section}_{old}".upper()):
            return (KEYS[key].variable,)
    by_leaf = tuple(key.variable for key in KEYS.values() if key.leaf.upper() == upper)
    return by_leaf or nearest(upper, known)
