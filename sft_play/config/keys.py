"""Every key of the config as a value: its type in plain words, default, variable and meaning.

All of it is read from the schema, so a key is described in one place only.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from sft_play.config import schema
from sft_play.config.schema import Config, DataSource, Section


@dataclass(frozen=True, kw_only=True)
class ValueType:
    """What a key accepts.

    `choices` are the fixed words and numbers, `item_choices` those of a list's items; `words` says all of it
    to a person.
    """

    words: str
    choices: tuple[str | int, ...] = ()
    item_choices: tuple[str | int, ...] = ()
    nullable: bool = False
    number: bool = False
    boolean: bool = False
    text: bool = False
    listed: bool = False
    mapping: bool = False
    sources: bool = False

    @property
    def keeps_text(self) -> bool:
        """Whether a scalar that looks like a number is meant as it is written (a revision `12345e7`)."""
        return self.text and not self.number


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key: `name` is dotted, `section` all of it but the last part, `variable` its environment variable."""

    name: str
    section: str
    leaf: str
    variable: str
    type: ValueType
    required: bool
    default: Any


def _bound(metadata: tuple[Any, ...], name: str) -> Any:
    """The bound `ge`, `gt`, `le` or `lt` among a field's annotations; None without one."""
    constraints = [one for item in metadata for one in (item.metadata if isinstance(item, FieldInfo) else (item,))]
    return next((getattr(one, name) for one in constraints if hasattr(one, name)), None)


def _number_words(kind: type, metadata: tuple[Any, ...]) -> str:
    noun = "a whole number" if kind is int else "a number"
    ge, gt, le, lt = (_bound(metadata, bound) for bound in ("ge", "gt", "le", "lt"))
    if ge is not None and le is not None:
        return f"{noun} from {ge} to {le}"
    if ge is not None and lt is not None:
        return f"{noun} from {ge} to below {lt}"
    if gt is not None and le is not None:
        return f"{noun} above {gt} and at most {le}"
    if gt is not None:
        return f"{noun} above {gt}"
    return noun if ge is None else f"{noun} ({ge} or more)"


def _type_of(hint: Any, metadata: tuple[Any, ...] = ()) -> ValueType:
    """The `ValueType` of an annotation of the schema.

    Raises:
        TypeError: the annotation has a form that no key has used so far.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type_of(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return _union([_type_of(arg) for arg in args])
    if origin is Literal:
        return ValueType(words=_one_of(args), choices=args, number=isinstance(args[0], int))
    if origin is tuple:
        item = _type_of(args[0])
        if item.sources:
            return replace(item, words="a list of texts or of {path, revision, weight, format, max_rows}")
        words = f"a list of {_plural(item.words)}"
        return replace(item, words=words, listed=True, choices=(), item_choices=item.choices)
    if origin is dict:
        return ValueType(words="a mapping of text to text", mapping=True, text=True)
    if hint is type(None):
        return ValueType(words="none", nullable=True)
    if hint is bool:
        return ValueType(words="true or false", boolean=True)
    if hint in (int, float):
        return ValueType(words=_number_words(hint, metadata), number=True)
    if hint is str:
        return ValueType(words="text", text=True)
    if hint is DataSource:
        return ValueType(words="{path, revision, weight, format, max_rows}", sources=True, text=True)
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = tuple(str(one.value) for one in hint)
        return ValueType(words=_one_of(choices), choices=choices)
    raise TypeError(f"the schema uses a type that has no words yet: {hint!r}")


def _one_of(choices: tuple[Any, ...]) -> str:
    listed = ", ".join(str(choice) for choice in choices)
    return listed if len(choices) == 1 else f"one of {listed}"


def _plural(words: str) -> str:
    return {"text": "names", "a whole number (0 or more)": "whole numbers"}.get(words, words.removeprefix("one of "))


def _union(parts: list[ValueType]) -> ValueType:
    words = " or ".join(part.words for part in sorted(parts, key=lambda part: part.nullable))
    return ValueType(
        words=words,
        choices=tuple(choice for part in parts for choice in part.choices),
        item_choices=tuple(choice for part in parts for choice in part.item_choices),
        nullable=any(part.nullable for part in parts),
        number=any(part.number for part in parts),
        boolean=any(part.boolean for part in parts),
        text=any(part.text for part in parts),
        listed=any(part.listed for part in parts),
        sources=any(part.sources for part in parts),
    )


def _walk(model: type[Section], prefix: str) -> Iterator[Key | str]:
    """Keys of a section, and the dotted names of the sections in it, in the schema's order."""
    hints = get_type_hints(model, include_extras=True)
    for leaf, field in model.model_fields.items():
        hint, name = hints[leaf], f"{prefix}{leaf}"
        if isinstance(hint, type) and issubclass(hint, Section):
            yield name
            yield from _walk(hint, f"{name}.")
            continue
        yield Key(
            name=name,
            section=prefix.rstrip("."),
            leaf=leaf,
            variable=name.replace(".", "_").upper(),
            type=_type_of(hint),
            required=field.is_required(),
            default=None if field.is_required() else field.get_default(call_default_factory=True),
        )


_WALKED = tuple(_walk(Config, ""))
KEYS: Mapping[str, Key] = {item.name: item for item in _WALKED if isinstance(item, Key)}
SECTIONS: tuple[str, ...] = tuple(item for item in _WALKED if isinstance(item, str))

VARIABLE_ALIASES: Mapping[str, str] = {
    "NUM_GPUS": "dist.gpus",
    "NUM_NODES": "dist.num_nodes",
    "NODE_RANK": "dist.node_rank",
    "MAIN_ADDRESS": "dist.main_address",
    "MAIN_PORT": "dist.main_port",
    "DEEPSPEED_CONFIG": "dist.deepspeed_config",
    "NCCL_TIMEOUT": "dist.timeout_seconds",
}
"""Short variables beside SECTION_KEY."""

VARIABLES: Mapping[str, str] = {key.variable: name for name, key in KEYS.items()} | dict(VARIABLE_ALIASES)
"""Every environment variable that sets a key."""


@cache
def meanings() -> Mapping[str, str]:
    """The docstring under every key and section, by dotted name.

    Parsed from the schema's source on demand: pydantic can do it while it builds each class, which doubles
    the time that every command takes to start.
    """
    tree = ast.parse(Path(schema.__file__).read_text(encoding="utf-8"))
    texts = {node.name: _field_docs(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    return dict(_collect_docs(Config, "", texts))


def _field_docs(node: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs


def _collect_docs(
    model: type[Section], prefix: str, texts: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, str]]:
    hints = get_type_hints(model)
    for leaf in model.model_fields:
        yield f"{prefix}{leaf}", texts[model.__name__].get(leaf, "")
        if isinstance(hints[leaf], type) and issubclass(hints[leaf], Section):
            yield from _collect_docs(hints[leaf], f"{prefix}{leaf}.", texts)
