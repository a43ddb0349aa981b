"""JSON as people write it, with comments and trailing commas, and the line of each key."""

from __future__ import annotations

import re
from typing import Any

_COMMENT_OR_STRING = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)


def parse_json(text: str) -> Any:
    """The value of a JSON5 text.

    Raises:
        ValueError: not JSON5, or a key given twice; the message names line and column, or the key.
    """
    import json5  # only commands that read such a file pay for it

    return json5.loads(text, object_pairs_hook=_no_key_twice)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = value
    return found


def line_of(text: str, *path: str) -> int:
    """The line of a key, found by walking down the names of its path; that of its nearest parent where it is not there.

    Comments are blanked first, strings kept: a name in a comment is no key.
    """
    clear = _COMMENT_OR_STRING.sub(_blank_comment, text)
    at, line = 0, 1
    for name in path:
        found = re.compile(rf"(?<![\w$])[\"']?{re.escape(name)}[\"']?\s*:").search(clear, at)
        if found is None:
            break
        at, line = found.end(), clear.count("\n", 0, found.start()) + 1
    return line


def _blank_comment(match: re.Match[str]) -> str:
    text = match[0]
    return re.sub(r"[^\n]", " ", text) if text.startswith("/") else text
