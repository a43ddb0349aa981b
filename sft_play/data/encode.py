"""From rendered rows to token ids and labels, a chunk of rows at a time, and to the prompt of inference.

The tokens before a learned turn are those that inference feeds: where a tokenizer would join the end of the prompt
with the beginning of the answer, or split it otherwise, prompt and answer are encoded apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Encoding

from sft_play.data.formats import Chat, Message
from sft_play.data.mask import PROBE, Rendered, Renderer, RowRefused
from sft_play.data.sandbox import TemplateRefused, Tools
from sft_play.data.template import TextTokenizer
from sft_play.data.tokens import token_characters, token_range
from sft_play.errors import DataError

MASKED = -100
"""Label of a token that carries no loss."""
_KEPT_TAIL = 200
_TAILS_KEPT = 2000
_CALL = Message(
    role="assistant",
    content="",
    extra={"tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"word": "answer"}}}]},
)
_DROPS_WORDS = "the tokenizer drops the assistant's words"


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """One row: `labels[i]` is `input_ids[i]` or `MASKED`; `closings` are the positions of the closing tokens."""

    input_ids: list[int]
    labels: list[int]
    closings: tuple[int, ...]

    def cut(self, limit: int) -> Encoded:
        """The first `limit` tokens; a closing token beyond them stays listed, so that its loss is seen."""
        return Encoded(input_ids=self.input_ids[:limit], labels=self.labels[:limit], closings=self.closings)

    @property
    def loss_tokens(self) -> int:
        """Tokens that are predicted and learned; the first token is never predicted."""
        return len(self.labels) - 1 - self.labels[1:].count(MASKED) if self.labels else 0

    @property
    def closes(self) -> bool:
        """Whether every closing token carries loss."""
        return all(at < len(self.labels) and self.labels[at] != MASKED for at in self.closings)


@dataclass(kw_only=True, slots=True)
class _Draft:
    """Tokens of one row: its learned ranges (first, after the last) and the words that each has to decode to."""

    ids: list[int]
    ranges: list[tuple[int, int]]
    words: list[str]


def encode_rows(tokenizer: TextTokenizer, rows: Sequence[Rendered]) -> list[Encoded | RowRefused]:
    """Token ids and labels of many rows at once, in their order.

    Raises:
        DataError: plain rows, and the tokenizer names no end-of-sequence token.
    """
    encodings: dict[int, Encoding] = {}
    for plain in (False, True):
        numbers = [number for number, row in enumerate(rows) if row.plain is plain]
        if numbers:
            # A template writes BOS itself; plain text gets it from the tokenizer's own processor.
            batch = tokenizer.tokenizer.encode_batch([rows[n].text for n in numbers], add_special_tokens=plain)
            encodings |= zip(numbers, batch, strict=True)
    tails: dict[str, list[int]] = {}
    drafts = [_draft(tokenizer, row, encodings[number], tails) for number, row in enumerate(rows)]
    unproved = _unproved(tokenizer, drafts)
    return [
        draft if isinstance(draft, RowRefused) else unproved.get(number) or _encoded(tokenizer, rows[number], draft)
        for number, draft in enumerate(drafts)
    ]


def encode_prompt(
    tokenizer: TextTokenizer, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None
) -> list[int]:
    """The tokens that inference feeds: the messages with the generation prompt, as training saw them.

    Without a template the last message's content is the prompt as it stands.

    Args:
        messages: role, content, and what else a template reads, such as `tool_calls`.
        tools: JSON schemas of the functions that can be called.

    Raises:
        DataError: the template refuses the messages, or there are several and no template.
    """
    if tokenizer.template is None:
        if len(messages) != 1:
            tokenizer.need_template()
        return _plain_prompt(tokenizer, messages[0]["content"])
    turns = tokenizer.template.turns(messages)
    try:
        text = tokenizer.template.render(turns, tools=tools, generation_prompt=True)
    except TemplateRefused as error:
        raise DataError(f"the chat template refuses the messages: {error}", where=tokenizer.template.where) from None
    return list(tokenizer.tokenizer.encode(text, add_special_tokens=False).ids)


def closing_ids(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The tokens that close an answer as training learns it, so that inference can stop there.

    Of a template they are the closing token of an answer and that of a call of a tool, where they are tokens of their
    own; without a template, the end of sequence. None for a template that cannot be trained on.
    """
    if tokenizer.template is None:
        return () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    found: set[int | None] = set()
    for messages in (PROBE.messages, (PROBE.messages[0], _CALL)):
        renderer = Renderer(tokenizer, "last")
        try:
            (encoded,) = encode_rows(tokenizer, [renderer.render_chat(Chat(messages=messages))])
        except (RowRefused, DataError):
            continue
        if isinstance(encoded, Encoded):
            found.update(encoded.input_ids[at] for at in encoded.closings)
    stops = tokenizer.marker_ids | {tokenizer.eos_id}
    return tuple(sorted(one for one in found if one is not None and one in stops))


