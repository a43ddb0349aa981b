"""One conversation in a chat template: its text, and the characters of each turn that are learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sft_play.data.sandbox import ChatTemplate, TemplateRefused, Tools, Turn
from sft_play.data.skeleton import (
    Skeleton,
    Span,
    Word,
    build_skeleton,
    end_of_turn,
    missing_values,
    with_signs,
    words_of,
)
from sft_play.data.template import TextTokenizer
from sft_play.errors import DataError

_COMPARED_FIELDS = ("tool_call_id", "name")


class RowRefused(Exception):
    """A row that cannot be rendered or masked: the field and the reason."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field, self.reason = field, reason


class ChatRow:
    """One conversation in a template: its text, and where in it each turn stands."""

    def __init__(
        self, template: ChatTemplate, tokenizer: TextTokenizer, turns: list[dict[str, Any]], tools: Tools | None
    ) -> None:
        self.template, self.turns, self.tools = template, turns, list(tools) if tools else None
        self.text = self._render(turns)
        self.words = words_of(turns)
        self.skeleton: Skeleton | None = None
        self.spans: list[Span] | None = None
        self.signed: list[dict[str, Any]] = []
        self._marker = tokenizer.marker

    def check_words(self, *, plain: bool) -> dict[str, int]:
        """What the template leaves out of the row's fields.

        Args:
            plain: the row has only roles and contents.

        Raises:
            RowRefused: it leaves out a whole turn, or a call of a tool.
        """
        dropped: dict[str, int] = {}
        if self.skeleton is None:
            return dropped
        if len(self.skeleton.order) != len(self.words):
            written = set(self.skeleton.order)
            for number, word in enumerate(self.words):
                if number not in written and word.text.strip():
                    name = _left_out(word, self.turns[word.message]["role"])
                    dropped[name] = dropped.get(name, 0) + 1
        if plain:
            return dropped
        if self.tools and self._same_without("tools"):
            dropped["tools"] = 1
        for name in _COMPARED_FIELDS:
            count = sum(bool(turn.get(name)) for turn in self.turns)
            if count and self._same_without(name):
                dropped[name] = count
        return dropped

    def range_of(self, number: int) -> Span:
        """The characters of a turn that are learned.

        Raises:
            RowRefused: they cannot be proved.
        """
        skeleton, spans, signed = self.skeleton, self.spans, self.signed
        if skeleton is None or spans is None:
            skeleton, spans, signed = self._alone(number)
        end = end_of_turn(self.template, skeleton, signed, self.words, number, self._marker, self.tools)
        if end is None:
            raise RowRefused(
                f"messages[{number}]", "the template writes no end-of-turn token after the assistant's words"
            )
        first, after = spans[end.first][0], spans[end.last][1] + len(end.tail)
        start = self._start(number, first)
        if len(self.turns[number]) > 2 and (missing := missing_values(self.turns[number], self.text[start:after])):
            reason = f"the chat template does not write {missing[0][:60]!r} as it is"
            raise RowRefused(f"messages[{number}].tool_calls", reason)
        return start, after

    def _alone(self, number: int) -> tuple[Skeleton, list[Span], list[dict[str, Any]]]:
        """The skeleton with signs in this turn only: for templates that change the words of other turns."""
        signed = with_signs(self.turns, only=number)
        skeleton = build_skeleton(self.template, signed, self.tools)
        spans = None if skeleton is None else skeleton.locate(self.text, self.words)
        if skeleton is None or spans is None or not spans:
            raise RowRefused(f"messages[{number}].content", "the template does not write these words as they are")
        return skeleton, spans, signed

    def _start(self, number: int, first: int) -> int:
        """Where inference begins to write the turn: behind the generation prompt."""
        try:
            prompt = self._render(self.turns[:number], generation_prompt=True)
        except (RowRefused, DataError):
            return self._behind_opening(number, first)
        if len(prompt) <= first and self.text.startswith(prompt):
            return len(prompt)
        if number == 0:
            return self._behind_opening(number, first)
        return self._behind_mark(number, first)

    def _behind_opening(self, number: int, first: int) -> int:
        """For a turn that no prompt leads to, as a greeting is: behind the words that open an answer anywhere else."""
        user = [{"role": "user", "content": "question"}]
        try:
            before, prompt = self._render(user), self._render(user, generation_prompt=True)
        except (RowRefused, DataError):
            before = prompt = ""
        opening = prompt[len(before) :] if prompt.startswith(before) else ""
        if opening and self.text[:first].endswith(opening):
            return first
        return self._behind_mark(number, first)

    def _behind_mark(self, number: int, first: int) -> int:
        """Where the template's own {% generation %} mark begins, if it has one around these words."""
        try:
            text, marks = self.template.marked(self.turns, tools=self.tools)
        except (TemplateRefused, DataError):
            text, marks = "", []
        for start, end in marks:
            if text == self.text and start <= first < end:
                return start
        reason = "its generation prompt is not how the template writes that turn (it is not prefix-stable)"
        raise RowRefused(f"messages[{number}]", f"the loss mask cannot be proved: {reason}")

    def _same_without(self, name: str) -> bool:
        """Whether the text is the same without a field."""
        turns = [{key: value for key, value in turn.items() if key != name} for turn in self.turns]
        try:
            return self.template.render(turns, tools=None if name == "tools" else self.tools) == self.text
        except (TemplateRefused, DataError):
            return False

    def _render(self, turns: Sequence[Turn], *, generation_prompt: bool = False) -> str:
        try:
            return self.template.render(turns, tools=self.tools, generation_prompt=generation_prompt)
        except TemplateRefused as error:
            raise RowRefused("", f"the chat template refuses the row: {error}") from None


def _left_out(word: Word, role: str) -> str:
    """The name of a field that may be left out, as reasoning of earlier turns is."""
    if word.kind == "reasoning_content":
        return word.kind
    if word.kind == "tool_calls":
        raise RowRefused(f"messages[{word.message}].tool_calls", "the chat template does not write calls of tools")
    raise RowRefused(f"messages[{word.message}].content", f"the chat template does not write this {role} turn")
