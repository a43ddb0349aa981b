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

from sft_play.data.chat_row import ChatRow, RowRefused
from sft_play.data.formats import Chat, Message, Pair, Row, Text
from sft_play.data.sandbox import ChatTemplate
from sft_play.data.skeleton import Skeleton, Span, build_skeleton, kind_of_row, with_signs
from sft_play.data.template import TextTokenizer
from sft_play.errors import DataError

__all__ = ["PROBE", "Rendered", "Renderer", "RowRefused", "as_chat", "as_turns", "learned_turns"]

PROBE = Chat(
    messages=(
        Message(role="user", content="first question"),
        Message(role="assistant", content="first answer"),
        Message(role="user", content="second question"),
        Message(role="assistant", content="second answer"),
    )
)
_KINDS_KEPT = 1000


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
        task: `data.task`; `cpt` takes texts only.

    Attributes:
        probed: whether a chat row was rendered, so that the template is known to be of use.
        dropped_fields: fields that rows have and the template does not write, by how many messages (or rows, for
            `tools`) have them: reasoning of earlier turns, for one.
    """

    def __init__(self, tokenizer: TextTokenizer, loss_on: str, task: str = "sft") -> None:
        self._tokenizer, self._task = tokenizer, task
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
        if self._task == "cpt":
            raise RowRefused("", f"a {row.format} row, and data.task cpt learns texts; cpt_mixed takes both")
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
        turns = None if self._loss_on == "all" else ((len(pair.plain_prompt), len(text)),)
        return Rendered(text=text, turns=turns, plain=True)

    def _mask(self, template: ChatTemplate, chat: Chat) -> tuple[Rendered, dict[str, int]]:
        turns = template.turns(as_turns(chat.messages))
        row = ChatRow(template, self._tokenizer, turns, chat.tools)
        learned = learned_turns(chat.messages, self._loss_on)
        kind = kind_of_row(turns, chat.tools)
        skeleton, row.signed = self._skeleton(row, kind)
        if skeleton is not None:
            row.skeleton, row.spans = skeleton, skeleton.locate(row.text, row.words)
        dropped = row.check_words(plain=kind is not None)
        ranges = None if self._loss_on == "all" else tuple(row.range_of(number) for number in learned)
        return Rendered(text=row.text, turns=ranges, plain=False), dropped

    def _skeleton(self, row: ChatRow, kind: tuple[object, ...] | None) -> tuple[Skeleton | None, list[dict[str, Any]]]:
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


def as_chat(body: Chat | Pair) -> Chat:
    """A question and its answer as a conversation; the answer is what the row is for, so it counts as flagged."""
    if isinstance(body, Chat):
        return body
    system = (Message(role="system", content=body.system),) if body.system else ()
    turns = (Message(role="user", content=body.user), Message(role="assistant", content=body.completion, train=True))
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
