"""Which characters of a rendered row carry loss, and which tokens hold them.

Loss is on exactly what the model has to write at inference: what follows the generation prompt, through the token
that closes the turn. So each assistant turn is found by rendering the messages before it with the generation prompt,
and that text must be the beginning of the whole row's text. What follows must be the message's own words and a
closing token. Nothing is searched for by marker, so texts that contain markers move no mask.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Encoding

from sft_play.data.formats import Chat, Message, Pair, Row, Text
from sft_play.data.template import ChatTemplate, TemplateRefused, TextTokenizer
from sft_play.errors import DataError

_PROBE = (
    Message(role="user", content="first question"),
    Message(role="assistant", content="first answer"),
    Message(role="user", content="second question"),
    Message(role="assistant", content="second answer"),
)


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
    turns: tuple[tuple[int, int], ...] | None
    plain: bool


class Renderer:
    """Renders rows and finds their loss ranges, for one tokenizer and one setting of `data.loss_on`.

    Args:
        tokenizer: its template is probed at the first chat row.
        loss_on: `assistant`, `last`, `all` or `flags`.

    Attributes:
        probed: whether a chat row was rendered, so that the template is known to be of use.
    """

    def __init__(self, tokenizer: TextTokenizer, loss_on: str) -> None:
        self._tokenizer = tokenizer
        self._loss_on = loss_on
        self.probed = False
        markers = "|".join(map(re.escape, tokenizer.markers)) or "(?!)"
        self._closing = re.compile(rf"\s*(?:{markers})")

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
        return self._chat(_as_chat(body).messages)

    def _plain_pair(self, pair: Pair) -> Rendered:
        text = pair.plain_prompt + pair.completion
        turns = None if self._loss_on == "all" else ((len(pair.plain_prompt), len(text)),)
        return Rendered(text=text, turns=turns, plain=True)

    def _chat(self, messages: Sequence[Message]) -> Rendered:
        template = self._tokenizer.need_template()
        if not self.probed:
            self._probe(template)
        return self._mask(template, messages)

    def _mask(self, template: ChatTemplate, messages: Sequence[Message]) -> Rendered:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        text = _render(template, turns)
        if self._loss_on == "all":
            return Rendered(text=text, turns=None, plain=False)
        learned = _learned_turns(messages, self._loss_on)
        return Rendered(text=text, turns=tuple(self._range(template, turns, n, text) for n in learned), plain=False)

    def _range(self, template: ChatTemplate, turns: list[dict[str, str]], number: int, text: str) -> tuple[int, int]:
        prompt = _render(template, turns[:number], generation_prompt=True)
        start = len(prompt)
        if not text.startswith(prompt):
            reason = "its generation prompt is not how the template writes that turn (it is not prefix-stable)"
            raise RowRefused(f"messages[{number}]", f"the loss mask cannot be proved: {reason}")
        closed = text if number == len(turns) - 1 else _render(template, turns[: number + 1])
        content = self._find_content(text, start, turns[number]["content"], number)
        end = self._closing_end(text, closed, start, content, number)
        return start, end

    def _find_content(self, text: str, start: int, content: str, number: int) -> tuple[int, int]:
        """The message's words after the generation prompt: at once, after blanks, or after the template's own words."""
        if text.startswith(content, start):
            return start, start + len(content)
        words = content.strip()
        blank = start
        while blank < len(text) and text[blank].isspace():
            blank += 1
        if text.startswith(words, blank):
            return blank, blank + len(words)
        # Some templates open the last answer with words of their own, such as an empty block of thoughts.
        found = [m.start() for m in re.finditer(re.escape(words), text[start:])]
        closed = [at + start for at in found if self._closing.match(text, start + at + len(words))]
        if len(closed) != 1:
            raise RowRefused(f"messages[{number}].content", "the template does not write these words as they are")
        return closed[0], closed[0] + len(words)

    def _closing_end(self, text: str, closed: str, start: int, content: tuple[int, int], number: int) -> int:
        first, last = content
        if (match := self._closing.match(text, last)) and text[first : match.end()] in closed[start:]:
            return match.end()
        if closed.startswith(text[:last]):
            tail = closed[last:].rstrip()
            if tail and text.startswith(tail, last):
                return last + len(tail)
        raise RowRefused(f"messages[{number}]", "the template writes no end-of-turn token after the assistant's words")

    def _probe(self, template: ChatTemplate) -> None:
        """One conversation that every chat template takes, so that its faults are told once and not for every row."""
        self.probed = True
        try:
            self._mask(template, _PROBE)
        except RowRefused as refused:
            fix = "set model.chat_template to a corrected file"
            raise DataError(
                f"the chat template cannot be trained on: {refused.reason}", where=template.where, fix=fix
            ) from None


def _as_chat(body: Chat | Pair) -> Chat:
    if isinstance(body, Chat):
        return body
    system = (Message(role="system", content=body.system),) if body.system else ()
    turns = (Message(role="user", content=body.user), Message(role="assistant", content=body.completion))
    return Chat(messages=system + turns)


def _render(template: ChatTemplate, turns: list[dict[str, str]], *, generation_prompt: bool = False) -> str:
    try:
        return template.render(turns, generation_prompt=generation_prompt)
    except TemplateRefused as error:
        raise RowRefused("", f"the chat template refuses the row: {error}") from None


def _learned_turns(messages: Sequence[Message], loss_on: str) -> list[int]:
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


def token_range(encoding: Encoding, text: str, start: int, end: int) -> tuple[int, int]:
    """Tokens (first, after the last) that hold the characters from `start` to `end`.

    A token that begins before `start` belongs to the range only if it holds a character of it that is not blank.

    Raises:
        RowRefused: no token holds any of these characters.
    """
    first = _token_from(encoding, start, end)
    left, right = token_characters(encoding, first)
    if left < start and not text[start:right].strip():
        first += 1
    last = end - 1
    while (token := encoding.char_to_token(last)) is None and last > start:
        last -= 1
    if token is None:
        raise RowRefused("", "the tokenizer drops the assistant's words")
    after = token + 1
    while after < len(encoding) and start <= token_characters(encoding, after)[0] < end:
        after += 1
    return first, after


def token_characters(encoding: Encoding, token: int) -> tuple[int, int]:
    """The characters (first, after the last) that a token holds; (-1, -1) for one that stands for no text."""
    return encoding.token_to_chars(token) or (-1, -1)


def _token_from(encoding: Encoding, start: int, end: int) -> int:
    for position in range(start, end):
        token: int | None = encoding.char_to_token(position)
        if token is not None:
            return token
    raise RowRefused("", "the tokenizer drops the assistant's words")
