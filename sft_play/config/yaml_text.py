"""YAML text to plain values with the line of each: YAML 1.2, safe, bounded.

The node tree is read instead of ruamel's constructed values, because nodes know their lines, and because
tags, duplicate keys and aliases can then be judged before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from sft_play.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
MAX_DEPTH = 32

_CORE = "tag:yaml.org,2002:"
_PLAIN = {f"{_CORE}{name}" for name in ("null", "bool", "int", "float", "str", "timestamp", "map", "seq", "merge")}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One `key: value` of a mapping and the line that its key stands on."""

    key: str
    line: int
    node: Node


@dataclass(kw_only=True)
class Document:
    """One YAML file while it is read: counts what it builds and collects what is wrong.

    Attributes:
        place: says where a line is, as `configs/x.yaml:12`.
        errors: everything found so far.
    """

    place: Callable[[int], str]
    errors: list[ConfigError] = field(default_factory=list)
    _built: int = 0

    def complain(self, node: Node, what: str, fix: str = "") -> None:
        self.errors.append(ConfigError(what, where=self.place(_line(node)), fix=fix))

    def entries(self, node: MappingNode) -> Iterator[Entry]:
        """The pairs of a mapping, merged ones (`<<`) last; a key given twice or not text is an error."""
        seen: dict[str, int] = {}
        merged: list[Node] = []
        for key_node, value_node in node.value:
            if str(key_node.tag) == f"{_CORE}merge":
                merged.append(value_node)
                continue
            key = self._key(key_node)
            if key is None:
                continue
            line = _line(key_node)
            if key in seen:
                self.complain(key_node, f"{key} is given twice, first in line {seen[key]}", "keep one of them")
                continue
            seen[key] = line
            yield Entry(key=key, line=line, node=value_node)
        for parent in merged:
            yield from self._merged(parent, seen)

    def _merged(self, parent: Node, seen: dict[str, int]) -> Iterator[Entry]:
        if not self._count(parent):
            return
        if isinstance(parent, SequenceNode):
            for one in parent.value:
                yield from self._merged(one, seen)
        elif isinstance(parent, MappingNode):
            for entry in self.entries(parent):
                if entry.key not in seen:
                    seen[entry.key] = entry.line
                    yield entry
        else:
            self.complain(parent, "<< takes a mapping or a list of mappings")

    def _key(self, node: Node) -> str | None:
        if isinstance(node, ScalarNode) and str(node.tag) in _PLAIN:
            return str(node.value)
        self.complain(node, "a key must be plain text")
        return None

    def value(
        self, node: Node, *, keep_text: bool = False, numbers: frozenset[str] = frozenset(), depth: int = 0
    ) -> Any:
        """The plain value of a node; None where it is refused, which then stands in `errors`.

        Args:
            keep_text: leave scalars that look like numbers as they are written.
            numbers: keys of mappings in it whose values are numbers all the same.
        """
        if not self._count(node):
            return None
        if depth > MAX_DEPTH:
            self.complain(node, f"nested deeper than {MAX_DEPTH} levels, or an anchor that contains itself")
            return None
        if str(node.tag) not in _PLAIN:
            self.complain(node, f"the tag {node.tag} is not allowed", "write a plain value")
            return None
        if isinstance(node, SequenceNode):
            return [self.value(item, keep_text=keep_text, numbers=numbers, depth=depth + 1) for item in node.value]
        if isinstance(node, MappingNode):
            return {
                one.key: self.value(one.node, keep_text=keep_text and one.key not in numbers, depth=depth + 1)
                for one in self.entries(node)
            }
        return self._scalar(node, keep_text)

    def _scalar(self, node: Node, keep_text: bool) -> Any:
        kind = str(node.tag).removeprefix(_CORE)
        if kind in ("str", "timestamp") or (keep_text and kind in ("int", "float")):
            return str(node.value)
        try:
            return YAML(typ="safe", pure=True).constructor.construct_object(node, deep=True)
        except (YAMLError, ValueError, OverflowError):
            self.complain(node, f"{node.value!r} cannot be read as {kind}")
            return None

    def inner_places(self, node: Node, path: tuple[str | int, ...] = ()) -> dict[tuple[str | int, ...], str]:
        """The place of every item in a list or mapping, two levels down."""
        children: list[tuple[str | int, Node]] = []
        if isinstance(node, SequenceNode):
            children = list(enumerate(node.value))
        elif isinstance(node, MappingNode):
            children = [(str(key.value), key) for key, _ in node.value if isinstance(key, ScalarNode)]
        places = {}
        for name, child in children[:MAX_VALUES]:
            places[*path, name] = self.place(_line(child))
            if not path:
                places |= self.inner_places(child, (name,))
        return places

    def _count(self, node: Node) -> bool:
        """Counts one value more; False, with one error, past the limit (an alias may stand for a huge tree)."""
        self._built += 1
        if self._built == MAX_VALUES:
            self.complain(node, f"more than {MAX_VALUES} values, counting what aliases stand for")
        return self._built < MAX_VALUES


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def compose(text: str, place: Callable[[int], str]) -> Node | None:
    """The node tree of a YAML text; None for an empty one.

    Raises:
        ConfigError: not YAML, or more than one document.
    """
    try:
        root: Node | None = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = f"not valid YAML: {error.problem or error.context}"
        fix = "indent with spaces, not tabs" if "'\\t'" in what else "check the indentation, colons and quotes here"
        raise ConfigError(what, where=place(mark.line + 1 if mark else 1), fix=fix) from None
    except RecursionError:
        raise ConfigError("nested too deeply", where=place(1), fix="write plain sections and keys") from None
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {str(error).splitlines()[0]}", where=place(1), fix=" ") from None
    return root
