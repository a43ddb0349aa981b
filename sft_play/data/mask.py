"""Which characters of a rendered row carry loss.

Loss is on exactly what the model has to write at inference: what follows the generation prompt, through the token
that closes the turn. So each assistant turn begins where the rendering of the messages before it, with the generation
prompt, ends; that text must be the beginning of the whole row's text. The message's words must stand behind it, and a
closing token behind them: where, the template's skeleton says (data/skeleton.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.data.formats import Chat, Message, Pair, Row, Text
from sft_play.data.sandbox import ChatTemplate, TemplateRefused, Tools, Turn
from sft_play.data.skeleton import (
    Skeleton,
    Span,
    Word,
    build_skeleton,
    end_of_turn,
    kind_of_row,
    missing_values,
    with_signs,
    words_of,
)
from sft_play.data.template import TextTokenizer
from sft_play.errors import DataError

PROBE = Chat(
    messages=(
        Message(role="user", content="first question"),
        Message(role="assistant", content="first answer"),
        Message(role="user", content="second question"),
        Message(role="assistant", content="second answer"),
    )
)
_KINDS_KEPT = 1000
_COMPARED_FIELDS = ("tool_call_id", "name")


class RowRefused(Exception):
    """A row that cannot be rendered or masked: the field and the reason."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field, self.reason = field, reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A row as text.

    Attributes:
        turns: character ranges that carry loss, each with its closing token; None: everything does.
        plain: no template wrote the text, so BOS comes from the tokenizer and EOS is put at the end.
    """

    text: str
    turns: tuple[Span, ...] | None
    plain: bool


class Renderer:
    """Renders rows and finds their loss ranges, for one tokenizer and one setting of `data.loss_on`.

    Args:
        tokenizer: its template is probed at the first chat row.
        loss_on: `assistant`, `last`, `all` or `flags`.

    Attributes:
        probed: whether a chat row was rendered, so that the template is known to be of use.
        dropped_fields: fields that rows have and the template does not write, by how many messages (or rows, for
            `tools`) have them: reasoning of earlier turns, for one.
    """

    def __init__(self, tokenizer: TextTokenizer, loss_on: str) -> None:
        self._tokenizer = tokenizer
        self._loss_on = loss_on
        self._skeletons: dict[tuple[object, ...], tuple[Skeleton | None, list[dict[str, Any]]]] = {}
        self.probed = False
        self.dropped_fields: Counter[str] = Counter()

    def render(self, row: Row) -> Rendered:
        """The row's text and its loss ranges; no range where no turn is learned.

        Raises:
            RowRefused: this row does not go into the template, or its ranges cannot be proved.
            DataError: there is no template, or it is no use for any row.
        """
        body = row.body
        if isinstance(body, Text):
            return Rendered(text=body.text, turns=None, plain=True)
        if isinstance(body, Pair) and self._tokenizer.template is None:
            return self._plain_pair(body)
        return self.render_chat(as_chat(body))

    def render_chat(self, chat: Chat) -> Rendered:
        """A conversation's text and its loss ranges.

        Raises:
            RowRefused, DataError: as `render` does.
        """
        template = self._tokenizer.need_template()
        if not self.probed:
            self._probe(template)
        rendered, dropped = self._mask(template, chat)
        if dropped:
            self.dropped_fields.update(dropped)
        return rendered

    def _plain_pair(self, pair: Pair) -> Rendered:
        text = pair.plain_prompt + pair.completion
        turns: tuple[Span, ...] | None = ((len(pair.plain_prompt), len(text)),)
        if self._loss_on in ("all", "flags"):
            turns = None if self._loss_on == "all" else ()
        return Rendered(text=text, turns=turns, plain=True)

    def _mask(self, template: ChatTemplate, chat: Chat) -> tuple[Rendered, dict[str, int]]:
        turns = template.turns(as_turns(chat.messages))
        row = _ChatRow(template, self._tokenizer, turns, chat.tools)
        learned = learned_turns(chat.messages, self._loss_on)
        kind = kind_of_row(turns, chat.tools)
        skeleton, row.signed = self._skeleton(row, kind)
        if skeleton is not None:
            row.skeleton, row.spans = skeleton, skeleton.locate(row.text, row.words)
        dropped = row.check_words(plain=kind is not None)
        ranges = None if self._loss_on == "all" else tuple(row.range_of(number) for number in learned)
        return Rendered(text=row.text, turns=ranges, plain=False), dropped

    def _skeleton(self, row: _ChatRow, kind: tuple[object, ...] | None) -> tuple[Skeleton | None, list[dict[str, Any]]]:
        if kind is not None and kind in self._skeletons:
            return self._skeletons[kind]
        signed = with_signs(row.turns)
        made = build_skeleton(row.template, signed, row.tools), signed
        if kind is not None:
            if len(self._skeletons) >= _KINDS_KEPT:
                self._skeletons.clear()
            self._skeletons[kind] = made
        return made

    def _probe(self, template: ChatTemplate) -> None:
        """One conversation that every chat template takes, so that its faults are told once and not for every row."""
        self.probed = True
        probe = Renderer(self._tokenizer, "assistant" if self._loss_on == "flags" else self._loss_on)
        try:
            probe._mask(template, PROBE)
        except RowRefused as refused:
            fix = "set model.chat_template to a corrected file"
            raise DataError(
                f"the chat template cannot be trained on: {refused.reason}", where=template.where, fix=fix
            ) from None


class _ChatRow:
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


def as_chat(body: Chat | Pair) -> Chat:
    """A question and its answer as a conversation."""
    if isinstance(body, Chat):
        return body
    system = (Message(role="system", content=body.system),) if body.system else ()
    turns = (Message(role="user", content=body.user), Message(role="assistant", content=body.completion))
    return Chat(messages=system + turns)


def as_turns(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """Messages as templates know them: role, content and what else they have."""
    turns: list[Mapping[str, Any]] = []
    for one in messages:
        turn = {"role": one.role, "content": one.content}
        turns.append(turn if one.extra is None else {**turn, **one.extra})
    return turns


def learned_turns(messages: Sequence[Message], loss_on: str) -> list[int]:
    """Numbers of the messages that carry loss.

    Raises:
        RowRefused: a flagged message is not the assistant's.
    """
    if loss_on == "flags":
        return _flagged_turns(messages)
    answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
    return answers[-1:] if loss_on == "last" else answers


def _flagged_turns(messages: Sequence[Message]) -> list[int]:
    flagged = [number for number, message in enumerate(messages) if message.train]
    for number in flagged:
        if messages[number].role != "assistant":
            raise RowRefused(f"messages[{number}].train", f"a {messages[number].role} turn cannot be learned")
    return flagged
