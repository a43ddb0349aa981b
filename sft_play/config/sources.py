"""Config files: YAML with `include:`, old names understood, everything wrong with them at once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from sft_play.config.keys import KEYS, SECTIONS, Key
from sft_play.config.nearest import nearest, spoken
from sft_play.config.old_names import OLD_NAMES, fit_old_name
from sft_play.config.origin import Layer, Origin, OriginKind, Setting
from sft_play.config.suggest import meant_keys, unknown_key
from sft_play.config.values import loosen
from sft_play.config.yaml_text import MAX_BYTES, Document, Entry, compose
from sft_play.errors import ConfigError, SftPlayError

MAX_FILES = 64
_SOURCE_NUMBERS = frozenset({"weight", "max_rows"})


@dataclass(frozen=True, kw_only=True)
class ReadFiles:
    """A config file and all that it includes: layers from the weakest to the strongest.

    `refused` are the keys that were written, or meant, and not taken: they are wrong, but not missing.
    """

    layers: tuple[Layer, ...]
    files: tuple[Path, ...]
    errors: tuple[SftPlayError, ...]
    refused: frozenset[str]


def read_files(path: Path) -> ReadFiles:
    """Reads a config file and its `include:` chain. Errors are returned, never raised."""
    reader = _Reader()
    reader.read(path, kind=OriginKind.FILE, chain=(), said_at=str(path))
    return ReadFiles(
        layers=tuple(reader.layers),
        files=tuple(reader.files),
        errors=tuple(reader.errors),
        refused=frozenset(reader.refused),
    )


@dataclass(kw_only=True)
class _Reader:
    layers: list[Layer] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    errors: list[SftPlayError] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    _opened: int = 0

    def read(self, path: Path, *, kind: OriginKind, chain: tuple[Path, ...], said_at: str) -> None:
        """Reads one file after the files that it includes. `said_at` is where its name was given."""
        if "\0" in str(path):
            self.errors.append(ConfigError("a path cannot hold a NUL byte", where=said_at.replace("\0", "?")))
            return
        identity = Path(os.path.realpath(path))
        if identity in (Path(os.path.realpath(one)) for one in chain):
            names = " -> ".join(str(one) for one in (*chain, path))
            self.errors.append(
                ConfigError(f"include goes in a circle: {names}", where=said_at, fix="remove one of them")
            )
            return
        self._opened += 1
        if self._opened > MAX_FILES:
            if self._opened == MAX_FILES + 1:
                self.errors.append(ConfigError(f"more than {MAX_FILES} files are included", where=said_at))
            return
        try:
            text = read_text(path, said_at)
            root = compose(text, lambda line: f"{path}:{line}")
        except ConfigError as error:
            self.errors.append(error)
            return
        self.files.append(path)
        self._read_root(_File(path=path, kind=kind), root, (*chain, path))

    def _read_root(self, file: _File, root: Node | None, chain: tuple[Path, ...]) -> None:
        if root is None or (isinstance(root, ScalarNode) and str(root.tag).endswith(":null")):
            what = "the file is empty" if root is None else "the file holds no section"
            self.errors.append(
                ConfigError(what, where=str(file.path), fix="it needs at least model.name and data.train")
            )
            return
        if not isinstance(root, MappingNode):
            given = "a list" if isinstance(root, SequenceNode) else "a single value"
            what = f"the file holds {given} where sections are expected"
            self.errors.append(ConfigError(what, where=file.place(1), fix="write model:, data:, train: ..."))
            return
        for entry in file.flatten(root):
            for name in file.include_names(entry):
                base = file.path.parent / name
                self.read(base, kind=OriginKind.INCLUDE, chain=chain, said_at=file.place(entry.line))
        self.errors += file.document.errors
        self.errors += file.errors
        self.refused |= file.refused
        self.layers.append(Layer(settings=file.settings, notes=tuple(file.notes)))


@dataclass(kw_only=True)
class _File:
    """One file while its mapping is turned into settings."""

    path: Path
    kind: OriginKind
    settings: dict[str, Setting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    errors: list[SftPlayError] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    document: Document = field(init=False)

    def __post_init__(self) -> None:
        self.document = Document(place=self.place)

    def place(self, line: int) -> str:
        return f"{self.path}:{line}"

    def flatten(self, root: MappingNode) -> list[Entry]:
        """Takes every key in; returns the `include` entries, which the reader follows."""
        includes = []
        for entry in self.document.entries(root):
            if entry.key == "include":
                includes.append(entry)
            else:
                self._take(entry, "")
        return includes

    def include_names(self, entry: Entry) -> list[str]:
        value = self.document.value(entry.node)
        names = [value] if isinstance(value, str) else value
        if isinstance(names, list) and names and all(isinstance(one, str) and one for one in names):
            return names
        what = "include takes a path or a list of paths, relative to this file"
        self.errors.append(ConfigError(what, where=self.place(entry.line), fix="include: base.yaml"))
        return []

    def _take(self, entry: Entry, section: str) -> None:
        name = f"{section}.{entry.key}" if section else entry.key
        if name in SECTIONS:
            self._take_section(entry, name)
        elif name in KEYS:
            self._set(KEYS[name], entry, given_as="")
        elif self._is_old_name(entry.key, section):
            key = KEYS[OLD_NAMES[entry.key]]
            self.notes.append(f"{self.place(entry.line)}: {name} is an old name of {key.name}, and was taken as that")
            self._set(key, entry, given_as=name)
        else:
            self.errors.append(unknown_key(name, self.place(entry.line)))
            self._refuse(*meant_keys(name))

    def _refuse(self, *names: str) -> None:
        """Notes keys, or all keys of a section, as written and not taken."""
        self.refused.update(key for key in KEYS for name in names if key == name or key.startswith(f"{name}."))

    @staticmethod
    def _is_old_name(name: str, section: str) -> bool:
        """Old names count at the top level and in the section that the key really has."""
        return name in OLD_NAMES and (not section or f"{OLD_NAMES[name]}.".startswith(f"{section}."))

    def _take_section(self, entry: Entry, name: str) -> None:
        node = entry.node
        if isinstance(node, MappingNode) and str(node.tag).endswith(":map"):
            for inner in self.document.entries(node):
                self._take(inner, name)
        elif not (isinstance(node, ScalarNode) and str(node.tag).endswith(":null")):
            given = "a list" if isinstance(node, SequenceNode) else "a value"
            what = f"{name} is a section: keys are expected under it, not {given}"
            example = next(key.leaf for key in KEYS.values() if key.section == name)
            fix = f"write {name}: and {example}: below"
            self.errors.append(ConfigError(what, where=self.place(entry.line), fix=fix))
            self._refuse(name)

    def _set(self, key: Key, entry: Entry, given_as: str) -> None:
        place = self.place(entry.line)
        if key.name in self.settings:
            first = self.settings[key.name]
            what = (
                f"{key.name} is given twice: {first.origin.given_as or key.name} at {first.error_place} and {entry.key}"
            )
            self.errors.append(ConfigError(what, where=place, fix="keep one of them"))
            return
        wrong_before = len(self.document.errors)
        value = self.document.value(entry.node, keep_text=key.type.keeps_text, numbers=_SOURCE_NUMBERS)
        if len(self.document.errors) > wrong_before:
            self._refuse(key.name)
            return
        misfit = fit_old_name(entry.key, value) if given_as else ""
        if misfit:
            self._refuse(key.name)
            self.errors.append(ConfigError(misfit, where=place, fix=f"use {key.name}"))
            return
        self.settings[key.name] = Setting(
            key=key.name,
            origin=Origin(kind=self.kind, where=place, value=loosen(key, value), given_as=given_as),
            error_place=place,
            inner_places=self.document.inner_places(entry.node),
        )


def read_text(path: Path, said_at: str) -> str:
    """The text of a config file.

    Raises:
        ConfigError: missing, a folder, unreadable, too large or not UTF-8.
    """
    where = said_at if said_at != str(path) else ""
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder", where=where, fix="name a YAML file in it")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a regular file", where=where, fix="name a YAML file")
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", where=where, fix=_beside(path)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"{path} cannot be read: {reason}", where=where, fix="check the path and its rights"
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{path} is larger than {MAX_BYTES >> 20} MiB", where=where, fix="a config is a short YAML file"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError("not UTF-8 text", where=f"{path}:{line}", fix="save the file as UTF-8") from None


def _beside(path: Path) -> str:
    """What the folder holds instead, nearest name first."""
    try:
        names = sorted(one.name for one in path.parent.iterdir() if one.suffix in (".yaml", ".yml"))
    except OSError:
        return f"there is no folder {path.parent}"
    near = nearest(path.name, names)
    if near:
        return spoken(str(path.parent / one) for one in near)
    return f"{path.parent} has {', '.join(names[:8])}" if names else "CONFIG=path names a YAML file"
