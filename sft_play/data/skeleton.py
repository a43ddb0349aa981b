"""Where a template puts the words of each message: found by rendering signs in their place, never by searching.

The messages are rendered a second time with a sign that no text contains in place of each piece of text. What stands
between the signs is the template's own. A row's text is then exactly the template's pieces with the row's words
between them, which is checked to the last character, so words that look like markers move nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sft_play.data.sandbox import ChatTemplate, TemplateRefused, Tools, Turn
from sft_play.errors import DataError

_SIGN = re.compile("\ue000(\\d+)\ue001")
_THOUGHT = re.compile(r"(\s*<think>|)(.*)(</think>)(.*)", re.DOTALL)
Span = tuple[int, int]


class Word(NamedTuple):
    """A piece of a message's text that the template is expected to write.

    Attributes:
        message: the message's number.
        kind: `content`, `reasoning_content` or `tool_calls` (the name of one call).
    """

    message: int
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Where a turn stands among the signs: its first and its last, and the text from there to its closing token."""

    first: int
    last: int
    tail: str


@dataclass(kw_only=True, slots=True)
class Skeleton:
    """A text of the template, cut at its signs.

    Attributes:
        pieces: the template's own text before, between and after the signs.
        order: the word behind each sign, as its number; one more piece than signs.
        ends: what is known of the ends of turns, by the message's number.
    """

    pieces: list[str]
    order: list[int]
    ends: dict[int, End | None] = field(default_factory=dict)

    def locate(self, text: str, words: Sequence[Word]) -> list[Span] | None:
        """The characters of each sign's word in a row's text; None where the text is not put together like that."""
        if not text.startswith(self.pieces[0]):
            return None
        at, spans = len(self.pieces[0]), []
        for number, piece in zip(self.order, self.pieces[1:], strict=True):
            written = words[number].text
            after = at + len(written)
            if not (text.startswith(written, at) and text.startswith(piece, after)):
                for written in _other_ways_to_write(words[number].text):
                    after = at + len(written)
                    if text.startswith(written, at) and text.startswith(piece, after):
                        break
                else:
                    return None
            spans.append((at, after))
            at = after + len(piece)
        return spans if at == len(text) else None

    def after(self, place: int) -> str:
        """Everything behind the sign at this place, with signs."""
        behind = [self.pieces[place + 1]]
        for number, piece in zip(self.order[place + 1 :], self.pieces[place + 2 :], strict=True):
            behind += [_sign(number), piece]
        return "".join(behind)

    def places(self, words: Sequence[Word], message: int) -> list[int]:
        """Places of the signs of one message."""
        return [place for place, number in enumerate(self.order) if words[number].message == message]


def words_of(turns: Sequence[Turn]) -> list[Word]:
    """The words of all messages, in the order of their signs."""
    words = []
    for message, turn in enumerate(turns):
        content = turn["content"]
        if len(turn) == 2 and "</think>" not in content:
            words.append(Word(message, "content", content))
            continue
        if reasoning := turn.get("reasoning_content"):
            words.append(Word(message, "reasoning_content", str(reasoning)))
        if (thought := _thought(turn)) is not None:
            words.append(Word(message, "reasoning_content", thought[2]))
            content = thought[4]
        if content or not turn.get("tool_calls"):
            words.append(Word(message, "content", content))
        for call in turn.get("tool_calls") or ():
            words.append(Word(message, "tool_calls", str(_function(call).get("name", ""))))
    return words


def with_signs(turns: Sequence[Turn], only: int | None = None) -> list[dict[str, Any]]:
    """The messages with signs in place of their words; of one message alone where `only` is given."""
    signed, number = [], 0
    for message, turn in enumerate(turns):
        new = dict(turn)
        if turn.get("reasoning_content"):
            new["reasoning_content"] = _sign(number)
            number += 1
        if (thought := _thought(turn)) is not None:
            new["content"] = thought[1] + _sign(number) + thought[3] + _sign(number + 1)
            number += 2
        elif turn["content"] or not turn.get("tool_calls"):
            new["content"] = _sign(number)
            number += 1
        if turn.get("tool_calls"):
            count = len(turn["tool_calls"])
            new["tool_calls"] = [_renamed(call, _sign(number + n)) for n, call in enumerate(turn["tool_calls"])]
            number += count
        signed.append(new if only in (None, message) else dict(turn))
    return signed


def kind_of_row(turns: Sequence[Turn], tools: Tools | None) -> tuple[object, ...] | None:
    """Rows of one kind have the same skeleton; None where the row has parts that stand in the skeleton itself."""
    if tools:
        return None
    kind = []
    for turn in turns:
        if len(turn) > 2:
            return None
        kind.append(turn["role"])
        if "</think>" in turn["content"]:
            kind.append(_thought(turn) is not None)
    return tuple(kind)