def plain_layout(tokenizer: TextTokenizer) -> str:
    """How rows of alpaca and prompt_completion are laid out with this tokenizer, in words."""
    if tokenizer.template is not None:
        return "question and answer become a user and an assistant turn of the chat template"
    return "no chat template: prompt and completion as they stand, alpaca under ### headings, each closed with EOS"


def _draft(
    tokenizer: TextTokenizer, row: Rendered, encoding: Encoding, tails: dict[str, list[int]]
) -> _Draft | RowRefused:
    ids, ranges, words = list(encoding.ids), [], []
    for start, end in row.turns or ():
        found = token_range(encoding, row.text, start, end)
        if found is None:
            return RowRefused("", _DROPS_WORDS)
        if not _as_prompted(tokenizer, row, encoding, ids, (start, found[0]), tails):
            return _draft_apart(tokenizer, row)
        ranges.append(found)
        words.append(row.text[min(start, token_characters(encoding, found[0])[0]) : end])
    return _Draft(ids=ids, ranges=ranges, words=words)


def _as_prompted(
    tokenizer: TextTokenizer,
    row: Rendered,
    encoding: Encoding,
    ids: list[int],
    turn: tuple[int, int],
    tails: dict[str, list[int]],
) -> bool:
    """Whether the tokens before a turn are those of the text before it alone.

    Text is split at added tokens before anything else, so only what follows the last of them has to be looked at.
    """
    start, first = turn
    if row.plain:
        return _plain_prompt(tokenizer, row.text[:start]) == _with_start(tokenizer, ids[:first])
    added, last = tokenizer.marker_ids, first - 1
    while last > 0 and ids[last] not in added:
        last -= 1
    if last < 0 or (last == first - 1 and ids[last] in added):
        return True
    tail = row.text[token_characters(encoding, last)[0] : start]
    alone = tails.get(tail)
    if alone is None:
        alone = tokenizer.tokenizer.encode(tail, add_special_tokens=False).ids
        if len(tail) <= _KEPT_TAIL and len(tails) < _TAILS_KEPT:
            tails[tail] = alone
    return alone == ids[last:first]


def _draft_apart(tokenizer: TextTokenizer, row: Rendered) -> _Draft | RowRefused:
    """A row whose learned turns are encoded apart from what stands before them."""
    turns = row.turns or ()
    opening = row.text[: turns[0][0]]
    if row.plain:
        ids = _plain_prompt(tokenizer, opening)
    else:
        ids = list(tokenizer.tokenizer.encode(opening, add_special_tokens=False).ids)
    ranges, words = [], []
    # Behind an added token a tokenizer puts no blank of its own before a text, as it may at the very beginning.
    anchor = next(iter(tokenizer.markers), "")
    for (start, end), after in zip(turns, [*(turn[0] for turn in turns[1:]), len(row.text)], strict=True):
        encoding = tokenizer.tokenizer.encode(anchor + row.text[start:after], add_special_tokens=False)
        skipped = bool(anchor)
        found = token_range(encoding, anchor + row.text[start:after], len(anchor), len(anchor) + end - start)
        if found is None:
            return RowRefused("", _DROPS_WORDS)
        ranges.append((len(ids), len(ids) + found[1] - skipped))
        words.append(row.text[start:end])
        ids += encoding.ids[skipped:]
    return _Draft(ids=ids, ranges=ranges, words=words)


