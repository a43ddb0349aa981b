"""What a row holds once its format is read: turns, a pair of question and answer, or text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sft_play.data.bad_row import BadRow, beginning_of
from sft_play.data.sources import DataFile


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn.

    Attributes:
        role: `system`, `developer`, `user`, `assistant` or `tool`.
        content: empty where an assistant turn only calls tools.
        train: its own loss flag, None where the row gives none.
        extra: what else the template sees of the turn, None where that is nothing. Keys, each only where it is given:
            `tool_calls` (list of `{"type": "function", "function": {"name": str, "arguments": object}}`, with `id`
            where the row has one; `arguments` is text only where the row's text is no JSON object),
            `tool_call_id`, `name` and `reasoning_content` (text that is not empty).
    """

    role: str
    content: str
    train: bool | None = None
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Turns in order, and the tools that the template is told of (JSON schemas, as OpenAI writes them)."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A question and its answer: `system` and `user` for a chat template, `plain_prompt` where there is none."""

    system: str
    user: str
    plain_prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Running text, all of it learned."""

    text: str


Body = Chat | Pair | Text


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A well-formed row and where it stands."""

    file: DataFile
    line: int
    format: str
    body: Body

    @property
    def characters(self) -> int:
        """Length of its text, about."""
        body = self.body
        if isinstance(body, Chat):
            return sum(len(one.content) + (len(str(one.extra)) if one.extra else 0) for one in body.messages)
        return len(body.text) if isinstance(body, Text) else len(body.plain_prompt) + len(body.completion)

    def bad(self, field: str, reason: str) -> BadRow:
        """The row as a bad one, for faults that only show later."""
        beginning = beginning_of(first_text(self.body))
        return BadRow(shown=self.file.shown, line=self.line, field=field, reason=reason, beginning=beginning)


def first_text(body: Body) -> str:
    """The text a row begins with."""
    if isinstance(body, Chat):
        return body.messages[0].content if body.messages else ""
    return body.text if isinstance(body, Text) else body.plain_prompt


def is_blank(body: Body) -> bool:
    """Whether nothing is left to learn from: no text and no tool call at all, or no answer."""
    if isinstance(body, Chat):
        return not any(message.content.strip() or message.extra for message in body.messages)
    return not (body.text if isinstance(body, Text) else body.completion).strip()