def build_skeleton(template: ChatTemplate, signed: Sequence[Turn], tools: Tools | None) -> Skeleton | None:
    """The skeleton of messages with signs; None where the template refuses them or fails."""
    try:
        parts = _SIGN.split(template.render(signed, tools=tools))
    except (TemplateRefused, DataError):
        return None
    return Skeleton(pieces=parts[::2], order=[int(number) for number in parts[1::2]])


def end_of_turn(
    template: ChatTemplate,
    skeleton: Skeleton,
    signed: Sequence[Turn],
    words: Sequence[Word],
    message: int,
    marker: re.Pattern[str],
    tools: Tools | None,
) -> End | None:
    """A turn's first and last sign, and the template's text from there through the token that closes the turn.

    That text is what the template writes behind the turn whether the conversation ends there or goes on, less the
    blanks at the end. None where it writes nothing, so that no end could be learned.
    """
    if message not in skeleton.ends:
        skeleton.ends[message] = _end_of_turn(template, skeleton, signed, words, message, marker, tools)
    return skeleton.ends[message]


def _end_of_turn(
    template: ChatTemplate,
    skeleton: Skeleton,
    signed: Sequence[Turn],
    words: Sequence[Word],
    message: int,
    marker: re.Pattern[str],
    tools: Tools | None,
) -> End | None:
    stops = build_skeleton(template, signed[: message + 1], tools)
    if stops is None or not (own := stops.places(words, message)):
        return None
    last = stops.order[own[-1]]
    nth = stops.order[: own[-1] + 1].count(last)
    tail = stops.after(own[-1])
    places = [place for place, number in enumerate(skeleton.order) if number == last]
    if len(places) < nth:
        return None
    first = skeleton.places(words, message)[0]
    if message < len(signed) - 1:
        other: str | None = skeleton.after(places[nth - 1])
    else:
        other = next(_continued(template, signed, last, nth, tools), None)
    if other is not None:
        common = _common(tail, other, marker).rstrip()
        return End(first=first, last=places[nth - 1], tail=common) if common else None
    ends = [match.end() for match in marker.finditer(tail)]
    closed = bool(ends) and ends[-1] == len(tail.rstrip())
    return End(first=first, last=places[nth - 1], tail=tail.rstrip()) if closed else None


def _continued(
    template: ChatTemplate, signed: Sequence[Turn], last: int, nth: int, tools: Tools | None
) -> Iterator[str]:
    """What follows a last turn's last sign where the conversation goes on: with a user, or with a tool's result."""
    for turn in ({"role": "user", "content": "more"}, {"role": "tool", "content": "more"}):
        skeleton = build_skeleton(template, [*signed, turn], tools)
        if skeleton is not None:
            places = [place for place, number in enumerate(skeleton.order) if number == last]
            if len(places) >= nth:
                yield skeleton.after(places[nth - 1])


def _common(one: str, other: str, marker: re.Pattern[str]) -> str:
    """The beginning that two texts share; a marker is in it whole or not at all."""
    length = 0
    while length < min(len(one), len(other)):
        left, right = marker.match(one, length), marker.match(other, length)
        if (left and left.group()) != (right and right.group()) or one[length] != other[length]:
            break
        length += len(left.group()) if left else 1
    return one[:length]


def missing_values(turn: Turn, text: str) -> list[str]:
    """Names and argument values of a turn's tool calls that do not stand in a text, as they are or as JSON."""
    wanted: list[object] = []
    for call in turn.get("tool_calls") or ():
        function = _function(call)
        wanted += [function.get("name", ""), *_leaves(function.get("arguments"))]
    return [str(value) for value in wanted if not any(way in text for way in _ways_to_show(value))]


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield value


def _ways_to_show(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return value.strip(), json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1]
    return json.dumps(value, default=str), str(value)


def _other_ways_to_write(text: str) -> Iterator[str]:
    """Without blanks at the ends, or as a JSON string."""
    if text[:1].isspace() or text[-1:].isspace():
        yield from (text.strip(), text.lstrip(), text.rstrip(), text.strip("\n"), text.lstrip("\n"), text.rstrip("\n"))
    for plain in (False, True):
        escaped = json.dumps(text, ensure_ascii=plain)[1:-1]
        if escaped != text:
            yield escaped


def _thought(turn: Turn) -> re.Match[str] | None:
    """Thoughts that an answer's content holds between tags; some templates take them out."""
    content = turn["content"]
    if turn["role"] != "assistant" or "</think>" not in content:
        return None
    return _THOUGHT.fullmatch(content)


def _sign(number: int) -> str:
    return f"\ue000{number}\ue001"


def _function(call: Any) -> Mapping[str, Any]:
    if not isinstance(call, Mapping):
        return {}
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _renamed(call: Any, name: str) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": {**call["function"], "name": name}}
    return {**call, "name": name}
