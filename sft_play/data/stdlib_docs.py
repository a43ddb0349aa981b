"""The demo's data: questions about the Python standard library, answered by its own documentation.

Made from the running interpreter, so nothing is downloaded and nothing is shipped. Whole modules are held
out for validation and test, and no answer occurs twice, so nothing leaks between the sets.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import io
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Importing these opens a browser, prints a poem, or starts an application.
NOT_IMPORTED = {"antigravity", "this", "idlelib", "turtledemo", "lib2to3", "test", "pip", "ensurepip", "tkinter"}
# Where a module is better known under another name.
BETTER_NAMES = {"posixpath": "os.path"}
ANSWER_CHARACTERS = range(30, 401)
PHRASINGS = (
    "What does `{name}` do?",
    "Explain `{name}` in Python.",
    "What is `{name}` for?",
    "I came across `{name}` in some Python code. What is it?",
)
VALIDATION_MODULES = {"csv", "fractions", "queue", "shelve", "statistics", "string", "textwrap", "threading", "zipfile"}
TEST_MODULES = {"argparse", "calendar", "difflib", "random", "sched", "secrets", "shutil", "tempfile", "warnings"}


@dataclass(frozen=True, kw_only=True)
class Documented:
    """A public name and the first paragraph of its documentation."""

    module: str
    name: str
    answer: str


def write_demo_data(folder: Path) -> dict[str, int]:
    """Write train, validation and test.jsonl (messages format); returns the rows of each."""
    rows: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for entry in documented_names():
        chat = [
            {"role": "user", "content": question(entry.name)},
            {"role": "assistant", "content": entry.answer},
        ]
        rows[split_of(entry.module)].append(json.dumps({"messages": chat}, ensure_ascii=False))
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in rows.items():
        staging = folder / f".{split}.new"
        staging.write_text("\n".join(sorted(lines, key=_digest)) + "\n", encoding="utf-8")
        staging.replace(folder / f"{split}.jsonl")
    return {split: len(lines) for split, lines in rows.items()}


def question(name: str) -> str:
    """One of the phrasings, the same one for the same name every time."""
    return PHRASINGS[int(_digest(name), 16) % len(PHRASINGS)].format(name=name)


def split_of(module: str) -> str:
    """The set that a whole top-level module belongs to."""
    return "validation" if module in VALIDATION_MODULES else "test" if module in TEST_MODULES else "train"


def documented_names() -> Iterator[Documented]:
    """Public functions, classes and methods with a first paragraph of useful length, in a stable order."""
    seen: set[str] = set()
    for module_name in sorted(sys.stdlib_module_names - NOT_IMPORTED):
        if module_name.startswith("_"):
            continue
        for name, answer in _walk(module_name):
            if len(answer) in ANSWER_CHARACTERS and answer not in seen:
                seen.add(answer)
                yield Documented(module=module_name, name=name, answer=answer)


def _walk(module_name: str) -> Iterator[tuple[str, str]]:
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            module = importlib.import_module(module_name)
    except Exception:  # a module of another platform, or one built without its library
        return
    shown = BETTER_NAMES.get(module_name, module_name)
    for name in sorted(getattr(module, "__all__", None) or dir(module)):
        thing = getattr(module, name, None)
        home = getattr(thing, "__module__", None) or ""
        if name.startswith("_") or home.split(".")[0].lstrip("_") != module_name.lstrip("_"):
            continue
        yield f"{shown}.{name}", first_paragraph(thing)
        if inspect.isclass(thing):
            for method_name, method in sorted(vars(thing).items()):
                if not method_name.startswith("_") and callable(method):
                    yield f"{shown}.{name}.{method_name}", first_paragraph(method)


def first_paragraph(thing: object) -> str:
    """The documentation up to its first empty line, on one line; empty where there is none of its own."""
    try:
        text = inspect.getdoc(thing) or ""
    except Exception:  # a docstring computed by a property that fails
        return ""
    return " ".join(text.strip().partition("\n\n")[0].split())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