def _encoded(tokenizer: TextTokenizer, row: Rendered, draft: _Draft) -> Encoded:
    ids = draft.ids
    labels = list(ids) if row.turns is None else [MASKED] * len(ids)
    for first, after in draft.ranges:
        labels[first:after] = ids[first:after]
    if row.plain:
        return _close_plain(tokenizer, ids, labels)
    closings = tuple(after - 1 for _, after in draft.ranges) if row.turns is not None else (len(ids) - 1,)
    return Encoded(input_ids=ids, labels=labels, closings=closings)


def _close_plain(tokenizer: TextTokenizer, ids: list[int], labels: list[int]) -> Encoded:
    """EOS at the end exactly once and learned, and BOS at the start where the tokenizer asks for it."""
    eos = need_eos(tokenizer)
    started = _with_start(tokenizer, ids)
    labels = [MASKED] * (len(started) - len(ids)) + labels
    if started[-1:] != [eos]:
        started, labels = [*started, eos], [*labels, eos]
    labels[-1] = eos
    return Encoded(input_ids=started, labels=labels, closings=(len(started) - 1,))


def _plain_prompt(tokenizer: TextTokenizer, text: str) -> list[int]:
    encoding = tokenizer.tokenizer.encode(text, add_special_tokens=True)
    return _without_end(tokenizer, _with_start(tokenizer, encoding.ids))


def _with_start(tokenizer: TextTokenizer, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_id
    return list(ids) if bos is None or ids[:1] == [bos] else [bos, *ids]


def _without_end(tokenizer: TextTokenizer, ids: list[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_id else ids


def need_eos(tokenizer: TextTokenizer) -> int:
    """The id of the end-of-sequence token.

    Raises:
        DataError: the tokenizer names none, so text would never end.
    """
    if tokenizer.eos_id is None:
        fix = "name eos_token in its tokenizer_config.json"
        raise DataError("the tokenizer has no end-of-sequence token", where=str(tokenizer.folder), fix=fix)
    return tokenizer.eos_id


def _unproved(tokenizer: TextTokenizer, drafts: Sequence[_Draft | RowRefused]) -> dict[int, RowRefused]:
    """The rows whose learned tokens do not decode to the text that was to be learned."""
    wanted: list[str] = []
    tokens: list[list[int]] = []
    owners: list[int] = []
    for number, draft in enumerate(drafts):
        if not isinstance(draft, RowRefused):
            wanted += draft.words
            tokens += [draft.ids[first:after] for first, after in draft.ranges]
            owners += [number] * len(draft.ranges)
    decoded = tokenizer.tokenizer.decode_batch(tokens, skip_special_tokens=False)
    return {
        number: RowRefused("", f"the learned tokens read {text[:60]!r} and not the assistant's words")
        for number, text, words in zip(owners, decoded, wanted, strict=True)
        if text != words and text.strip() != words.strip() and not _decodes_alike(tokenizer, text, words)
    }


def _decodes_alike(tokenizer: TextTokenizer, decoded: str, words: str) -> bool:
    """Whether the words come out the same when they go through the tokenizer alone (normalisers change text)."""
    ids = tokenizer.tokenizer.encode(words, add_special_tokens=False).ids
    through = tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
    return "".join(through.split()) == "".join(decoded.split())
